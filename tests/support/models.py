"""Tiny random Hugging Face models of every family, and random state dicts with the names of transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DENSE_FAMILIES = ("llama", "qwen2", "qwen3")
FAMILIES = (*DENSE_FAMILIES, "qwen3_moe")

# q_size (512) != hidden, fewer kv heads than heads, several 128-blocks in every dimension.
DEFAULT_DIMS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
# Top-4: with two addends a sum has only one order.
MOE_DIMS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


def default_dims(family: str) -> dict[str, Any]:
    """DEFAULT_DIMS, with experts for a family that has them."""
    return {**DEFAULT_DIMS, **(MOE_DIMS if family == "qwen3_moe" else {})}


def hf_model(family: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **dims: Any) -> Any:
    """A transformers model of the family with `default_dims` updated by `dims` (names of config.json)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**default_dims(family), **dims})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def perturb(model: Any, seed: int) -> None:
    """Random weights from which every tensor can be told: norms around 1 but not 1, biases not 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (0.0, 0.08) if parameter.ndim >= 2 else (0.0 if name.endswith("bias") else 1.0, 0.1)
            std = 1.0 if "embed_tokens" in name else std
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(mean + std * noise)


def save_word_tokenizer(out: Path, vocab_size: int) -> None:
    """Word-level tokenizer: id 0 <eos>, 1 <pad>, 2 <unk>, i > 2 the word t{i}; words are separated by spaces.

    The words are added tokens besides, because for qwen2 transformers 5 puts its own byte-level BPE in place of
    whatever model the tokenizer has, and only added tokens survive that.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<pad>", "<unk>", *(f"t{i}" for i in range(3, vocab_size))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in words[3:]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(str(out))


def tiny_model(tmp_path_factory: pytest.TempPathFactory, family: str, seed: int = 0, **dims: Any) -> Path:
    """Directory of a tiny random bf16 model of `family` with a word-level tokenizer; `dims` update `default_dims`."""
    out = tmp_path_factory.mktemp(f"tiny_{family}")
    model = hf_model(family, **dims)
    perturb(model, seed)
    model.save_pretrained(str(out))
    save_word_tokenizer(out, model.config.vocab_size)
    return out


def per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' state dict with the stacked experts (gate and up rows in one tensor) under the names of published
    checkpoints, one tensor per projection of an expert."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        if not prefix.endswith(".experts"):
            out[name] = tensor
            continue
        for i in range(tensor.shape[0]):
            if leaf == "down_proj":
                out[f"{prefix}.{i}.down_proj.weight"] = tensor[i]
            else:
                half = tensor.shape[1] // 2
                out[f"{prefix}.{i}.gate_proj.weight"] = tensor[i, :half]
                out[f"{prefix}.{i}.up_proj.weight"] = tensor[i, half:]
    return out


def hf_shapes(family: str, **dims: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' own model, without lm_head if tied: an oracle for the plan."""
    model = hf_model(family, device="meta", **dims)
    shapes = {name: tuple(tensor.shape) for name, tensor in per_expert(model.state_dict()).items()}
    if model.config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def random_bits(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Uniform random bit patterns, NaNs included: only a bit-preserving conversion keeps them."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal dtype, shape and bytes; names the first byte that differs."""
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in (actual, expected)]
    assert kinds[0] == kinds[1], f"{what}: {kinds[0]} != {kinds[1]}"
    a, b = actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    if not torch.equal(a, b):
        raise AssertionError(
            f"{what}: first of {int((a != b).sum())} differing bytes at {(a != b).nonzero()[0].tolist()}"
        )
