"""`jetrl train` on this machine: one supervisor that starts the training ranks; under torchrun or Slurm it joins.

The supervisor is torchrun's elastic agent used as a library. A rank that fails takes the others down; a supervisor
or torchrun agent that is killed takes its ranks along (PDEATHSIG in every rank). SIGUSR1 to the supervisor asks the run
to stop after its current step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.config import RunConfig, dump_config
from jetrl_megatron.trainer.files import CONFIG_FILE
from jetrl_megatron.trainer.worker import Task, run, tie_to_launcher


def launch(cfg: RunConfig, run_dir: Path, task: Task) -> int:
    """Run to the end. Returns the exit code: 0 done, 2 a user's error, 1 a failure."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        tie_to_launcher()
        return run(cfg, run_dir, task)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / CONFIG_FILE, dump_config(cfg))
    return _supervise(cfg, run_dir, task)


def _supervise(cfg: RunConfig, run_dir: Path, task: Task) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from jetrl_megatron.trainer.stop import forget_request, request_on_signal

    forget_request(run_dir)
    request_on_signal(run_dir)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # third-party deprecations, dozens a start
    os.environ.setdefault("OMP_NUM_THREADS", str(cfg.trainer.num_threads))
    num_ranks = cfg.parallel.model_size * (cfg.parallel.data or cfg.parallel.least_data)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # else the ranks look for this machine's host name, which need not resolve (containers)
        run_id=f"jetrl-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(),
    )
    arguments = ["-m", "jetrl_megatron.trainer.worker", str(run_dir), task]
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        print(f"jetrl: stopped by {stop.sigval.name}; --resume continues from the last checkpoint", file=sys.stderr)
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        _rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code not in (1, 2):
            print(f"jetrl: training rank {_rank} ended with code {code}; see the messages above", file=sys.stderr)
        return code if code in (1, 2) else 1
    return 0
