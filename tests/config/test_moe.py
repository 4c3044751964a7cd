"""Configurations of mixture-of-experts models: what is read, planned and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.config import ModelDims, RunConfig, check_model, plan_rows
from jetrl_megatron.config.checkpoint_files import check_tensors
from jetrl_megatron.config.schema import ParallelConfig
from tests.config.conftest import TINY, hf_shapes, write_weights

# dims of Qwen3-30B-A3B's config.json
A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def lines(dims: ModelDims, emulated: bool = True, **sections: dict[str, Any]) -> list[str]:
    cfg = RunConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})
    return [str(violation) for violation in check_model(cfg, dims, emulated=emulated)]


def test_dims_of_a_published_model() -> None:
    """Experts are read from either spelling of their number; a dense model has none."""
    dims = ModelDims.from_hf(A3B)
    assert dims.moe is not None
    assert (dims.moe.num_experts, dims.moe.experts_per_token, dims.moe.intermediate_size) == (128, 8, 768)
    assert dims.moe.renormalize
    other = {**A3B, "num_local_experts": 128}
    del other["num_experts"]
    assert ModelDims.from_hf(other) == dims
    assert ModelDims.from_hf({**A3B, "model_type": "qwen3"}).moe is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2; rule: 1, every layer has experts"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: \[0\]; rule: \[\], every layer has experts"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok: 129; rule: at most num_experts \(128\)"),
        ({"num_experts": None}, "num_experts: missing|num_local_experts: missing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: 0; rule: a positive integer"),
    ],
)
def test_refused_architectures(changes: dict[str, Any], message: str) -> None:
    """Key, value, rule and fix of what is not supported."""
    with pytest.raises(ValueError, match=message):
        ModelDims.from_hf({**A3B, **changes})


def test_experts_are_cut_by_the_engine_only() -> None:
    """Training holds whole experts at any TP; an engine cuts them, unless it shares them out."""
    dims = ModelDims.from_hf(A3B)
    for expert_parallel, width in ((1, 384), (2, 768)):
        cfg = RunConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "parallel": {"tensor": 2, "sequence": True},
                "rollout": {"tensor_parallel": 2, "expert_parallel": expert_parallel},
            }
        )
        rows = {row.linear.name: row for row in plan_rows(cfg, dims)}
        assert (rows["mlp.experts.down_proj"].train.n, rows["mlp.experts.down_proj"].train.k) == (2048, 768)
        assert rows["mlp.experts.down_proj"].engine.k == width
        assert rows["mlp.experts.gate_proj"].engine.n == width
        assert rows["self_attn.o_proj"].train.k == 2048
        assert check_model(cfg, dims) == []


def test_cut_experts_are_refused_with_the_sizes_that_work() -> None:
    """768 / 4 = 192 cuts an activation block: expert parallelism instead."""
    dims = ModelDims.from_hf(A3B)
    (line,) = lines(dims, rollout={"tensor_parallel": 4}, parallel={"tp_invariant": True})
    assert line.startswith("rollout.tensor_parallel: 4 with mlp.experts.down_proj [2048, 768]")
    assert "TP sizes that work: 1, 2;" in line
    assert line.endswith("or rollout.expert_parallel=4")
    assert lines(dims, rollout={"tensor_parallel": 4, "expert_parallel": 4}) == []
    local = {"precision": {"misaligned": "shard_local"}, "parallel": {"tp_invariant": False}}
    assert line in lines(dims, rollout={"tensor_parallel": 4}, **local)  # training has whole experts: no grid in common


@pytest.mark.parametrize(
    ("sections", "start"),
    [
        ({"parallel": {"expert": 3}}, "parallel.expert: 3; rule: divides num_experts (128)"),
        (
            {"parallel": {"tensor": 2}},
            "parallel.sequence: false; rule: true with experts and parallel.tensor=2",
        ),
        (
            {"rollout": {"tensor_parallel": 4, "expert_parallel": 2}},
            "rollout.expert_parallel: 2; rule: 1 or rollout.tensor_parallel (4)",
        ),
    ],
)
def test_layout_rules(sections: dict[str, Any], start: str) -> None:
    assert any(line.startswith(start) for line in lines(ModelDims.from_hf(A3B), **sections))


def test_cut_experts_need_invariant_sums_when_exactness_is_required() -> None:
    """Equal TP is not enough for experts: training sums each of them in one chain."""
    dims = ModelDims.from_hf(A3B)
    training = {"tensor": 2, "sequence": True, "tp_invariant": False}
    (line,) = lines(dims, parallel=training, rollout={"tensor_parallel": 2})
    assert line.startswith("rollout.expert_parallel: 1 with rollout.tensor_parallel=2; rule: mismatch.require_exact")
    assert lines(dims, parallel=training, rollout={"tensor_parallel": 2, "expert_parallel": 2}) == []
    assert lines(dims, parallel={**training, "tp_invariant": True}, rollout={"tensor_parallel": 2}) == []
    bf16 = {"train": "bf16", "rollout": "bf16"}  # exact sums on the emulated backend, not on a GPU
    assert lines(dims, parallel=training, rollout={"tensor_parallel": 2}, precision=bf16) == []
    assert lines(dims, emulated=False, parallel=training, rollout={"tensor_parallel": 2}, precision=bf16) == [line]


def test_ranks_that_share_the_experts() -> None:
    """The expert-parallel size divides tensor * data; the least data-parallel size follows from it."""
    assert [ParallelConfig(expert=4, tensor=t, sequence=t > 1).least_data for t in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match=r"expert: 4; rule: divides tensor \* data \(2\).*multiple of 4"):
        ParallelConfig(expert=4, data=2)


@pytest.mark.parametrize("stacked", [False, True])
def test_weights_are_checked_by_expert(hf_folder: Callable[..., Path], stacked: bool) -> None:
    """A whole checkpoint passes in both layouts; a missing expert and a router of another shape are named."""
    folder = hf_folder(**EXPERTS)
    dims = ModelDims.from_hf(json.loads((folder / "config.json").read_text()))
    shapes = hf_shapes({**TINY, **EXPERTS})
    if stacked:
        shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        for layer in range(2):
            shapes[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (4, 256, 128)
            shapes[f"model.layers.{layer}.mlp.experts.down_proj"] = (4, 128, 128)
        write_weights(folder / "model.safetensors", shapes)
    assert list(check_tensors(folder, dims)) == []
    if stacked:
        shapes["model.layers.1.mlp.experts.down_proj"] = (3, 128, 128)
    else:
        del shapes["model.layers.1.mlp.experts.3.down_proj.weight"]
    shapes["model.layers.0.mlp.gate.weight"] = (5, 128)
    write_weights(folder / "model.safetensors", shapes)
    missing, wrong = map(str, check_tensors(folder, dims))
    assert "lacks model.layers.1.mlp.experts.3.down_proj.weight" in missing
    assert "model.layers.0.mlp.gate.weight has shape [5, 128]; rule: shape [4, 128]" in wrong
