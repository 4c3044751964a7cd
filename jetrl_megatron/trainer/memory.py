"""Memory of a run: its own peak and the proportional size of all its processes."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_pss_bytes() -> int:
    """Proportional set size (shared pages counted once) of the whole run: supervisor, ranks, engines."""
    me = psutil.Process()
    parent = me.parent()
    root = parent if parent is not None and "jetrl" in " ".join(parent.cmdline()) else me
    return sum(_pss_bytes(p.pid) for p in [root, *root.children(recursive=True)])


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # the process ended meanwhile
    return 0
