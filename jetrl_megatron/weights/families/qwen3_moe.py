"""Qwen3-MoE: Qwen3 attention; in place of the MLP a BF16 router and experts, one set of HF tensors per expert.

Checkpoints that stack the experts (`mlp.experts.gate_up_proj`) are read under these names too: `HfCheckpoint`.
"""

from __future__ import annotations

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.families.common import decoder_rules, gated_mlp_tensors
from jetrl_megatron.weights.families.qwen3 import qk_norms
from jetrl_megatron.weights.rules import HfTensor, Rule


def _experts(dims: ModelDims, layer: int) -> list[Rule]:
    """Router and experts; every tensor-parallel rank that holds an expert holds all of it."""
    assert dims.moe is not None
    mcore, hf = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    rules = [Rule(mcore + "router.weight", (HfTensor(hf + "gate.weight", (dims.moe.num_experts, dims.hidden_size)),))]
    for expert in range(dims.moe.num_experts):
        local = f"{mcore}experts.local_experts.{expert}."
        gate_up, down = gated_mlp_tensors(f"{hf}experts.{expert}.", dims.hidden_size, dims.moe.intermediate_size)
        rules.append(Rule(local + "linear_fc1.weight", gate_up, "gate_up", quantized=True))
        rules.append(Rule(local + "linear_fc2.weight", down, quantized=True))
    return rules


def rules(dims: ModelDims) -> list[Rule]:
    return decoder_rules(dims, qk_norms, _experts)
