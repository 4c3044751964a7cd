"""A run that is killed anywhere and resumed is the run that was never killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import TINY, kill_in_phase, rewind, train_ok, without_times

PHASES = ("rollout", "reward", "logprob", "train", "sync", "save")
NUM_STEPS = 2 * len(PHASES)


pytestmark = pytest.mark.slow


def test_killed_in_every_phase_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGKILL in each phase in turn, resume each time: every later step has the same metrics, tokens, log-probs and
    final weights, bit for bit, as a run that was left alone, and no process outlives the killed supervisor."""
    overrides = (
        *TINY,
        f"trainer.num_steps={NUM_STEPS}",
        "checkpoint.every_steps=1",
        "reward.kind=tests.support.runs:slow_exact_match",
        "optimizer.lr=1e-3",
        "algorithm.kl_coef=0.01",
    )
    expected = train_ok(tmp_path / "whole", *overrides)
    killed = tmp_path / "killed"
    for i, phase in enumerate(PHASES):
        kill_in_phase(killed, phase, *overrides, resume=i > 0)
    found = train_ok(killed, *overrides, resume=True)

    assert [row["step"] for row in found] == list(range(1, NUM_STEPS + 1))
    assert [without_times(row) for row in found] == [without_times(row) for row in expected]
    assert all(row["mismatch/max_abs_dlogp"] == 0.0 for row in found)
    for name in sorted(path.name for path in (tmp_path / "whole" / "samples").iterdir()):
        assert (killed / "samples" / name).read_text() == (tmp_path / "whole" / "samples" / name).read_text()
    ours, theirs = (load_file(tmp_path / run / "hf" / "model.safetensors") for run in ("killed", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_virtual_stages_resumed(tmp_path: Path) -> None:
    """The same for two pipeline stages of two chunks each, from the checkpoint of step 2; their last checkpoint also
    loads on one rank, which then exports the same model."""
    overrides = (
        *TINY,
        "model.init=random",
        "model.architecture.num_hidden_layers=4",
        "reward.kind=tests.support.runs:even_digits",
        "optimizer.lr=1e-3",
        "trainer.num_steps=4",
        "checkpoint.every_steps=1",
        "checkpoint.keep=3",
    )
    virtual = ("parallel.pipeline=2", "parallel.virtual_pipeline=2")
    expected = train_ok(tmp_path / "whole", *overrides, *virtual)
    resumed = tmp_path / "resumed"
    rewind(tmp_path / "whole", resumed, step=2)
    found = train_ok(resumed, *overrides, *virtual, resume=True)
    assert [without_times(row) for row in found] == [without_times(row) for row in expected]
    assert all(row["mismatch/max_abs_dlogp"] == 0.0 and row["grad/norm"] > 0 for row in found)
    ours, theirs = (load_file(tmp_path / run / "hf" / "model.safetensors") for run in ("resumed", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    shutil.rmtree(resumed / "hf")
    train_ok(resumed, *overrides, resume=True)
    alone = load_file(resumed / "hf" / "model.safetensors")
    assert all(torch.equal(alone[name], theirs[name]) for name in theirs)
