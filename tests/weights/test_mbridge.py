"""Our rules against mbridge's, bit for bit: names, layout of every parameter, its shards, and the way back.

mbridge's functions for tensors are used without its process groups and model. Its norms have the names of fused
modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.plan import ConversionPlan
from tests.support.models import DENSE_FAMILIES, assert_same_bits, default_dims, hf_shapes, random_bits

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
DIMS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def bridge(family: str, dims: dict[str, Any], tp: int) -> Any:
    """An mbridge of the family that only knows the model's configuration."""
    from mbridge.models import llama, qwen2, qwen3

    kinds = {"llama": llama.LLaMABridge, "qwen2": qwen2.Qwen2Bridge, "qwen3": qwen3.Qwen3Bridge}
    made = object.__new__(kinds[family])
    made.hf_config = SimpleNamespace(**dims)
    made.config = SimpleNamespace(gated_linear_unit=True)
    made.mpu = SimpleNamespace(tp_size=tp, etp_size=1)
    made.dtype = made.make_vocab_size_divisible_by = None
    return made


def their_name(name: str) -> str:
    for ours, theirs in FUSED_NORMS.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_mbridge_agrees(family: str, tp: int) -> None:
    """Every parameter of the model: HF names, unsharded tensor, shards, and HF tensors made from the shards."""
    dims = {**default_dims(family), **DIMS}
    state = {name: random_bits(shape, i) for i, (name, shape) in enumerate(hf_shapes(family, **DIMS).items())}
    theirs, plan = bridge(family, dims, tp), ConversionPlan(ModelDims.from_hf({**dims, "model_type": family}))
    for rule in plan.rules:
        name, parts = their_name(rule.megatron_name), [state[hf.name] for hf in rule.hf]
        assert theirs._weight_name_mapping_mcore_to_hf(name) == [hf.name for hf in rule.hf]
        shards = rule.to_megatron(parts, tp)
        whole = theirs._weight_to_mcore_format(name, parts)
        assert_same_bits(rule.to_megatron(parts, 1)[0], whole, name)
        for ours, shard in zip(shards, theirs._weight_split_across_tp(name, whole, shards[0], tp), strict=True):
            assert_same_bits(ours, shard, name)
        names, tensors = theirs._weight_to_hf_format(name, joined(theirs, name, shards, rule.tp_dim))
        assert names == [hf.name for hf in rule.hf]
        for hf_name, tensor in zip(names, tensors, strict=True):
            assert_same_bits(tensor, state[hf_name], hf_name)


def joined(theirs: Any, name: str, shards: list[Tensor], dim: int | None) -> Tensor:
    """Our shards joined by mbridge; of a replicated parameter its exporter takes the first."""
    if dim is None:
        return shards[0]
    marked = SimpleNamespace(tensor_model_parallel=True, partition_dim=dim)
    merged: Tensor = theirs._weight_merge_across_tp(name, shards, marked)
    return merged
