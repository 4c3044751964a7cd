"""Submits a training run through NeMo-Run, which runs our own launch scripts: one semantics everywhere.

    python launch/nemo/run.py CONFIG [key=value ...] --executor local|slurm [--run-dir DIR] [--dry-run] [options]

local: launch/torchrun/run.sh on this machine. slurm: NeMo-Run submits a job whose one task runs
launch/slurm/train.sbatch on the job's nodes; start it on a machine that has sbatch. Needs the extra `nemo`, in an
environment of its own if you like: the run itself uses JETRL_PYTHON, as the launch scripts do.

Exit codes: 0 done (or submitted with --detach, or --dry-run), 1 the run failed, 2 user's error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {"local": ROOT / "launch/torchrun/run.sh", "slurm": ROOT / "launch/slurm/train.sbatch"}
KNOWN_GOOD = "pip install nemo-run==0.11.1 leptonai==0.27.3"
SUCCEEDED = "SUCCEEDED"


def main() -> int:
    options = arguments()
    run = import_nemo_run()
    run_dir = options.run_dir.absolute()
    script = run.Script(
        path=str(LAUNCHERS[options.executor]),
        entrypoint="bash",
        args=[str(options.config.absolute()), *options.overrides, "--run-dir", str(run_dir)],
    )
    executor = local_executor(run) if options.executor == "local" else slurm_executor(run, options)
    started_ns = stamp_ns(run_dir)
    with run.Experiment(options.name) as experiment:
        experiment.add(script, executor=executor, name="train")
        if options.dry_run:
            experiment.dryrun(delete_exp_dir=False)
            print(f"dry run: nothing was started; files: {experiment._exp_dir}")
            return 0
        experiment.run(detach=options.detach, tail_logs=not options.detach)
    if options.detach:
        return 0
    return result(experiment.status(return_dict=True), run_dir, started_ns)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--executor", choices=sorted(LAUNCHERS), required=True)
    parser.add_argument("--run-dir", type=Path, help="default: runs/<name of the configuration>")
    parser.add_argument("--name", default="jetrl", help="of the experiment")
    parser.add_argument("--dry-run", action="store_true", help="write the scripts, start nothing")
    parser.add_argument("--detach", action="store_true", help="submit and return")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--account", default=os.environ.get("SBATCH_ACCOUNT", ""))
    slurm.add_argument("--partition")
    slurm.add_argument("--nodes", type=int, default=1)
    slurm.add_argument("--gpus-per-node", type=int)
    slurm.add_argument("--time", default="04:00:00")
    slurm.add_argument("--container-image", help="for pyxis; our script starts the containers, not NeMo-Run")
    options = parser.parse_intermixed_args()
    if not options.config.is_file():
        user_error(f"CONFIG={options.config}", "an existing YAML file", "correct the path")
    for override in options.overrides:
        if "=" not in override.lstrip("="):
            user_error(override, "CONFIG [key=value ...]", "write an override as key=value")
    if options.run_dir is None:
        options.run_dir = Path("runs") / options.config.stem
    return options


def user_error(what: str, rule: str, fix: str) -> NoReturn:
    print(f"error: {what}; rule: {rule}; fix: {fix}", file=sys.stderr)
    raise SystemExit(2)


def import_nemo_run() -> Any:
    """NeMo-Run 0.11.1 takes any leptonai, and newer ones break its import."""
    try:
        import nemo_run
    except ModuleNotFoundError as error:
        if error.name == "nemo_run":
            user_error("nemo_run is not installed", "the extra nemo", KNOWN_GOOD)
        user_error(f"nemo_run does not load ({error})", "known good: leptonai 0.27.3", KNOWN_GOOD)
    except ImportError as error:
        user_error(f"nemo_run does not load ({error})", "known good: leptonai 0.27.3", KNOWN_GOOD)
    return nemo_run


def settings() -> dict[str, str]:
    """What our scripts read from the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("JETRL_")} | {"JETRL_ROOT": str(ROOT)}


def local_executor(run: Any) -> Any:
    return run.LocalExecutor(env_vars=settings())


def slurm_executor(run: Any, options: argparse.Namespace) -> Any:
    """One task on the first node, whose script starts the steps on all of them. NeMo-Run's own srun would start one
    script per node and end all of them a minute after the first leaves."""
    env = settings()
    if options.container_image:
        env["JETRL_CONTAINER_IMAGE"] = options.container_image
    return run.SlurmExecutor(
        account=options.account,
        partition=options.partition,
        nodes=options.nodes,
        ntasks_per_node=1,
        gpus_per_node=options.gpus_per_node,
        time=options.time,
        exclusive=True,
        signal="USR1@300",  # to the step, where our script waits for it
        additional_parameters={"requeue": True},
        srun_args=["--nodes=1", "--ntasks=1", "--overlap"],
        env_vars={name: shlex.quote(value) for name, value in env.items()},  # NeMo-Run writes them as they are
        container_image=None,
        packager=run.Packager(),  # the code is where JETRL_ROOT says
        tunnel=run.LocalTunnel(job_dir=""),
    )


def stamp_ns(run_dir: Path) -> int:
    status = run_dir / "status.json"
    return status.stat().st_mtime_ns if status.is_file() else 0


def result(tasks: dict[str, dict[str, Any]], run_dir: Path, started_ns: int) -> int:
    """NeMo-Run ends with 0 when a task failed, so look: at the tasks' states, and at what this run wrote."""
    failed = {name: str(task.get("status")) for name, task in tasks.items() if SUCCEEDED not in str(task.get("status"))}
    if failed or not tasks:
        print(
            f"error: {failed or 'no task'}; rule: {SUCCEEDED}; fix: see the logs under {run_dir}/launch",
            file=sys.stderr,
        )
        return 1
    if stamp_ns(run_dir) == started_ns:
        print(f"error: {run_dir}/status.json was not written; fix: see the task's log", file=sys.stderr)
        return 1
    phase = json.loads((run_dir / "status.json").read_text())["phase"]
    if phase not in ("done", "stopped"):
        print(f"error: the run ended in phase {phase}; fix: see the logs under {run_dir}/launch", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
