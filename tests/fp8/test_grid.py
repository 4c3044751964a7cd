"""The block grid belongs to the unsharded Hugging Face tensor, whatever layout a weight is held in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.fp8 import Fp8Format, Fp8Tensor, GridSlice, quantize_weight
from jetrl_megatron.weights.plan import ConversionPlan
from jetrl_megatron.weights.rules import Rule
from tests.support.models import FAMILIES, assert_same_bits, default_dims
from tests.support.oracles import codes_of, quantize_blocks, spread

# name: (dims, TP sizes, whether some row block is cut by some shard)
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "aligned": ({"num_attention_heads": 8, "num_key_value_heads": 4}, (1, 2, 4), False),
    "head_dim 64": (
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 640},
        (1, 2, 4),
        True,
    ),
    "ragged": (
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40, "hidden_size": 200},
        (1, 2),
        True,
    ),
}


def slices_of(rule: Rule, tp: int, rank: int) -> list[GridSlice]:
    return [GridSlice(s.local_rows, s.hf_start, s.hf_rows) for s in rule.local_segments(tp, rank)]


def quantize_shards(rule: Rule, parts: list[Tensor], tp: int, fmt: Fp8Format, share: bool) -> list[Fp8Tensor]:
    """Every rank quantizes its own shard; `share`: where rows are split, the ranks' amax grids meet in a maximum, as in
    the all-reduce (column shards hold different columns of the grid)."""
    shards, slices = rule.to_megatron(parts, tp), [slices_of(rule, tp, rank) for rank in range(tp)]
    if not share or rule.tp_dim != 0:
        return [quantize_weight(w, fmt, s) for w, s in zip(shards, slices, strict=True)]
    seen: list[list[Tensor]] = [[] for _ in range(tp)]
    for rank in range(tp):

        def listen(grid: Tensor, rank: int = rank) -> Tensor:
            seen[rank].append(grid.clone())
            return grid

        quantize_weight(shards[rank], fmt, slices[rank], listen)
    shared = [torch.stack(grids).amax(0) for grids in zip(*seen, strict=True)]

    def answer() -> Callable[[Tensor], Tensor]:
        left = list(shared)
        return lambda _grid: left.pop(0)

    return [quantize_weight(w, fmt, s, answer()) for w, s in zip(shards, slices, strict=True)]


def quantized_rules(family: str, dims: dict[str, Any]) -> list[Rule]:
    config = {**default_dims(family), "num_hidden_layers": 1, **dims, "model_type": family}
    return [rule for rule in ConversionPlan(ModelDims.from_hf(config)).rules if rule.quantized]


def columns_are_aligned(rule: Rule, tp: int) -> bool:
    """A column shard that cuts a 1x128 group has no such scales; configurations like that are refused elsewhere."""
    return rule.tp_dim != 1 or tp == 1 or (rule.hf[0].shape[1] // tp) % 128 == 0


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_then_shard_is_shard_then_quantize(family: str, layout: str, scale_format: str) -> None:
    """For every quantized rule and TP size, a rank that quantizes its own shard (amax shared over ranks) holds bitwise
    the codes and scales of the oracle's full Hugging Face tensors, cut by the rule; and gathers back to them."""
    dims, sizes, _ = LAYOUTS[layout]
    fmt = Fp8Format("block", scale_format)
    compared = 0
    for rule in quantized_rules(family, dims):
        parts = [spread(hf.shape, seed).bfloat16() for seed, hf in enumerate(rule.hf)]
        full = [quantize_blocks(part.float().numpy(), 128, scale_format) for part in parts]
        codes, scales = ([torch.from_numpy(q[i]) for q in full] for i in (0, 1))
        for tp in sizes:
            if not columns_are_aligned(rule, tp):
                continue
            shards = quantize_shards(rule, parts, tp, fmt, share=True)
            expected = zip(rule.to_megatron(codes, tp), rule.to_megatron(scales, tp), strict=True)
            for shard, (shard_codes, shard_scales) in zip(shards, expected, strict=True):
                assert_same_bits(torch.from_numpy(codes_of(shard.data)), shard_codes, rule.megatron_name)
                assert_same_bits(shard.scale, shard_scales, rule.megatron_name)
            for back, scale in zip(rule.to_hf([s.scale for s in shards]), scales, strict=True):
                assert_same_bits(back, scale, rule.megatron_name)
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_blocks_need_the_shared_amax(layout: str) -> None:
    """Negative control: without the shared amax, exactly the layouts that cut blocks give other scales."""
    dims, sizes, cuts = LAYOUTS[layout]
    differs = False
    for rule in quantized_rules("llama", dims):
        parts = [spread(hf.shape, seed).bfloat16() for seed, hf in enumerate(rule.hf)]
        for tp in sizes:
            if not columns_are_aligned(rule, tp):
                continue
            alone = quantize_shards(rule, parts, tp, Fp8Format(), share=False)
            together = quantize_shards(rule, parts, tp, Fp8Format(), share=True)
            differs |= any(not torch.equal(a.scale, b.scale) for a, b in zip(alone, together, strict=True))
    assert differs == cuts


def test_a_fused_weight_is_not_one_matrix() -> None:
    """Negative control: quantizing fused qkv of head_dim 64 as one matrix mixes q and k in a block: other scales."""
    rule = next(r for r in quantized_rules("llama", LAYOUTS["head_dim 64"][0]) if len(r.hf) == 3)
    parts = [spread(hf.shape, seed).bfloat16() * 4.0**seed for seed, hf in enumerate(rule.hf)]
    (fused,) = rule.to_megatron(parts, 1)
    by_grid = quantize_weight(fused, Fp8Format(), slices_of(rule, 1, 0))
    assert not torch.equal(by_grid.scale, quantize_weight(fused, Fp8Format()).scale)
