"""A run that is asked to stop, and ranks whose launcher is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import (
    ROOT,
    TINY,
    command,
    environment,
    status_of,
    train_ok,
    wait_until_gone,
    without_times,
)
from tests.support.slurm import wait_for

NUM_STEPS = 8
OVERRIDES = (
    *TINY,
    "model.init=random",
    "reward.kind=tests.support.runs:slow_exact_match",
    f"trainer.num_steps={NUM_STEPS}",
    "checkpoint.every_steps=0",
    "optimizer.lr=1e-3",
)


@pytest.mark.slow
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGUSR1 to the supervisor: the run ends after its step with code 0, phase `stopped` and a checkpoint of that
    step, though none was due. An old request does not stop the next run, and every step is that of a run left alone."""
    expected = train_ok(tmp_path / "whole", *OVERRIDES)
    run_dir = tmp_path / "stopped"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command(run_dir, *OVERRIDES), env=environment(), cwd=ROOT, stdout=log, stderr=log)
        wait_for(lambda: status_of(run_dir).get("step", 0) >= 2, 120, "step 2", poll_s=0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0
    stopped = status_of(run_dir)
    assert stopped["phase"] == "stopped"
    assert 2 <= stopped["step"] < NUM_STEPS
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step_{stopped['step']:06d}"]
    assert not (run_dir / "hf").exists()
    assert "stopped as asked" in (tmp_path / "log").read_text()
    (run_dir / "stop.request").touch()
    found = train_ok(run_dir, *OVERRIDES, resume=True)
    assert [without_times(row) for row in found] == [without_times(row) for row in expected]
    assert status_of(run_dir)["phase"] == "done"


RANK = """
import subprocess, sys, time
from jetrl_megatron.trainer.worker import tie_to_launcher
tie_to_launcher()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
print(rank.pid, rank.stdout.readline().decode(), flush=True)
rank.wait()
"""


def test_a_killed_launcher_takes_rank_and_children_along() -> None:
    """SIGKILL to the process that started a rank, as an out-of-memory killer does to torchrun's agent."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(pids) == 2
    launcher.kill()
    launcher.wait()
    wait_until_gone(pids, timeout_s=5)
