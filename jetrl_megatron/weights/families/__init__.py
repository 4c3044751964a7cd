"""Registry of model families: model_type of the HF config -> the rules of every parameter."""

from __future__ import annotations

from collections.abc import Callable

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.families import llama, qwen2, qwen3, qwen3_moe
from jetrl_megatron.weights.rules import Rule

FAMILIES: dict[str, Callable[[ModelDims], list[Rule]]] = {
    "llama": llama.rules,
    "qwen2": qwen2.rules,
    "qwen3": qwen3.rules,
    "qwen3_moe": qwen3_moe.rules,
}


def family_rules(dims: ModelDims) -> list[Rule]:
    """Rules of all parameters in HF layer order. Raises ValueError for an unknown model_type."""
    if dims.model_type not in FAMILIES:
        raise ValueError(f"model_type: {dims.model_type!r}; rule: one of {sorted(FAMILIES)}; fix: use a known family")
    return FAMILIES[dims.model_type](dims)
