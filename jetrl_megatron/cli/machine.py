"""What `jetrl doctor` asks of the operating system and the driver: memory, ports, clock, plugins, GPU use."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

QUERY_TIMEOUT_S = 20.0
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def load_fault(group: str, name: str, target: str) -> str | None:
    """Why the entry point cannot be loaded; None if it can. Imports its module."""
    found = next((e for e in entry_points(group=group) if e.name == name and e.value == target), None)
    if found is None:
        return "not registered"
    try:
        found.load()
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def busy_ports(ports: Iterable[int]) -> list[int]:
    """Those of `ports` that cannot be bound on all interfaces."""
    busy = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
            try:
                probe.bind(("", port))
            except OSError:
                busy.append(port)
    return busy


def ephemeral_ports() -> list[int] | None:
    """[first, last] of the ports that the kernel hands out; a fixed port inside can be taken at any time."""
    if not PORT_RANGE.is_file():
        return None
    return [int(part) for part in PORT_RANGE.read_text().split()]


def memory_bytes() -> int | None:
    """Memory that processes can still get (MemAvailable)."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def total_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def clock() -> dict[str, float | bool | None]:
    """unix_s: compare it over the nodes of a run; synchronized: what timedatectl says, None where it says nothing."""
    answer = _ask(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])
    return {"unix_s": time.time(), "synchronized": {"yes": True, "no": False}.get(answer.strip())}


def gpu_use() -> dict[str, object]:
    """Driver version, and MiB in use per GPU; empty values without a driver."""
    text = _ask(["nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader,nounits"])
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 2 and row[1].isdigit()]
    return {"driver": rows[0][0] if rows else None, "used_mib": [int(row[1]) for row in rows]}


def _ask(command: list[str]) -> str:
    """Output of a tool, empty if it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
