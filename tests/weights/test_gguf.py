"""SmolLM2-135M-Instruct from GGUF: the converted model speaks, and stops where its chat template says."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.gguf import convert_gguf
from jetrl_megatron.weights.io import HfCheckpoint
from jetrl_megatron.weights.plan import ConversionPlan


@pytest.mark.slow
def test_smollm2_speaks(smollm2_dir: Path) -> None:
    """A wrong q/k row permutation or a wrong tokenizer gives nonsense: the right ones give Paris."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = HfCheckpoint(smollm2_dir)
    assert "quantization_config" not in read.config
    assert read.config["architectures"] == ["LlamaForCausalLM"]
    read.verify(ConversionPlan(ModelDims.from_hf(read.config)))
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris")
    chat = [{"role": "user", "content": "What is 2 + 2? Answer with one number."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert out[-1] == model.generation_config.eos_token_id
    assert "4" in tokenizer.decode(out)


@pytest.mark.slow
def test_smollm2_tokenizer_splits_digits(smollm2_dir: Path) -> None:
    """As llama.cpp's `smollm` pre-tokenizer: digits stand alone, so the spaces before them stay together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.tokenize("a   123 b") == ["a", "\u0120\u0120\u0120", "1", "2", "3", "\u0120b"]
    assert tokenizer.model_max_length == 8192
    assert tokenizer.chat_template


def test_sources_without_exactly_one_gguf_are_refused(tmp_path: Path) -> None:
    """A missing file, an empty directory, two GGUFs and a file that is no archive are errors that name the source."""
    with pytest.raises(ValueError, match="no such file"):
        convert_gguf(tmp_path / "absent.whl", tmp_path / "out")
    with pytest.raises(ValueError, match=r"GGUF files \[\]; rule: exactly one"):
        convert_gguf(tmp_path, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "two.whl", "w") as archive:
        archive.writestr("a.gguf", b"")
        archive.writestr("deep/b.gguf", b"")
    with pytest.raises(ValueError, match=r"two.whl: GGUF files \['a.gguf', 'b.gguf'\]"):
        convert_gguf(tmp_path / "two.whl", tmp_path / "out")
    (tmp_path / "not.whl").write_bytes(b"text")
    with pytest.raises(ValueError, match="not a zip archive"):
        convert_gguf(tmp_path / "not.whl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
