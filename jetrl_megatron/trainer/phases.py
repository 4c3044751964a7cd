"""Times of a step's phases, and the status file that says which one is running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from jetrl_megatron.trainer import files


class Phases:
    """run_dir: where `status.json` is written, None on ranks that write none."""

    def __init__(self, run_dir: Path | None, step: int) -> None:
        self._run_dir, self._step = run_dir, step
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._run_dir is not None:
            files.write_status(self._run_dir, self._step, name)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start

    def times(self) -> dict[str, float]:
        """`time/NAME_s` per phase and `time/total_s` since the step began."""
        total = time.perf_counter() - self._start
        return {**{f"time/{name}_s": seconds for name, seconds in self._seconds.items()}, "time/total_s": total}
