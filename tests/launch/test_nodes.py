"""The judgement of nodes, on reports made by hand, and the search for the slow node."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jetrl_megatron.cli.bandwidth import slow_nodes
from jetrl_megatron.cli.nodes import COMPARED_VERSIONS, clock_skew_s, faults, port_is_free

GPU = {"name": "H100", "capability": "9.0", "fp8": True, "memory_mib": 81559}
FIT: dict[str, Any] = {
    "python": "3.12.1",
    "versions": {name: "1.0" for name in COMPARED_VERSIONS if name != "python"},
    "problems": [],
    "gpus": [GPU, GPU],
    "gpu_used_mib": [4, 4],
    "driver": "580.1",
    "memlock_bytes": None,
    "clock_skew_s": 0.01,
    "port": 20001,
    "port_free": True,
}
NODES = ["n1", "n2", "n3", "n4"]


def with_changes(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({**FIT, **changes})


def test_fit_nodes_have_no_faults() -> None:
    """Also where node 1's port, which only node 0 needs, is taken."""
    reports = {"n1": FIT, "n2": with_changes(port_free=False)}
    assert list(faults(reports, ["n1", "n2"], 2)) == []


def test_every_fault_of_every_node_is_named() -> None:
    """All nodes are judged, each fault is one line that begins with the node's name."""
    versions = {**FIT["versions"], "torch": "0.9"}
    reports = {
        "n1": with_changes(port_free=False, gpu_used_mib=[4, 70000]),
        "n2": with_changes(gpus=[GPU], memlock_bytes=65536, problems=["nofile: 1024; rule: at least 4096"]),
        "n4": with_changes(versions=versions, driver="550.0", clock_skew_s=-60.0),
    }
    found = list(faults(reports, NODES, 2))
    expected = [
        ("n1", "port 20001 is taken"),
        ("n1", "GPU 1 holds 70000 MiB"),
        ("n2", "nofile: 1024"),
        ("n2", "1 GPUs; rule: 2"),
        ("n2", "memlock 65536 bytes"),
        ("n3", "no report"),
        ("n4", "torch 0.9; rule: 1.0"),
        ("n4", "driver 550.0; rule: 580.1"),
        ("n4", "clock -60.0 s"),
    ]
    assert len(found) == len(expected), found
    for node, what in expected:
        assert any(line.startswith(f"{node}: ") and what in line for line in found), (node, what, found)


def test_command_line(tmp_path: Path) -> None:
    """`jetrl nodes judge`: code 75 and all faults on stderr; 0 and one line if there is none."""
    (tmp_path / "n1.json").write_text(json.dumps(FIT))
    for nodes, code, stderr in (("n1", 0, ""), ("n1,n2", 75, "error: n2: no report; rule: jetrl doctor runs there")):
        command = [sys.executable, "-m", "jetrl_megatron.cli", "nodes", "judge", str(tmp_path), "--expect", nodes]
        done = subprocess.run([*command, "--gpus", "h100:2"], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == code
        assert done.stderr.startswith(stderr)


def test_facts_of_this_node(tmp_path: Path) -> None:
    """The clock agrees with the local file system's; a port that is listened on is not free."""
    import socket

    assert abs(clock_skew_s(tmp_path)) < 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not port_is_free(taken.getsockname()[1])
    assert port_is_free(0)


def test_slow_node_is_the_one_in_most_slow_pairs() -> None:
    """A ring of four where node c is slow: both pairs with c are, and only c is named."""
    pairs = {("a", "b"): 40.0, ("b", "c"): 3.0, ("c", "d"): 4.0, ("d", "a"): 41.0}
    assert slow_nodes(pairs, 30.0) == ["c"]
    assert slow_nodes(pairs, 1.0) == []
    assert slow_nodes({("a", "b"): 1.0}, 30.0) == ["a", "b"]
