"""Qwen2 and Qwen2.5: the shared decoder plus biases on q, k and v, interleaved as their weights are."""

from __future__ import annotations

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.families.common import decoder_rules, kv_head_units, qkv_tensors
from jetrl_megatron.weights.rules import Rule


def _qkv_bias(dims: ModelDims, layer: int) -> list[Rule]:
    name = f"decoder.layers.{layer}.self_attention.linear_qkv.bias"
    return [Rule(name, qkv_tensors(dims, layer, "bias"), "qkv", 0, kv_head_units(dims))]


def rules(dims: ModelDims) -> list[Rule]:
    return decoder_rules(dims, _qkv_bias)
