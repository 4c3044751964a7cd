"""Framework share of a training step: its wall time without operators, backward and optimizer.

    share = (total - operators in engine and trainer - autograd backward - optimizer step) / total

The whole of `jetrl train` runs, one rank and one engine, which take turns. The engine's operators are timed in its
scheduler process, the trainer's in its own (jetrl_megatron/ops/timing.py). Waiting, scheduling, messages, batching,
rewards, losses, quantization of the weights and their transfer all count as framework.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from support import ROOT, SMOLLM2, in_fresh_process, kernel_sets, write_results

from jetrl_megatron.rollout.environment import OPERATOR_TIMES

TARGET_SHARE = 0.25
GSM8K = ROOT / "data" / "gsm8k_train.jsonl"
TRAINER_PARTS = ("reward", "quantize", "sync")


@dataclass
class StepTimes:
    """Seconds of one step. engine, trainer: per operator (trainer: also backward, optimizer); phases: as in metrics."""

    total_s: float
    rollout_s: float
    engine_s: dict[str, float] = field(default_factory=dict)
    trainer_s: dict[str, float] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def engine_framework_s(self) -> float:
        return self.rollout_s - sum(self.engine_s.values())

    @property
    def trainer_framework_s(self) -> float:
        return self.total_s - self.rollout_s - sum(self.trainer_s.values())

    @property
    def share(self) -> float:
        return (self.engine_framework_s + self.trainer_framework_s) / self.total_s


def measure(config: str, overrides: list[str]) -> list[StepTimes]:
    """Run the loop in this process, which must be fresh, on rank 0 of 1."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        times = Path(folder) / "operator_times"
        times.mkdir()
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        os.environ |= {"MASTER_PORT": str(port), OPERATOR_TIMES: str(times)}
        return _train(config, overrides, Path(folder) / "run", times)


def _train(config: str, overrides: list[str], run_dir: Path, engine_times: Path) -> list[StepTimes]:
    import torch

    from jetrl_megatron.config import load_config
    from jetrl_megatron.megatron.groups import shutdown
    from jetrl_megatron.ops.timing import start_operator_times, timed
    from jetrl_megatron.trainer.loop import train
    from jetrl_megatron.trainer.session import open_session

    cfg = load_config(config, overrides)
    run_dir.mkdir()
    session = open_session(cfg, run_dir, resume=False)
    torch.autograd.backward = timed("backward")(torch.autograd.backward)  # what Megatron's schedule calls
    session.trainable.optimizer.step = timed("optimizer")(session.trainable.optimizer.step)
    totals = start_operator_times()
    engine_before: dict[str, float] = {}
    steps: list[StepTimes] = []

    def on_step(_step: int, metrics: dict[str, Any]) -> None:
        nonlocal engine_before
        engine = _read_totals(engine_times)
        steps.append(
            StepTimes(
                total_s=metrics["time/total_s"],
                rollout_s=metrics["time/rollout_s"],
                engine_s={name: value - engine_before.get(name, 0.0) for name, value in engine.items()},
                trainer_s=dict(totals),
                phases_s={k[5:-2]: v for k, v in metrics.items() if k.startswith("time/")},
                num_tokens=metrics["mismatch/num_tokens"],
            )
        )
        assert totals["backward"] > 0, "Megatron's schedule called another backward than the one timed"
        assert totals["optimizer"] > 0
        assert metrics["mismatch/max_abs_dlogp"] == 0.0
        engine_before = engine
        totals.clear()

    try:
        train(session, on_step)
    finally:
        session.close()
    shutdown()
    return steps


def _read_totals(folder: Path) -> dict[str, float]:
    """Sum over the engine's processes (one file each)."""
    totals: dict[str, float] = {}
    for path in folder.glob("*.json"):
        for name, value in json.loads(path.read_text()).items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def summary(steps: list[StepTimes]) -> dict[str, Any]:
    """Sums over the steps."""
    total = sum(step.total_s for step in steps)
    engine = sum(step.engine_framework_s for step in steps)
    trainer = sum(step.trainer_framework_s for step in steps)
    rollout = sum(step.rollout_s for step in steps)
    return {
        "framework_share": round((engine + trainer) / total, 4),
        "framework_share_of_rollout": round(engine / rollout, 4),
        "framework_share_of_trainer": round(trainer / (total - rollout), 4),
        "response_tokens": sum(step.num_tokens for step in steps),
        "total_s": round(total, 3),
        "rollout_s": round(rollout, 3),
        "engine_operators_s": _summed([step.engine_s for step in steps]),
        "trainer_operators_s": _summed([step.trainer_s for step in steps]),
        "phases_s": _summed([step.phases_s for step in steps]),
        "steps": [{"share": round(step.share, 4), **asdict(step)} for step in steps],
    }


def _summed(rows: list[dict[str, float]]) -> dict[str, float]:
    """Sums per key, the largest first."""
    names = sorted({name for row in rows for name in row}, key=lambda n: -sum(row.get(n, 0.0) for row in rows))
    return {name: round(sum(row.get(name, 0.0) for row in rows), 3) for name in names}


def show(console: Console, name: str, result: dict[str, Any]) -> None:
    total = result["total_s"]
    table = Table("where", "seconds", "% of step", title=f"{name}: {len(result['steps'])} steps, {total:.1f} s")

    def row(what: str, seconds: float) -> None:
        table.add_row(what, f"{seconds:.2f}", f"{100 * seconds / total:.1f}")

    for side in ("engine", "trainer"):
        for operator, seconds in result[f"{side}_operators_s"].items():
            row(f"{side}: {operator}", seconds)
    engine_framework = result["rollout_s"] - sum(result["engine_operators_s"].values())
    trainer_framework = total - result["rollout_s"] - sum(result["trainer_operators_s"].values())
    row("engine: framework", engine_framework)
    row("trainer: framework", trainer_framework)
    for part in TRAINER_PARTS:
        row(f"   of which {part}", result["phases_s"].get(part, 0.0))
    console.print(table)
    console.print(
        f"framework share of {name}: {100 * result['framework_share']:.1f} % "
        f"(of rollout {100 * result['framework_share_of_rollout']:.1f} %, "
        f"of the rest {100 * result['framework_share_of_trainer']:.1f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="HF folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=GSM8K, help="GSM8K train.jsonl")
    parser.add_argument("--kernels", choices=kernel_sets(), default=kernel_sets()[0], help="form of our operators")
    parser.add_argument("--only", choices=("quickstart", "smollm2"), help="one of the two runs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further overrides of smollm2_gsm8k_cpu")
    args = parser.parse_args()
    common = [f"trainer.num_steps={args.steps}", "eval.every_steps=0", "logging.tensorboard=false"]
    if args.only != "smollm2":
        run("quickstart", args.kernels, common, [])
    if args.only != "quickstart":
        if args.model.is_dir() and args.data.is_file():
            paths = [f"model.path={args.model}", f"data.path={args.data}"]
            run("smollm2_gsm8k_cpu", args.kernels, [*common, *paths], args.overrides)
        else:
            print(f"smollm2_gsm8k_cpu left out: needs --model ({args.model.name}) and --data ({args.data.name})")


def run(name: str, kernels: str, fixed: list[str], overrides: list[str]) -> None:
    """Measure one shipped configuration, print and write the result."""
    config = str(ROOT / "configs" / f"{name}.yaml")
    result = summary(in_fresh_process(kernels, measure, config, [*fixed, *overrides]))
    console = Console()
    show(console, f"{name}, {kernels} kernels", result)
    target = {}
    if name != "quickstart":
        share = result["framework_share"]
        met = share <= TARGET_SHARE
        console.print(f"target <= {TARGET_SHARE:.0%}: {'met' if met else 'MISSED'}")
        target = {"target": {"share": share, "at_most": TARGET_SHARE, "met": met}}
    write_results(f"step_{name}_{kernels}", {"kernels": kernels, "overrides": overrides, **target, **result})


if __name__ == "__main__":
    main()
