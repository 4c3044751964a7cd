"""Running `jetrl train` for real in tests: short runs of the quickstart, watched and killed from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from jetrl_megatron.trainer.metrics import read_metrics

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TINY = (
    "model.warmstart.num_steps=30",
    "model.warmstart.batch_size=32",
    "data.min_digits=3",
    "data.max_digits=6",
    "rollout.max_new_tokens=7",
    "rollout.samples_per_prompt=4",
    "trainer.prompts_per_step=8",
    "logging.tensorboard=false",
    "eval.every_steps=0",
)


def command(run_dir: Path, *overrides: str, resume: bool = False, config: Path = QUICKSTART) -> list[str]:
    arguments = ["train", str(config), *overrides, "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "jetrl_megatron.cli", *arguments, *(["--resume"] if resume else [])]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(
    run_dir: Path, *overrides: str, resume: bool = False, config: Path = QUICKSTART, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run to the end; the caller looks at returncode and stderr."""
    return subprocess.run(
        command(run_dir, *overrides, resume=resume, config=config),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def train_ok(run_dir: Path, *overrides: str, **options: Any) -> list[dict[str, Any]]:
    """Run to the end, successfully; the rows of metrics.jsonl."""
    done = train(run_dir, *overrides, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return read_metrics(run_dir)


def kill_in_phase(run_dir: Path, phase: str, *overrides: str, resume: bool, timeout_s: float = 300) -> None:
    """Start or resume a run and SIGKILL its supervisor while rank 0 is in `phase` of some step after the first new one;
    then everything must be gone. The rank is stopped first, so that it cannot leave the phase before it is killed."""
    with open(run_dir.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(
            command(run_dir, *overrides, resume=resume), env=environment(), cwd=ROOT, stdout=log, stderr=log
        )
    deadline = time.monotonic() + timeout_s
    family: list[int] = []
    first_step = 0
    while True:
        assert process.poll() is None, f"the run ended before it was in {phase}"
        assert time.monotonic() < deadline, f"{phase} was never reached"
        status = status_of(run_dir)
        if status.get("pid_is_alive") and not family:  # all are up once there is a status; slow, so not later
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            first_step = status["step"]
        elif family and status["step"] > first_step and status["phase"] == phase:
            os.kill(status["pid"], signal.SIGSTOP)
            if status_of(run_dir)["phase"] == phase:
                os.kill(process.pid, signal.SIGKILL)
                break
            os.kill(status["pid"], signal.SIGCONT)  # too late: the next step has the same phase
        time.sleep(0.002)
    process.wait()
    wait_until_gone(family)


def rewind(run_dir: Path, target: Path, step: int) -> None:
    """A copy of a finished run, as if it had ended after the checkpoint of `step`."""
    shutil.copytree(run_dir, target)
    shutil.rmtree(target / "hf")
    for checkpoint in (target / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


def status_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "status.json"
    if not path.is_file():
        return {}
    status: dict[str, Any] = json.loads(path.read_text())
    return {**status, "pid_is_alive": psutil.pid_exists(status["pid"])}


def wait_until_gone(pids: list[int], timeout_s: float = 20) -> None:
    """No process of a killed run may stay behind."""
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if _running(pid)]:
        assert time.monotonic() < deadline, f"left behind: {[psutil.Process(p).cmdline() for p in alive]}"
        time.sleep(0.1)


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """A metrics row without what a clock or the machine decides."""
    volatile = ("time/", "memory/", "tokens/", "rollout/num_engine_restarts")
    return {key: value for key, value in row.items() if not key.startswith(volatile)}


def slow_exact_match(prompt: Any, text: str) -> dict[str, float]:
    """`exact_match`, slow enough for a test to interrupt it. Reward function of the resume test."""
    time.sleep(0.01)
    return {"answer": float(text == prompt.answer)}


def even_digits(prompt: Any, text: str) -> dict[str, float]:
    """Share of even digits in the response: a reward that differs between the responses of an untrained model."""
    return {"answer": sum(char in "02468" for char in text) / max(len(text), 1)}
