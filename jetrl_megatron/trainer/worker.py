"""One training rank: session, loop, export, report. Run as `python -m jetrl_megatron.trainer.worker RUN_DIR TASK`."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal, cast

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.config import ConfigError, RunConfig, dump_config, load_config
from jetrl_megatron.trainer import files

Task = Literal["train", "resume", "precision-flow"]


def run(cfg: RunConfig, run_dir: Path, task: Task) -> int:
    """Do the task on this rank. Returns 0, 2 for a user's error, 1 for a named failure (message on stderr)."""
    from jetrl_megatron.rl.mismatch import MismatchError
    from jetrl_megatron.rollout.engine import EngineDiedError
    from jetrl_megatron.sync.weight_sync import SyncError
    from jetrl_megatron.trainer.precision_flow import PrecisionFlowError

    main = os.environ["RANK"] == "0"
    logging.basicConfig(level=logging.INFO if main else logging.WARNING, format="%(message)s", stream=sys.stderr)
    for noisy in ("megatron", "torch", "transformers", "httpx", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if main:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / files.CONFIG_FILE, dump_config(cfg))
    try:
        if task == "precision-flow":
            _precision_flow(cfg, run_dir)
        else:
            _train(cfg, run_dir, resume=task == "resume")
    except (ConfigError, ValueError) as error:
        return _fail(main, str(error), 2)
    except (PrecisionFlowError, MismatchError, SyncError, EngineDiedError, FloatingPointError) as error:
        return _fail(main, f"{type(error).__name__}: {error}", 1)
    return 0


def _fail(main: bool, message: str, code: int) -> int:
    if not main:
        time.sleep(10)  # rank 0 says it first, once; the launcher ends the others then
    print(f"jetrl: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # other ranks may sit in a collective; the launcher ends them


def _train(cfg: RunConfig, run_dir: Path, resume: bool) -> None:
    from jetrl_megatron.megatron.gather import export_bf16
    from jetrl_megatron.megatron.groups import shutdown
    from jetrl_megatron.trainer.loop import train
    from jetrl_megatron.trainer.progress import Progress
    from jetrl_megatron.trainer.report import summarize, write_report
    from jetrl_megatron.trainer.session import open_session
    from jetrl_megatron.weights.io import CONFIG, read_json, write_hf

    session = open_session(cfg, run_dir, resume)
    try:
        with Progress(cfg, enabled=cfg.logging.progress and session.ranks.is_main) as progress:
            complete = train(session, progress.on_step)
        if complete and cfg.checkpoint.export_hf:
            tensors = export_bf16(session.policy)
            if session.ranks.is_main:
                config = read_json(session.model_dir / CONFIG)
                write_hf(run_dir / files.HF_EXPORT, tensors, config, session.model_dir)
            else:
                for _ in tensors:
                    pass
        if session.ranks.is_main:
            if complete:
                files.write_status(run_dir, cfg.trainer.num_steps, "done")
            write_report(run_dir)
            print(summarize(run_dir) if complete else "jetrl: stopped as asked; --resume continues")
    finally:
        session.close()
    shutdown()


def _precision_flow(cfg: RunConfig, run_dir: Path) -> None:
    """Record and compare, no training. The results go beside the run folder."""
    from jetrl_megatron.megatron.groups import shutdown
    from jetrl_megatron.trainer.precision_flow import PrecisionFlowError, check_flow
    from jetrl_megatron.trainer.session import open_session

    session = open_session(cfg, run_dir, resume=False)
    try:
        session.sync.publish(session.policy.precision.version.value)
        differences = check_flow(session, run_dir.parent)
        if differences:
            raise PrecisionFlowError(differences)
        if session.ranks.is_main:
            print("precision flow: rollout is a subgraph of the training forward")
    finally:
        session.close()
    shutdown()


def tie_to_launcher() -> None:
    """This rank ends with the process that started it, and its children with it, even under SIGKILL: orphans would
    hold GPU memory, and the output that the job waits for. Call it in the main thread, before other processes start."""
    _take_children_along()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _take_children_along() -> None:
    """A small process waits for this rank to end, however it ends, and then kills what is left of its process group:
    checkpoint writing starts a server process that would otherwise outlive a SIGKILL."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    group = os.getpid()
    alive, held_by_rank = os.pipe()
    if os.fork():
        os.close(alive)
        return
    os.setpgid(0, 0)
    os.close(held_by_rank)
    os.read(alive, 1)  # returns at the rank's end
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


def main() -> Any:
    tie_to_launcher()
    run_dir = Path(sys.argv[1])
    sys.exit(run(load_config(run_dir / files.CONFIG_FILE, []), run_dir, cast(Task, sys.argv[2])))


if __name__ == "__main__":
    main()
