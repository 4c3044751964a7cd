"""What a Slurm job of ours does when something in it ends: the right state and code, soon, and nothing left behind.

A real Slurm with two nodes, real torchrun, a stand-in for the trainer.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT
from tests.support.slurm import Cluster, Job, describe, processes_with, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.multi]
TRAIN, ARRAY = str(ROOT / "launch/slurm/train.sbatch"), str(ROOT / "launch/slurm/array.sbatch")
CONFIG = str(ROOT / "configs/quickstart.yaml")
START_S, END_S = 120, 30
Submit = Callable[..., str]


@pytest.fixture
def submit(cluster: Cluster, payload_environment: dict[str, str], tmp_path: Path) -> Submit:
    """sbatch two nodes with one rank each; run folder tmp_path/run."""

    def submitted(*overrides: str, options: tuple[str, ...] = ("--nodes=2",), **env: str) -> str:
        arguments = [*options, "--output=job.log", TRAIN, CONFIG, *overrides, "--run-dir", "run"]
        return cluster.submit(*arguments, cwd=tmp_path, env={**payload_environment, **env})

    return submitted


def pids(run_dir: Path, rank: int) -> tuple[int, int]:
    """(rank, its agent), once it is up."""
    file = run_dir / f"pid_{rank}"
    wait_for(file.exists, START_S, f"rank {rank} started")
    own, parent = file.read_text().split()
    return int(own), int(parent)


def ended(cluster: Cluster, job_id: str, tmp_path: Path) -> Job:
    """The job's end within END_S, after which no process of it is left."""
    job = cluster.wait(job_id, END_S)
    left = processes_with("JETRL_TAG", f"{job_id}.{job.restarts}")
    assert not left, f"{describe(left)}\n{(tmp_path / 'job.log').read_text()}"
    return job


def test_rank_that_exits_fails_the_job(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """Rank 1, on the second node, ends with code 17: the job fails with 1 (not srun's maximum over ended tasks), and
    the output names the rank's code."""
    job_id = submit("mode=exit", "rank=1", "code=17")
    pids(tmp_path / "run", 1)
    job = ended(cluster, job_id, tmp_path)
    assert (job.state, job.exit_code) == ("FAILED", "1:0")
    assert "exitcode  : 17" in (tmp_path / "job.log").read_text()


@pytest.mark.parametrize("victim", ["rank", "agent"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_fails_the_job(cluster: Cluster, submit: Submit, tmp_path: Path, rank: int, victim: str) -> None:
    """kill -9 of a rank, or of torchrun's agent (whose ranks would be orphans that hold the job's output), on the first
    node or the second. A stray USR1 to all processes of the job before that ends none of them."""
    job_id = submit("mode=wait")
    family = [pids(tmp_path / "run", r) for r in (0, 1)]
    cluster.command("scancel", "--signal=USR1", job_id)
    time.sleep(1)
    assert all(os.path.exists(f"/proc/{pid}") for pair in family for pid in pair)
    os.kill(family[rank][0 if victim == "rank" else 1], signal.SIGKILL)
    job = ended(cluster, job_id, tmp_path)
    assert (job.state, job.exit_code) == ("FAILED", "1:0")


def test_cancelled(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """scancel ends everything."""
    job_id = submit("mode=wait")
    pids(tmp_path / "run", 1)
    cluster.command("scancel", job_id)
    assert ended(cluster, job_id, tmp_path).state == "CANCELLED"


def test_time_limit_near_requeues_and_a_done_run_ends_well(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """USR1 to the batch script, as Slurm sends it near the time limit: checkpoint, requeue. In the next attempt the run
    is done, as a file tells: code 0, and nothing is started."""
    job_id = submit("mode=wait")
    pids(tmp_path / "run", 1)
    cluster.command("scancel", "--batch", "--signal=USR1", job_id)
    wait_for(lambda: cluster.job(job_id).restarts == 1, END_S, "requeued")
    assert (tmp_path / "run/checkpoints/step_000001").is_dir()
    (tmp_path / "run/status.json").write_text('{"step": 1, "phase": "done", "pid": 1}')
    cluster.release(job_id)
    job = ended(cluster, job_id, tmp_path)
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", "0:0", 1)
    log = (tmp_path / "job.log").read_text()
    assert "=== attempt 0 of job" in log
    assert "=== attempt 1 of job" in log
    assert "done already" in log


def test_ending_without_being_done_is_a_failure(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """Code 0 of all ranks is no success unless the run folder says that the run is done."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text('{"step": 1, "phase": "done", "pid": 1}')  # of an earlier run
    job_id = submit("mode=wait")
    pids(tmp_path / "run", 1)
    job = ended(cluster, job_id, tmp_path)
    assert (job.state, job.exit_code) == ("FAILED", "1:0")
    assert "ended without being done" in (tmp_path / "job.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent.yaml",), "error: CONFIG=absent.yaml; rule: an existing YAML file"),
        ((CONFIG, "check=2", "mode=done"), "jetrl"),
        ((CONFIG, "trainer.num_steps"), "fix: write an override as key=value"),
        ((CONFIG, "--nodes=2"), "options of Slurm go before the script's name"),
    ],
)
def test_users_errors_end_with_code_2(
    cluster: Cluster, payload_environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """A mistake costs seconds, and the job's code is 2."""
    job_id = cluster.submit("--output=job.log", TRAIN, *arguments, cwd=tmp_path, env=payload_environment)
    job = cluster.wait(job_id, START_S)
    assert (job.state, job.exit_code) == ("FAILED", "2:0")
    assert message in (tmp_path / "job.log").read_text()


def test_array_of_seeds(cluster: Cluster, payload_environment: dict[str, str], tmp_path: Path) -> None:
    """Two seeds at the same time on one machine: own folders, seeds and ports; both complete."""
    options = ("--array=3-4", "--output=seed_%a.log")
    array_id = cluster.submit(*options, ARRAY, CONFIG, "mode=done", cwd=tmp_path, env=payload_environment)
    for seed in (3, 4):
        job = cluster.wait(f"{array_id}_{seed}", START_S)
        log = (tmp_path / f"seed_{seed}.log").read_text()
        assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log
        arguments = (tmp_path / f"runs/quickstart-{array_id}_{seed}/arguments_0").read_text()
        assert f"trainer.seed={seed}" in arguments


def chain(cluster: Cluster, environment: dict[str, str], tmp_path: Path, num: int, *overrides: str) -> list[Job]:
    arguments = [str(num), "--run-dir", str(tmp_path / "run"), CONFIG, *overrides]
    options = ("--nodes=1", "--output=link_%j.log", f"--chdir={tmp_path}")
    text = cluster.command(str(ROOT / "launch/slurm/chain.sh"), *arguments, "--", *options, **environment)
    return [cluster.wait(job_id, START_S) for job_id in text.split()]


def test_chain_ends_when_done(cluster: Cluster, payload_environment: dict[str, str], tmp_path: Path) -> None:
    """Links that fail with a new checkpoint do not stop the chain; after the one that is done the others do nothing."""
    jobs = chain(cluster, payload_environment, tmp_path, 3, "mode=progress", "steps=2")
    assert [job.exit_code for job in jobs] == ["1:0", "0:0", "0:0"]
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 2
    assert "done already" in (tmp_path / f"link_{jobs[2].id}.log").read_text()


def test_chain_without_progress_breaks(cluster: Cluster, payload_environment: dict[str, str], tmp_path: Path) -> None:
    """Two links that fail without a new checkpoint: the third starts nothing and says how to go on."""
    jobs = chain(cluster, payload_environment, tmp_path, 3, "mode=stall")
    assert [job.exit_code for job in jobs] == ["1:0", "1:0", "1:0"]
    log = (tmp_path / f"link_{jobs[2].id}.log").read_text()
    assert "2 attempts failed without a new checkpoint" in log
    assert "role train" not in log


ROLES = """#!/usr/bin/env bash
set -euo pipefail
. "$JETRL_ROOT/launch/lib/common.sh"; . "$JETRL_ROOT/launch/lib/roles.sh"
CONTAINER=() WHY=
start_role engine n2 bash -c "$ENGINE"
start_role train n1 bash -c "$TRAINER"
await_roles train
stop_roles
echo "first $FIRST code $CODE left ${#ROLE_PID[@]}"
exit "$CODE"
"""


@pytest.mark.parametrize(
    ("engine", "trainer", "code"),
    [
        ("sleep 1", "sleep 61", 70),  # a server that leaves early is a failure, even with code 0
        ("sleep 61", "sleep 1", 0),  # the trainer's code is the job's
        ("trap '' TERM; sleep 61; sleep 61", "sleep 1; exit 3", 3),  # a server that ignores TERM
    ],
)
def test_separate_roles(
    cluster: Cluster, job_environment: dict[str, str], tmp_path: Path, engine: str, trainer: str, code: int
) -> None:
    """Trainer and engines as two steps of one job: the first to leave decides, the other is stopped, within bounds."""
    script = tmp_path / "roles.sbatch"
    script.write_text(ROLES)
    env = {**job_environment, "ENGINE": engine, "TRAINER": trainer, "JETRL_GRACE_S": "2"}
    job_id = cluster.submit("--nodes=2", "--output=job.log", str(script), cwd=tmp_path, env=env)
    job = cluster.wait(job_id, END_S)
    assert job.exit_code == f"{code}:0", (tmp_path / "job.log").read_text()
    assert "left 0" in (tmp_path / "job.log").read_text()


def test_preflight_names_every_fault(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """Real reports of both nodes; the rendezvous port is taken, so the job ends with 75 before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job_id = submit("mode=done", JETRL_PREFLIGHT="1", JETRL_MASTER_PORT=str(port))
        job = cluster.wait(job_id, START_S)
    log = (tmp_path / "job.log").read_text()
    assert (job.state, job.exit_code) == ("FAILED", "75:0"), log
    assert f"n1: port {port} is taken; rule: free on node 0; fix: set JETRL_MASTER_PORT" in log
    assert "nodes: 2 checked" in log
    assert len(list((tmp_path / "run").glob("launch/*/nodes/n[12].json"))) == 2
    assert not (tmp_path / "run/pid_0").exists()


def test_bandwidth(cluster: Cluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    """Two nodes over gloo: a number for the pair; a floor that nothing reaches gives code 75."""
    script = str(ROOT / "launch/slurm/bandwidth_test.sbatch")
    arguments = ("--output=job.log", script, "--size-mib", "4", "--floor-gbps", "10000")
    job_id = cluster.submit(*arguments, cwd=tmp_path, env=job_environment)
    job = cluster.wait(job_id, START_S)
    log = (tmp_path / "job.log").read_text()
    assert (job.state, job.exit_code) == ("FAILED", "75:0"), log
    assert "bandwidth n1 <-> n2: " in log
    assert "slow: n1, n2" in log
