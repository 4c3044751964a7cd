"""Qwen3 (dense): the shared decoder plus RMS norms over head_dim on q and k."""

from __future__ import annotations

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.families.common import decoder_rules, replicated
from jetrl_megatron.weights.rules import Rule


def qk_norms(dims: ModelDims, layer: int) -> list[Rule]:
    """Norms over head_dim of q and k of decoder layer `layer`."""
    mcore, hf = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    return [replicated(mcore + f"{n}_layernorm.weight", hf + f"{n}_norm.weight", dims.head_dim) for n in ("q", "k")]


def rules(dims: ModelDims) -> list[Rule]:
    return decoder_rules(dims, qk_norms)
