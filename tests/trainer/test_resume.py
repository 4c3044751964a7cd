"""A run that is killed anywhere and resumed is the run that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import TINY, kill_in_phase, train_ok, without_times

PHASES = ("rollout", "reward", "logprob", "train", "sync", "save")
NUM_STEPS = 2 * len(PHASES)


@pytest.mark.slow
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
