"""Starts one script on several ranks of this machine and waits, as torchrun would, for the time of one test."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nothing listens on, below those that the kernel gives to connections meanwhile."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randint(20000, 29999)))
            return int(probe.getsockname()[1])


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """A store served from here, as torchrun's agent serves one, and the environment that leads ranks to it: its port is
    bound before it is named, so nobody can take it in between."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def join_alone() -> None:
    """Make this process a world of one, which needs no port (idempotent)."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def die_with_parent() -> None:
    """In a child: exit as soon as the parent closes our stdin, which its death does."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock must be free at interpreter shutdown
            pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def launch(module: str, num_ranks: int, args: list[str], log_dir: Path, timeout_s: float) -> None:
    """Run `python -m module args` once per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    The first rank that fails ends the others. Raises AssertionError with the tail of the failing rank's log, or naming
    the timeout. The children must call `die_with_parent`.
    """
    common = {**os.environ, "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    with rendezvous() as where:
        _run_ranks(module, {**common, **where}, num_ranks, args, log_dir, timeout_s)


def _run_ranks(
    module: str, env: dict[str, str], num_ranks: int, args: list[str], log_dir: Path, timeout_s: float
) -> None:
    logs = [log_dir / f"rank{rank}.log" for rank in range(num_ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *args],
                        cwd=REPOSITORY,
                        env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes, logs, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], deadline: float) -> None:
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                tail = logs[rank].read_text(errors="replace")[-3000:]
                raise AssertionError(f"rank {rank} of {len(codes)} ended with {code}:\n{tail}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise AssertionError(
                f"timeout: ranks {running} still running; last output:\n{logs[running[0]].read_text()[-2000:]}"
            )
        time.sleep(0.05)
