"""GRPO on a tiny mixture of experts through `jetrl train`: exact at every step, in every layout, after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import per_expert
from tests.support.runs import TINY, rewind, train_ok, without_times

pytestmark = [pytest.mark.slow, pytest.mark.multi]
MOE = (
    *TINY,
    "model.init=random",
    "model.architecture.model_type=qwen3_moe",
    "model.architecture.num_experts=8",
    "model.architecture.num_experts_per_tok=4",
    "model.architecture.moe_intermediate_size=256",
    "model.architecture.norm_topk_prob=true",
    "model.architecture.head_dim=64",
    "model.architecture.hidden_size=256",
    "precision.dgrad=fp8",
    "precision.wgrad=fp8",
    "reward.kind=tests.support.runs:even_digits",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
    "algorithm.kl_coef=0.01",
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2", "parallel.grouped_experts=false"),
        ("parallel.pipeline=2", "rollout.tensor_parallel=2", "rollout.expert_parallel=2"),
        ("parallel.tensor=2", "parallel.sequence=true", "rollout.tensor_parallel=2", "trainer.recompute=true"),
    ],
    ids=["tp-sp-ep", "pp-engine-ep", "tp-sp-recompute-engine-tp"],
)
def test_layouts_are_exact(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Training on two ranks and engines on one or two: max |dlogp| is 0.0 before and after updates, sync included."""
    rows = train_ok(tmp_path / "run", *MOE, "trainer.num_steps=3", "checkpoint.every_steps=0", *overrides)
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0] * 3
    assert all(row["mismatch/num_tokens"] > 50 and row["grad/norm"] > 0 for row in rows)


def test_resumed_with_shared_experts(tmp_path: Path) -> None:
    """Two ranks that share the experts, resumed from the checkpoint of step 2: the same metrics, log-probs and weights
    as the whole run, bit for bit; the exported folder is the model, expert by expert."""
    from transformers import AutoModelForCausalLM

    overrides = (*MOE, "trainer.num_steps=4", "checkpoint.every_steps=1", "checkpoint.keep=3", "parallel.expert=2")
    expected = train_ok(tmp_path / "whole", *overrides)
    rewind(tmp_path / "whole", tmp_path / "resumed", step=2)
    found = train_ok(tmp_path / "resumed", *overrides, resume=True)
    assert [without_times(row) for row in found] == [without_times(row) for row in expected]
    assert all(row["mismatch/max_abs_dlogp"] == 0.0 for row in found)

    ours, theirs = (load_file(tmp_path / run / "hf" / "model.safetensors") for run in ("resumed", "whole"))
    initial = load_file(tmp_path / "whole" / "initial_model" / "model.safetensors")
    assert ours.keys() == theirs.keys() == initial.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    experts = [name for name in ours if ".experts." in name]
    assert len(experts) == 2 * 8 * 3
    assert not any(torch.equal(ours[name], initial[name]) for name in experts)
    loaded = per_expert(AutoModelForCausalLM.from_pretrained(tmp_path / "resumed" / "hf").state_dict())
    assert all(torch.equal(loaded[name], ours[name]) for name in experts)
