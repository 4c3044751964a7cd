"""The table of `jetrl exactness`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jetrl_megatron.study import exactness


def measure_exactness(out: Path, cells: Sequence[exactness.Cell]) -> bool:
    """Run the cells and print them; whether every one is exact."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # an exception ends the run of the cell too
    console = Console()
    table = Table("model", "format", "layout", "tokens", "max abs dlogp", title="exactness")
    failed = 0
    for result in exactness.matrix(out, cells):
        cell, value = result.cell, result.error or f"{result.max_abs_dlogp:g}"
        console.print(f"{cell.model}, {cell.format}, {cell.layout}: {value} over {result.num_tokens} tokens")
        table.add_row(cell.model, cell.format, cell.layout, f"{result.num_tokens:,}", value)
        failed += not result.exact
    console.print(table)
    if failed:
        console.print(f"{failed} cells are not exact (0.0 over at least {exactness.MIN_TOKENS} tokens)")
    return failed == 0
