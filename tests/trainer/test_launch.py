"""The supervisor of `jetrl train`: how the ranks of one machine find each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.runs import QUICKSTART, ROOT, environment

LAUNCH = """
import socket, sys
socket.getfqdn = socket.gethostname = lambda *_: "no-such-host.invalid"
sys.executable = sys.argv[1]
from pathlib import Path
from jetrl_megatron.config import load_config
from jetrl_megatron.trainer.launch import launch
sys.exit(launch(load_config(Path(sys.argv[2]), ["parallel.data=2"]), Path(sys.argv[3]), "train"))
"""


def test_a_host_name_that_does_not_resolve(tmp_path: Path) -> None:
    """A container's own name is often in no table: both ranks are sent to an address, not to the host's name."""
    rank = tmp_path / "rank"
    rank.write_text('#!/bin/sh\nprintf %s "$MASTER_ADDR" > "$3/address_$RANK"\n')
    rank.chmod(0o755)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", LAUNCH, str(rank), str(QUICKSTART), str(run_dir)]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name: path.read_text() for path in run_dir.glob("address_*")} == {
        "address_0": "127.0.0.1",
        "address_1": "127.0.0.1",
    }
