"""Progress on the terminal: one line per step, and a bar where the output is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from jetrl_megatron.config import RunConfig


class Progress:
    """Prints reward, mismatch and times of every step."""

    def __init__(self, cfg: RunConfig, enabled: bool) -> None:
        self._enabled = enabled
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn(cfg.name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=self._console, disable=not enabled or not self._console.is_terminal)
        self._task = self._bar.add_task("steps", total=cfg.trainer.num_steps)

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        if not self._enabled:
            return
        self._bar.update(self._task, completed=step)
        self._bar.console.print(
            f"step {step:4d}  reward {metrics['reward/mean']:.3f}  "
            f"max|dlogp| {metrics['mismatch/max_abs_dlogp']:.3g} over {metrics['mismatch/num_tokens']} tokens  "
            f"{metrics['time/total_s']:.1f} s (rollout {metrics['time/rollout_s']:.1f}, "
            f"train {metrics['time/train_s']:.1f})",
            soft_wrap=True,
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
