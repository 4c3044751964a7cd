"""launch/torchrun/run.sh without Slurm, and cleanup.sh, with the stand-in for the trainer."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT
from tests.support.launch import free_port
from tests.support.runs import wait_until_gone
from tests.support.slurm import describe, processes_with, wait_for

CONFIG = str(ROOT / "configs/quickstart.yaml")
RUN, CLEANUP = str(ROOT / "launch/torchrun/run.sh"), str(ROOT / "launch/slurm/cleanup.sh")


def start(folder: Path, *overrides: str, **env: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "JETRL_"))}
    ours = {"JETRL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JETRL_MODULE": "tests.launch.payload"}
    return subprocess.Popen(
        [RUN, CONFIG, *overrides, "--run-dir", "run"],
        cwd=folder,
        env={**kept, **ours, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_nothing_left(folder: Path) -> None:
    for launch in (folder / "run/launch").iterdir():
        left = processes_with("JETRL_TAG", launch.name)
        assert not left, describe(left)


@pytest.mark.slow
@pytest.mark.multi
def test_stop_request_and_failure(tmp_path: Path) -> None:
    """USR1: the run ends after its step, code 0. A rank's failure: code 1. A stale done is no success."""
    process = start(tmp_path, "mode=wait", JETRL_RANKS_PER_NODE="2")
    wait_for((tmp_path / "run/pid_1").exists, 60, "rank 1 started")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 0
    assert (tmp_path / "run/checkpoints/step_000001").is_dir()
    process = start(tmp_path, "mode=stall")
    assert process.wait(60) == 1
    assert_nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.multi
def test_two_machines_and_a_killed_agent(tmp_path: Path) -> None:
    """Two launches form one world; SIGKILL to one's torchrun ends its rank, and TERM ends the other, code 143."""
    common = {"JETRL_NNODES": "2", "JETRL_MASTER_ADDR": "127.0.0.1", "JETRL_MASTER_PORT": str(free_port())}
    first = start(tmp_path, "mode=wait", **common, JETRL_NODE_RANK="0")
    second = start(tmp_path, "mode=wait", **common, JETRL_NODE_RANK="1")
    for rank in (0, 1):
        wait_for((tmp_path / f"run/pid_{rank}").exists, 60, f"rank {rank} started")
    rank, agent = map(int, (tmp_path / "run/pid_1").read_text().split())
    os.kill(agent, signal.SIGKILL)
    assert second.wait(30) == 1
    wait_until_gone([rank], timeout_s=5)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 143
    assert_nothing_left(tmp_path)


def test_users_errors(tmp_path: Path) -> None:
    """One line, code 2, nothing started."""
    for env, message in (
        ({"JETRL_NNODES": "2"}, "error: JETRL_MASTER_ADDR unset; rule: "),
        ({"JETRL_NODE_RANK": "1"}, "error: JETRL_NODE_RANK=1; rule: below JETRL_NNODES=1"),
        ({"JETRL_NNODES": "two"}, "error: JETRL_NNODES=two; rule: a whole number"),
        ({"JETRL_ENV": "a100"}, "fix: one of: cpu h100"),
        ({"JETRL_PYTHON": "/absent/python"}, "error: JETRL_PYTHON=/absent/python; rule: an interpreter"),
    ):
        process = start(tmp_path, "mode=done", **env)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 2
        (line,) = stderr.splitlines()
        assert message in line
    assert not (tmp_path / "run").exists()


def test_cleanup_ends_only_its_own_launch(tmp_path: Path) -> None:
    """A process of the launch that ignores TERM ends; one of another launch with the same command line lives on; the
    launch's staging folder goes, its neighbour stays."""
    run_dir, staging = tmp_path / "run", tmp_path / "shm"
    run_dir.mkdir()
    mine = staging / f"jetrl-{hashlib.blake2b(str(run_dir).encode(), digest_size=8).hexdigest()}"
    mine.mkdir(parents=True)
    (staging / "jetrl-0123456789abcdef").mkdir()
    (run_dir / "config.resolved.yaml").write_text(f"sync:\n  bucket_bytes: 1\n  staging_dir: {staging}\n")
    stubborn = ["bash", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"]
    processes = [
        subprocess.Popen(stubborn, env={**os.environ, "JETRL_TAG": tag}, stdout=subprocess.PIPE)
        for tag in ("7.0", "7.1")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        start_s = time.monotonic()
        subprocess.run([CLEANUP, "7.0", str(run_dir)], check=True, timeout=30, capture_output=True)
        assert time.monotonic() - start_s < 20
        assert processes[0].wait(1) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.name for p in staging.iterdir()] == ["jetrl-0123456789abcdef"]
