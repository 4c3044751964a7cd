"""`jetrl nodes`: is every node of a job fit for a run? Each node writes a report, one process judges all of them.

Used by launch/slurm/preflight.sh. A launcher that stops at the first bad node makes people repair one per job.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.cli.doctor import collect
from jetrl_megatron.cli.hardware import QUERY_TIMEOUT_S

NOT_FIT = 75  # EX_TEMPFAIL: another try, on other nodes, may succeed
MAX_CLOCK_SKEW_S = 5.0
MAX_IDLE_GPU_MIB = 1024
MIN_MEMLOCK_BYTES_WITH_GPUS = 1 << 30  # InfiniBand registers memory
COMPARED_VERSIONS = ("python", "torch", "megatron-core", "sglang", "transformers", "triton", "deep_gemm")

app = typer.Typer(name="nodes", help="Check all nodes of a job before a run.", no_args_is_help=True)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="shared folder of the reports")],
    node: Annotated[str, typer.Option("--node", help="name of this node")],
    port: Annotated[int, typer.Option("--port", help="port that node 0 will need; 0: none")] = 0,
) -> None:
    """Write this node's report, FOLDER/NODE.json: that of `jetrl doctor --json` and a few facts more."""
    found = {**collect(), "clock_skew_s": clock_skew_s(folder), "port": port, "port_free": port_is_free(port)}
    found |= {"gpu_used_mib": gpu_used_mib(), "driver": driver_version()}
    write_atomic(folder / f"{node}.json", json.dumps(found, indent=2))


@app.command()
def judge(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the reports")],
    expect: Annotated[str, typer.Option("--expect", help="names of all nodes, comma-separated; the first is node 0")],
    gpus: Annotated[str, typer.Option("--gpus", help="GPUs that each node must have")] = "0",
) -> None:
    """Judge all reports: one line per fault, for all nodes, and exit code 75 if there is any."""
    names = expect.split(",")
    reports = {name: json.loads(p.read_text()) for name in names if (p := folder / f"{name}.json").is_file()}
    found = list(faults(reports, names, int(gpus.rpartition(":")[2] or 0)))
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    bad = {line.split(":")[0] for line in found}
    typer.echo(f"nodes: {len(names)} checked, {len(bad)} not fit" if found else f"nodes: {len(names)} checked, all fit")
    raise typer.Exit(NOT_FIT if found else 0)


def faults(reports: Mapping[str, Mapping[str, Any]], nodes: Sequence[str], num_gpus: int) -> Iterator[str]:
    """`NODE: what; rule or fix` for every fault of every node."""
    usual = {name: _most_common([_version(r, name) for r in reports.values()]) for name in COMPARED_VERSIONS}
    usual["driver"] = _most_common([r["driver"] for r in reports.values()])
    for i, node in enumerate(nodes):
        if node not in reports:
            yield f"{node}: no report; rule: jetrl doctor runs there; fix: see the step's log, drain the node"
            continue
        found = reports[node]
        yield from (f"{node}: {problem}" for problem in found["problems"])
        for name, expected in usual.items():
            have = found["driver"] if name == "driver" else _version(found, name)
            if have != expected:
                yield f"{node}: {name} {have or 'not installed'}; rule: {expected}, as on most nodes; fix: one image"
        if abs(found["clock_skew_s"]) > MAX_CLOCK_SKEW_S:
            yield (
                f"{node}: clock {found['clock_skew_s']:+.1f} s from the file server; "
                f"rule: within {MAX_CLOCK_SKEW_S:.0f} s; fix: chrony"
            )
        if i == 0 and not found["port_free"]:
            yield f"{node}: port {found['port']} is taken; rule: free on node 0; fix: set JETRL_MASTER_PORT"
        if len(found["gpus"]) < num_gpus:
            yield f"{node}: {len(found['gpus'])} GPUs; rule: {num_gpus}; fix: drain the node"
        if found["gpus"] and (found["memlock_bytes"] or MIN_MEMLOCK_BYTES_WITH_GPUS) < MIN_MEMLOCK_BYTES_WITH_GPUS:
            yield f"{node}: memlock {found['memlock_bytes']} bytes; rule: unlimited; fix: LimitMEMLOCK of slurmd"
        for number, used in enumerate(found["gpu_used_mib"]):
            if used > MAX_IDLE_GPU_MIB:
                yield (
                    f"{node}: GPU {number} holds {used} MiB; rule: idle; "
                    "fix: end what an earlier job left (launch/slurm/cleanup.sh)"
                )


def _version(found: Mapping[str, Any], name: str) -> str | None:
    return found["python"] if name == "python" else found["versions"][name]


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0] if values else None


def clock_skew_s(folder: Path) -> float:
    """This node's clock against the one that stamps files in `folder`: on a shared folder one for all nodes."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"x")
        probe.flush()
        os.fsync(probe.fileno())
        return time.time() - os.stat(probe.name).st_mtime


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rendezvous will: TIME_WAIT is no fault
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def gpu_used_mib() -> list[int]:
    return [int(value) for value in _nvidia_smi("memory.used") if value.isdigit()]


def driver_version() -> str | None:
    return next(iter(_nvidia_smi("driver_version")), None)


def _nvidia_smi(field: str) -> list[str]:
    """One value per GPU; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
