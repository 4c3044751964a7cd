"""The real trainer (Megatron-Core, SGLang) in a real two-node Slurm: two nodes x one rank, data parallel 2."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from jetrl_megatron.trainer.metrics import read_metrics
from tests.launch.conftest import ROOT
from tests.support.runs import TINY, status_of
from tests.support.slurm import FINAL, Cluster, describe, processes_with, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.multi]
TRAIN = str(ROOT / "launch/slurm/train.sbatch")
CONFIG = str(ROOT / "configs/quickstart.yaml")
NUM_STEPS = 30
RUN = (
    *TINY,
    "model.init=random",
    "parallel.data=2",
    "rollout.num_engines=2",
    f"trainer.num_steps={NUM_STEPS}",
    "checkpoint.every_steps=3",
    "reward.kind=tests.support.runs:even_digits",
    "optimizer.lr=1e-3",
    "--run-dir",
    "run",
)
STEP_S, END_S, GRACE_S = 400, 30, 120


def wait_for_step(cluster: Cluster, job_id: str, run_dir: Path, step: int) -> None:
    def reached() -> bool:
        assert cluster.job(job_id).state not in FINAL, (run_dir.parent / "job.log").read_text()[-5000:]
        return bool(status_of(run_dir).get("step", 0) >= step)

    wait_for(reached, STEP_S, f"step {step}")


def engines(tag: str, node: str) -> list[psutil.Process]:
    return [
        process
        for process in processes_with("JETRL_TAG", tag)
        if process.environ().get("JETRL_ENGINE") == "1" and process.environ().get("SLURM_NODEID") == node
    ]


def kill_engine(processes: list[psutil.Process]) -> None:
    """SIGKILL to the scheduler, which holds the model."""
    max(processes, key=lambda p: p.memory_info().rss).send_signal(signal.SIGKILL)


def assert_nothing_left(tag: str) -> None:
    """After TERM nothing cleans up, and an engine's host sees its rank's end by polling: within 10 s."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not processes_with("JETRL_TAG", tag), 10, "nothing left")
    left = processes_with("JETRL_TAG", tag)
    assert not left, describe(left)


def test_stopped_preempted_and_completed(cluster: Cluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    """Every node has an engine, to which its weights and prompts travel. One run in three attempts: near its time limit
    (USR1 to the batch script) it writes a checkpoint after the step and is queued again; then a job of higher priority
    preempts it; then the engine of the second node is killed, started again there, and the run completes. Every step
    is there once, and max |dlogp| is exactly 0.0 in all of them. No attempt leaves a process behind."""
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    options = ("--nodes=2", "--output=job.log")
    env = {**job_environment, "JETRL_PREFLIGHT": "1"}
    job_id = cluster.submit(*options, TRAIN, CONFIG, *RUN, cwd=tmp_path, env=env)

    wait_for_step(cluster, job_id, run_dir, 2)
    assert engines(f"{job_id}.0", node="0")
    assert engines(f"{job_id}.0", node="1")
    cluster.command("scancel", "--batch", "--signal=USR1", job_id)
    wait_for(lambda: cluster.job(job_id).restarts == 1, GRACE_S, f"requeued; {log}")
    stopped = status_of(run_dir)
    assert stopped["phase"] == "stopped"
    assert (run_dir / f"checkpoints/step_{stopped['step']:06d}/trainer_state.json").is_file()
    assert_nothing_left(f"{job_id}.0")

    cluster.release(job_id)
    wait_for_step(cluster, job_id, run_dir, stopped["step"] + 1)
    high = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path)
    wait_for(lambda: cluster.job(job_id).restarts == 2, END_S, "preempted")
    assert cluster.wait(high, END_S).state == "COMPLETED"
    assert_nothing_left(f"{job_id}.1")

    preempted = status_of(run_dir)
    cluster.release(job_id)
    wait_for_step(cluster, job_id, run_dir, preempted["step"] + 1)
    kill_engine(engines(f"{job_id}.2", node="1"))
    job = cluster.wait(job_id, STEP_S)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log.read_text()[-5000:]
    assert_nothing_left(f"{job_id}.2")
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0] * NUM_STEPS
    assert all(row["mismatch/num_tokens"] > 50 for row in rows)
    assert rows[-1]["rollout/num_engine_restarts"] == 1
    assert (run_dir / "hf/model.safetensors").is_file()
    text = log.read_text()
    assert [f"=== attempt {n} of job {job_id} on n1,n2" in text for n in range(3)] == [True] * 3
    assert sorted(p.name for p in (run_dir / f"launch/{job_id}-2/ranks").iterdir()) == ["node_0", "node_1"]


def test_engine_that_dies_fails_the_job(cluster: Cluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    """SIGKILL to the engine where no restart is allowed: the job fails with code 1, soon, with the engine's name and
    signal in its output, and neither ranks nor engine processes are left on any node."""
    options = ("--nodes=2", "--output=job.log")
    job_id = cluster.submit(
        *options,
        TRAIN,
        CONFIG,
        *RUN,
        "rollout.num_engines=1",
        "rollout.max_restarts=0",
        cwd=tmp_path,
        env=job_environment,
    )
    wait_for_step(cluster, job_id, tmp_path / "run", 2)
    before = engines(f"{job_id}.0", node="0")
    kill_engine(before)
    job = cluster.wait(job_id, END_S)
    text = (tmp_path / "job.log").read_text()
    assert (job.state, job.exit_code) == ("FAILED", "1:0"), text[-5000:]
    assert "engine (" in text
    assert "exit code -9" in text
    assert_nothing_left(f"{job_id}.0")
    assert not any(psutil.pid_exists(p.pid) for p in before)
