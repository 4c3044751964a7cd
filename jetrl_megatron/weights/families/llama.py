"""Llama 2/3 and architectures equal to it (SmolLM2)."""

from __future__ import annotations

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.families.common import decoder_rules
from jetrl_megatron.weights.rules import Rule


def rules(dims: ModelDims) -> list[Rule]:
    """The shared decoder, nothing more."""
    return decoder_rules(dims)
