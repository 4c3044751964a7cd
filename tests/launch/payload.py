"""Stand-in for the trainer where the launcher is under test: `python -m tests.launch.payload check|train CONFIG
[key=value ...] --run-dir DIR`. Writes the files that launchers read: pid_RANK, checkpoints, status.json.

mode=done       ends well            mode=wait   until it is asked to stop, which it does with a checkpoint
mode=exit       rank=R ends with code=C, the others wait
mode=progress   one checkpoint, then code 1; done at step steps=N       mode=stall   code 1 at once
check=C         the check of the configuration ends with code C
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from jetrl_megatron.trainer.files import write_status
from jetrl_megatron.trainer.stop import mark_stopped
from jetrl_megatron.trainer.worker import tie_to_launcher

PATIENCE_S = 100


def main() -> int:
    command, arguments = sys.argv[1], sys.argv[3:]
    settings = dict(a.split("=", 1) for a in arguments if "=" in a)
    run_dir = Path(arguments[arguments.index("--run-dir") + 1])
    if command == "check":
        return int(settings.get("check", "0"))
    tie_to_launcher()
    rank, mode = int(os.environ["RANK"]), settings["mode"]
    (run_dir / f".pid_{rank}").write_text(f"{os.getpid()} {os.getppid()}")
    (run_dir / f".pid_{rank}").rename(run_dir / f"pid_{rank}")
    (run_dir / f"arguments_{rank}").write_text(" ".join(sys.argv[1:]))
    if mode == "exit" and rank == int(settings["rank"]):
        return int(settings["code"])
    if mode in ("wait", "exit"):
        return wait(run_dir, rank)
    if mode == "stall":
        return 1
    if rank == 0 and mode == "progress":
        step = checkpoint(run_dir)
        if step < int(settings["steps"]):
            return 1
    if rank == 0:
        write_status(run_dir, 1, "done")
    return 0


def wait(run_dir: Path, rank: int) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if rank == 0 and (run_dir / "stop.request").exists():
            mark_stopped(run_dir, checkpoint(run_dir))
        if (run_dir / "status.json").exists():
            return 0
        time.sleep(0.1)
    return 9


def checkpoint(run_dir: Path) -> int:
    step = len(list(run_dir.glob("checkpoints/*"))) + 1
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    return step


if __name__ == "__main__":
    sys.exit(main())
