"""Tiny checkpoints to convert, and reading folders back without the package's own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.support.models import assert_same_bits, hf_model, perturb, save_word_tokenizer

VOCAB = 509  # prime: padded at every TP size
# Shards of TP 2 and 4 cut blocks along rows (kv 64-row heads, 320 and 160 rows) and along columns (160).
DIMS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def tiny(out: Path, family: str, **dims: Any) -> Path:
    """A random bf16 model with a word-level tokenizer."""
    model = hf_model(family, **{**DIMS, **dims})
    perturb(model, seed=7)
    model.save_pretrained(str(out))
    save_word_tokenizer(out, VOCAB)
    return out


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of safetensors files."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same(actual: Path, expected: Path) -> None:
    """The same tensors, bit for bit."""
    a, b = read(actual), read(expected)
    assert a.keys() == b.keys()
    for name in b:
        assert_same_bits(a[name], b[name], name)
