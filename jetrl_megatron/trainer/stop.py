"""A run that is asked to stop ends between two steps, with a checkpoint, and says so in `status.json`.

The request is a file in the run folder, not a signal: it reaches a rank in a container or on another node, and engines,
data workers and torchrun have no part in it. Whoever launches removes an old request first and makes a signal into the
file: `jetrl train` does for SIGUSR1, `launch/` for what Slurm sends before the time limit.
"""

from __future__ import annotations

import signal
from pathlib import Path

from jetrl_megatron.trainer import files


def forget_request(run_dir: Path) -> None:
    """For the launcher, before any rank starts: a request is for the run that is there, not for the next one."""
    (run_dir / files.STOP_REQUEST).unlink(missing_ok=True)


def request_on_signal(run_dir: Path) -> None:
    """For the launcher: SIGUSR1 asks the run to stop."""
    signal.signal(signal.SIGUSR1, lambda _signal, _frame: (run_dir / files.STOP_REQUEST).touch())


def stop_requested(run_dir: Path, is_main: bool) -> bool:
    """Global rank 0 looks, every rank gets its answer. Every rank calls it."""
    import torch.distributed as dist

    answer = [is_main and (run_dir / files.STOP_REQUEST).exists()]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def mark_stopped(run_dir: Path, step: int) -> None:
    """On global rank 0, after the checkpoint of `step` is complete: the request is honoured."""
    files.write_status(run_dir, step, "stopped")
    forget_request(run_dir)
