"""The report of a run: `report.html`, one self-contained file, and a text block for the terminal.

Reads metrics.jsonl and config.resolved.yaml only, so it works on a finished, a running and a killed run. The keys it
shows where present: `reward/mean`, `mismatch/max_abs_dlogp`, `mismatch/num_tokens`, `mismatch/num_nonzero`,
`time/<phase>_s`, `time/total_s` (the whole step), `tokens/rollout_per_s`.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.trainer.metrics import read_metrics

REWARD, MISMATCH = "reward/mean", "mismatch/max_abs_dlogp"
NUM_TOKENS, NUM_NONZERO = "mismatch/num_tokens", "mismatch/num_nonzero"
STEP_TIME, THROUGHPUT = "time/total_s", "tokens/rollout_per_s"
CONFIG_FILE = "config.resolved.yaml"
REPORT_FILE = "report.html"
EDGE_STEPS = 5
BARS = "▁▂▃▄▅▆▇█"
MAX_BARS = 60

Rows = list[dict[str, Any]]


def _values(rows: Rows, key: str) -> list[float]:
    """Numbers of a key; rows without it are left out, NaN stays."""
    return [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _worst(values: Sequence[float]) -> float:
    """Maximum in which NaN wins; NaN without values."""
    return math.nan if not values or any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True)
class Summary:
    """first_/last_reward: mean over the first and last 5 steps. max_mismatch: over the whole run, NaN if any step's is
    or none was measured. num_tokens_compared, num_tokens_differ: response tokens, trainer against engine."""

    num_steps: int
    last_step: int
    first_reward: float
    last_reward: float
    max_mismatch: float
    num_tokens_compared: int
    num_tokens_differ: int
    total_time_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, rows: Rows) -> Summary:
        rewards = _values(rows, REWARD)
        return cls(
            num_steps=len(rows),
            last_step=int(rows[-1]["step"]),
            first_reward=_mean(rewards[:EDGE_STEPS]),
            last_reward=_mean(rewards[-EDGE_STEPS:]),
            max_mismatch=_worst(_values(rows, MISMATCH)),
            num_tokens_compared=int(sum(_values(rows, NUM_TOKENS))),
            num_tokens_differ=int(sum(_values(rows, NUM_NONZERO))),
            total_time_s=math.fsum(_values(rows, STEP_TIME)),
            tokens_per_s=_mean(_values(rows, THROUGHPUT)),
        )

    def table(self) -> list[tuple[str, str]]:
        exact = self.max_mismatch == 0.0 and not self.num_tokens_differ
        verdict = "not measured" if not self.num_tokens_compared else "exact" if exact else "NOT exact"
        return [
            ("steps", f"{self.num_steps} (last: {self.last_step})"),
            (f"reward, first {EDGE_STEPS} steps", f"{self.first_reward:.3f}"),
            (f"reward, last {EDGE_STEPS} steps", f"{self.last_reward:.3f}"),
            ("max |dlogp| over the run", f"{self.max_mismatch!r} ({verdict})"),
            ("response tokens compared", f"{self.num_tokens_compared:,} ({self.num_tokens_differ:,} differ)"),
            ("time in steps", f"{self.total_time_s:.1f} s"),
            ("tokens/s, mean over steps", f"{self.tokens_per_s:.0f}"),
        ]


def sparkline(values: Sequence[float]) -> str:
    """Unicode bars from the least to the largest value, at most 60 (means of equal parts); NaN is `?`."""
    count = min(len(values), MAX_BARS)
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    means = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [value for value in means if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "?"
        return BARS[round((value - low) / span * (len(BARS) - 1))] if span else BARS[0]

    return "".join(map(bar, means))


def _load(run_dir: Path) -> Rows:
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"{run_dir}: metrics.jsonl has no finished step; fix: wait for the first step")
    return rows


def summarize(run_dir: Path) -> str:
    """Plain text for the terminal: reward sparkline and the summary table. Raises ValueError without metrics."""
    rows = _load(Path(run_dir))
    table = Summary.of(rows).table()
    width = max(len(name) for name, _ in table)
    rewards = _values(rows, REWARD)
    curve = f"{'reward'.ljust(width)}  {sparkline(rewards)}"
    if rewards:
        curve += f"  {rewards[0]:.2f} -> {rewards[-1]:.2f}"
    return "\n".join([curve, *(f"{name.ljust(width)}  {value}" for name, value in table)])


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run folder, by rename, and returns its path. It loads nothing from anywhere.
    Raises ValueError without metrics."""
    run_dir = Path(run_dir)
    rows = _load(run_dir)
    config_path = run_dir / CONFIG_FILE
    config = config_path.read_text(encoding="utf-8") if config_path.is_file() else "(config.resolved.yaml: missing)"
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in Summary.of(rows).table()
    )
    figures = "".join(_figure(title, unit, draw, rows) for title, unit, draw in FIGURES)
    page = _PAGE.format(
        title=html.escape(run_dir.resolve().name), cells=cells, figures=figures, config=html.escape(config)
    )
    write_atomic(run_dir / REPORT_FILE, page)
    return run_dir / REPORT_FILE


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    kept = [row for row in rows if isinstance(row.get(key), int | float)]
    return [int(row["step"]) for row in kept], [float(row[key]) for row in kept]


def _draw_line(key: str) -> Callable[[Any, Rows], bool]:
    def draw(axes: Any, rows: Rows) -> bool:
        steps, values = _series(rows, key)
        axes.plot(steps, values, marker=".", color="#1f5fa8")
        return bool(steps)

    return draw


def _draw_mismatch(axes: Any, rows: Rows) -> bool:
    """Linear around 0, so that exact zeros are points on the axis; non-finite steps are red crosses."""
    steps, values = _series(rows, MISMATCH)
    axes.plot(steps, values, marker=".", color="#1f5fa8")
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    axes.plot(bad, [0.0] * len(bad), "x", color="#c00000")
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(bottom=0.0)
    return bool(steps)


def _draw_times(axes: Any, rows: Rows) -> bool:
    """Phases of a step, stacked, without the total of the step."""
    keys = sorted({key for row in rows for key in row if key.startswith("time/") and key.endswith("_s")} - {STEP_TIME})
    steps = [int(row["step"]) for row in rows]
    stacks = [[float(row.get(key) or 0.0) for row in rows] for key in keys]
    if keys:
        labels = [key.removeprefix("time/").removesuffix("_s") for key in keys]
        axes.stackplot(steps, *stacks, labels=labels, step="mid")
        axes.legend(loc="upper right", fontsize=7)
    return bool(keys)


FIGURES: tuple[tuple[str, str, Callable[[Any, Rows], bool]], ...] = (
    ("Mean reward", "reward", _draw_line(REWARD)),
    ("Training-rollout mismatch: max |dlogp|", "nats", _draw_mismatch),
    ("Time per phase", "s", _draw_times),
    ("Throughput", "tokens/s", _draw_line(THROUGHPUT)),
)


def _figure(title: str, unit: str, draw: Callable[[Any, Rows], bool], rows: Rows) -> str:
    """An <img> with the PNG inside, or a sentence when the run has no such metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.0), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel=unit, title=title)
    axes.grid(alpha=0.3)
    if not draw(axes, rows):
        return f"<p>{html.escape(title)}: not measured in this run.</p>"
    buffer = io.BytesIO()
    canvas.print_png(buffer)  # type: ignore[no-untyped-call]
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font-family: sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: .3em 1em; border-bottom: 1px solid #ddd; }}
img {{ display: block; max-width: 100%; margin: 1em 0; }} pre {{ background: #f6f6f6; padding: 1em; overflow: auto; }}
</style></head><body>
<h1>{title}</h1>
<table>{cells}</table>
{figures}
<details><summary>Resolved configuration</summary><pre>{config}</pre></details>
</body></html>
"""
