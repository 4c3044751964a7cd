"""Rules: HF -> Megatron -> HF on tensors, checked against index formulas written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.plan import ConversionPlan
from jetrl_megatron.weights.rules import HfTensor, Rule, Units
from tests.support.models import FAMILIES, assert_same_bits, default_dims, hf_shapes, random_bits

# 8 heads of 24 = 192 != hidden, 4 kv heads, vocabulary not a multiple of 2 or 4
SMALL: dict[str, Any] = {
    "hidden_size": 80,
    "intermediate_size": 136,
    "moe_intermediate_size": 72,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "vocab_size": 101,
}
TP_SIZES = (1, 2, 4)


def plan_of(family: str, **dims: Any) -> ConversionPlan:
    return ConversionPlan(ModelDims.from_hf({**default_dims(family), **dims, "model_type": family}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit(family: str, tp: int, tied: bool) -> None:
    """HF -> tp shards -> HF is the identity on random bit patterns, for the names of transformers' own model."""
    dims = {**SMALL, "tie_word_embeddings": tied}
    shapes = hf_shapes(family, **dims)
    state = {name: random_bits(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    plan = plan_of(family, **dims)
    plan.check_names(state)
    back: dict[str, Tensor] = {}
    for rule in plan.rules:
        shards = rule.to_megatron([state[hf.name] for hf in rule.hf], tp)
        assert [tuple(s.shape) for s in shards] == [rule.megatron_shape(tp)] * tp
        back.update(zip([hf.name for hf in rule.hf], rule.to_hf(shards), strict=True))
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert_same_bits(back[name], tensor, name)


def row_oracle(rule: Rule, dims: dict[str, Any], tp: int, rank: int) -> list[tuple[int, int]]:
    """(HF tensor number, HF row) of each local row, counted row by row from Megatron's layout; (-1, -1) is padding."""
    heads, groups, size = dims["num_attention_heads"], dims["num_key_value_heads"], dims["head_dim"]
    rows: list[tuple[int, int]] = []
    if "linear_qkv" in rule.megatron_name:
        q_rows = np.arange(heads * size).reshape(groups, heads // groups, size)
        kv_rows = np.arange(groups * size).reshape(groups, size)
        for group in np.split(np.arange(groups), tp)[rank]:
            for head in q_rows[group]:
                rows += [(0, int(row)) for row in head]
            rows += [(part, int(row)) for part in (1, 2) for row in kv_rows[group]]
    elif "local_experts" in rule.megatron_name and "linear_fc1" in rule.megatron_name:  # never cut
        rows = [(part, row) for part in (0, 1) for row in range(dims["moe_intermediate_size"])]
    elif "linear_fc1" in rule.megatron_name:
        local = np.split(np.arange(dims["intermediate_size"]), tp)[rank]
        rows = [(part, int(row)) for part in (0, 1) for row in local]
    elif "embedding" in rule.megatron_name or "output_layer" in rule.megatron_name:
        vocab = dims["vocab_size"]
        per_rank = (vocab + tp - 1) // tp
        rows = [(0, row) if row < vocab else (-1, -1) for row in range(rank * per_rank, (rank + 1) * per_rank)]
    else:
        rows = [(0, row) for row in range(rule.hf[0].shape[0])]
    return rows


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_megatrons(family: str, tp: int) -> None:
    """Each row of each shard is the HF row that Megatron's layout puts there (grouped qkv, gate then up, padding)."""
    for rule in plan_of(family, num_hidden_layers=1, **SMALL).rules:
        parts = [random_bits(hf.shape, seed) for seed, hf in enumerate(rule.hf)]
        for rank, shard in enumerate(rule.to_megatron(parts, tp)):
            expected = torch.stack(
                [torch.zeros_like(parts[0][0]) if p < 0 else parts[p][r] for p, r in row_oracle(rule, SMALL, tp, rank)]
            )
            if rule.megatron_name.endswith(("linear_proj.weight", "mlp.linear_fc2.weight")):
                width = expected.shape[1] // tp
                expected = expected[:, rank * width : (rank + 1) * width]
            assert_same_bits(shard, expected, f"{rule.megatron_name} rank {rank}")


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_segments_cover_each_hf_row_once(family: str, tp: int) -> None:
    """Over all ranks the segments of a row-sharded tensor cover each HF row exactly once, with that row's values."""
    for rule in plan_of(family, num_hidden_layers=1, **SMALL).rules:
        parts = {hf.name: random_bits(hf.shape, seed) for seed, hf in enumerate(rule.hf)}
        seen = {name: torch.zeros(part.shape[0], dtype=torch.int64) for name, part in parts.items()}
        for rank, shard in enumerate(rule.to_megatron(list(parts.values()), tp)):
            for segment in rule.local_segments(tp, rank):
                stop = segment.hf_start + len(segment.local_rows)
                rows = parts[segment.hf_name][segment.hf_start : stop]
                if rule.tp_dim == 1:
                    first = segment.hf_col_start
                    rows = rows[:, first : first + shard.shape[1]]
                assert_same_bits(shard[segment.local_rows], rows, segment.hf_name)
                assert segment.hf_rows == parts[segment.hf_name].shape[0]
                seen[segment.hf_name][segment.hf_start : stop] += 1
        for name, count in seen.items():
            assert bool((count == (1 if rule.tp_dim == 0 else tp)).all()), name


@pytest.mark.parametrize("tp", TP_SIZES)
def test_codes_and_row_scales_follow_their_weight(tp: int) -> None:
    """FP8 codes [N, K] and row-expanded scales [N, ceil(K/128)] are sharded as the weight is, and come back."""
    plan = plan_of("qwen3", num_hidden_layers=1, hidden_size=320, intermediate_size=1024, num_key_value_heads=4)
    for rule in (rule for rule in plan.rules if rule.quantized):
        codes = [random_bits(hf.shape, 1 + i, torch.float8_e4m3fn) for i, hf in enumerate(rule.hf)]
        scales = [
            random_bits((hf.shape[0], -(-hf.shape[1] // 128)), 9 + i, torch.float32) for i, hf in enumerate(rule.hf)
        ]
        code_shards, scale_shards = rule.to_megatron(codes, tp), rule.to_megatron(scales, tp)
        for rank, (code, scale) in enumerate(zip(code_shards, scale_shards, strict=True)):
            for segment in rule.local_segments(tp, rank):
                part = [hf.name for hf in rule.hf].index(segment.hf_name)
                for i in (0, len(segment.local_rows) - 1):
                    for k in (0, code.shape[1] - 1):  # the code of a local element meets the scale of its HF block
                        column = segment.hf_col_start + k
                        local_block = column // 128 - segment.hf_col_start // 128
                        actual = scale[segment.local_rows[i], local_block].view(torch.int32)
                        assert actual == scales[part][segment.hf_start + i, column // 128].view(torch.int32)
        for originals, shards in ((codes, code_shards), (scales, scale_shards)):
            for hf, original, back in zip(rule.hf, originals, rule.to_hf(shards), strict=True):
                assert_same_bits(back, original, hf.name)


def test_a_cut_block_is_shared_and_must_agree() -> None:
    """576 columns over 3 ranks cut the 128-blocks 1 and 3: both neighbours get them, and to_hf refuses two values."""
    rule = Rule("w", (HfTensor("x.weight", (4, 576)),), "plain", 1, Units("intermediate_size", 576))
    scale = torch.arange(4.0 * 5).reshape(4, 5)
    shards = rule.to_megatron([scale], 3)
    assert [shard[0].tolist() for shard in shards] == [[0.0, 1.0], [1.0, 2.0], [3.0, 4.0]]
    assert_same_bits(rule.to_hf(shards)[0], scale, "x.weight")
    broken = [shard.clone() for shard in shards]
    broken[1][2, 0] += 1
    with pytest.raises(ValueError, match=r"x.weight: TP ranks 0 and 1 disagree on block column 1"):
        rule.to_hf(broken)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("vocab", [1, 4, 101, 128])
def test_vocabulary_padding_is_that_of_the_dims(vocab: int, tp: int) -> None:
    """Rules pad as ModelDims says, also where whole ranks hold nothing but padding; exports cut it."""
    plan = plan_of("llama", vocab_size=vocab, hidden_size=8)
    rule = plan.rule_for("embedding.word_embeddings.weight")
    assert rule.megatron_shape(tp)[0] * tp == plan.dims.padded_vocab_size(tp)
    table = random_bits((vocab, 8), 0)
    assert_same_bits(rule.to_hf(rule.to_megatron([table], tp))[0], table, rule.hf[0].name)


def test_errors_name_tensor_shape_and_what_works() -> None:
    """Wrong shapes, dtypes, part counts and TP sizes are errors that say what was expected."""
    plan = plan_of("qwen2", num_hidden_layers=1, **SMALL)
    qkv = plan.rule_for("decoder.layers.0.self_attention.linear_qkv.weight")
    parts = [random_bits(hf.shape, 0) for hf in qkv.hf]
    with pytest.raises(ValueError, match=r"k_proj.weight: shape \[95, 80\]; rule: expected \[96, 80\]"):
        qkv.to_megatron([parts[0], parts[1][:95], parts[2]], 2)
    with pytest.raises(ValueError, match="one dtype"):
        qkv.to_megatron([parts[0], parts[1].float(), parts[2]], 2)
    with pytest.raises(ValueError, match="2 tensors given"):
        qkv.to_megatron(parts[:2], 2)
    shards = qkv.to_megatron(parts, 2)
    with pytest.raises(ValueError, match=r"rank 1\): shape \[191, 80\]; rule: expected \[192, 80\]"):
        qkv.to_hf([shards[0], shards[1][:191]])
    with pytest.raises(ValueError, match=r"num_key_value_heads \(4\).*q_proj.*\{1, 2, 4\}"):
        plan.check_tensor_parallel(8)
    with pytest.raises(ValueError, match="at least 1"):
        qkv.to_megatron(parts, 0)
    with pytest.raises(ValueError, match="kind 'rows'"):
        Rule("w", (HfTensor("x", (2, 2)),), "rows", 0)
