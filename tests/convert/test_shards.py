"""FP8 shards per rank: each one as its rank would have quantized it; cutting elsewhere changes no byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, GridSlice, quantize_weight
from jetrl_megatron.fp8.quantize import group_amax
from jetrl_megatron.weights.convert.layout import Layout
from jetrl_megatron.weights.convert.precision import bf16_to_fp8
from jetrl_megatron.weights.convert.ranks import Shards, hf_to_shards, reshard_shards, shards_to_hf
from jetrl_megatron.weights.rules import Rule
from tests.convert.conftest import Models
from tests.convert.support import assert_same, read
from tests.support.models import FAMILIES, assert_same_bits

FP8 = Fp8Format()
TP4, TP2, TP1 = Layout(tensor=4), Layout(tensor=2), Layout()


def quantized_on_its_rank(rule: Rule, weights: list[Tensor], tp: int, rank: int) -> tuple[Tensor, Tensor]:
    """Shard first, quantize then: row shards share the amax of cut blocks with the other ranks, as training does."""
    shards = rule.to_megatron(weights, tp)
    if rule.tp_dim == 1:
        return quantized_columns(shards, rank)
    segments = [rule.local_segments(tp, other) for other in range(tp)]
    slices = [GridSlice(s.local_rows, s.hf_start, s.hf_rows) for s in segments[rank]]
    grids = iter([whole_grid(shards, [part[i] for part in segments]) for i in range(len(slices))])
    quantized = quantize_weight(shards[rank], FP8, slices, lambda _grid: next(grids))
    return quantized.data, quantized.scale


def whole_grid(shards: list[Tensor], segments: list) -> Tensor:
    """amax of one HF tensor's blocks over all ranks: [ceil(N/128), G]."""
    rows = torch.cat([group_amax(shard)[s.local_rows] for shard, s in zip(shards, segments, strict=True)])
    return torch.stack([block.amax(0) for block in rows.split(128)])


def quantized_columns(shards: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Column shards with the columns of cut blocks from their neighbours."""
    width = shards[0].shape[1]
    start, stop = rank * width, (rank + 1) * width
    first, last = start // 128 * 128, min(-(-stop // 128) * 128, width * len(shards))
    neighbourhood = torch.cat(shards, 1)[:, first:last]
    quantized = quantize_weight(neighbourhood, FP8)
    return quantized.data[:, start - first : stop - first], quantized.scale


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_if_quantized_on_the_rank(tmp_path: Path, models: Models, family: str, tp: int) -> None:
    """Codes and scales of every shard are those that its rank computes from its own rows; the rest is cut as it is."""
    hf_to_shards(models(family), tmp_path / "out", Layout(tensor=tp)).run()
    plan, weights = Shards(tmp_path / "out").plan, read(models(family))
    for rank in range(tp):
        held = load_file(tmp_path / "out" / f"dense_tp{rank}_pp0.safetensors")
        if plan.dims.moe is not None and rank == 0:
            held |= load_file(tmp_path / "out" / "experts_ep0_pp0.safetensors")
        for rule in plan.rules:
            if rule.megatron_name not in held:
                continue
            parts, name = [weights[hf.name] for hf in rule.hf], rule.megatron_name
            if rule.quantized:
                codes, scale = quantized_on_its_rank(rule, parts, tp if rule.tp_dim is not None else 1, rank)
                assert_same_bits(held.pop(name), codes, name)
                assert_same_bits(held.pop(name + "_scale"), scale, name)
            else:
                assert_same_bits(held.pop(name), rule.to_megatron_shard(parts, tp, rank), name)
        assert not held


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "qwen3_moe"])
def test_resharding(tmp_path: Path, models: Models, family: str) -> None:
    """TP 2 -> TP 4 -> TP 1 and other pipeline and expert sizes: every file is the one of a direct conversion, and all
    lead to the FP8 checkpoint that bf16_to_fp8 writes."""
    source, experts = models(family), 2 if family == "qwen3_moe" else 1
    hf_to_shards(source, tmp_path / "tp2", Layout(2, 2, experts)).run()
    last = tmp_path / "tp2"
    for name, layout in (("tp4", Layout(4, 1, experts)), ("tp1", Layout(1, 4, 1))):
        reshard_shards(last, tmp_path / name, layout).run()
        hf_to_shards(source, tmp_path / f"direct {name}", layout).run()
        files = sorted(file.name for file in (tmp_path / name).glob("*.*"))
        assert files == sorted(file.name for file in (tmp_path / f"direct {name}").glob("*.*"))
        for file in files:
            assert (tmp_path / name / file).read_bytes() == (tmp_path / f"direct {name}" / file).read_bytes(), file
        last = tmp_path / name
    bf16_to_fp8(source, tmp_path / "expected").run()
    for name in ("tp2", "tp4", "tp1"):
        shards_to_hf(tmp_path / name, tmp_path / f"hf {name}").run()
        assert_same(tmp_path / f"hf {name}", tmp_path / "expected")
        configs = [(tmp_path / folder / "config.json").read_text() for folder in (f"hf {name}", "expected")]
        assert json.loads(configs[0]) == json.loads(configs[1])


def test_fp8_checkpoints_are_taken_over(tmp_path: Path, models: Models) -> None:
    """An FP8 checkpoint gives the shards of the BF16 checkpoint that it was made from: nothing is quantized twice."""
    bf16_to_fp8(models("llama"), tmp_path / "fp8").run()
    hf_to_shards(tmp_path / "fp8", tmp_path / "a", TP2).run()
    hf_to_shards(models("llama"), tmp_path / "b", TP2).run()
    assert_same(tmp_path / "a", tmp_path / "b")


def test_layout_file_says_where_blocks_lie(tmp_path: Path, models: Models) -> None:
    """Rows, columns, blocks and cuts of a fused qkv and of a column shard at TP 4, by hand."""
    hf_to_shards(models("llama"), tmp_path / "out", TP4).run()
    meta = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert {key: meta[key] for key in ("tensor", "pipeline", "expert")} == {"tensor": 4, "pipeline": 1, "expert": 1}
    prefix = "decoder.layers.2."
    q, k, _v = meta["tensors"][prefix + "self_attention.linear_qkv.weight"][1]  # 2 of 8 heads, 1 of 4 kv heads
    assert (q["rows"], q["block_rows"], q["cut"]) == ([128, 256], [1, 2], False)
    assert (k["rows"], k["block_rows"], k["cut"]) == ([64, 128], [0, 1], True)
    assert k["hf"] == "model.layers.2.self_attn.k_proj.weight"
    (down,) = meta["tensors"][prefix + "mlp.linear_fc2.weight"][3]  # columns 480 .. 640
    assert (down["rows"], down["columns"], down["block_columns"]) == ([0, 256], [480, 640], [3, 5])
    assert down["cut"]
