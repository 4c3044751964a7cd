"""The engine's attention backend on the GPU kernel set: what a decode step asks the host for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jetrl_megatron.rollout.environment import engine_environment

ROOT = Path(__file__).parents[2]


def test_decode_reads_nothing_on_the_host() -> None:
    """A decode step on tensors without values: the host reads no length, row or slot, the kernel gets the engine's own
    request table, and its grid comes from shapes alone. Control: a prefill does read its lengths."""
    environment = engine_environment(1, 1)
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)])
    script = str(Path(__file__).with_name("decode_on_meta.py"))
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["DECODES", "READS"], done.stderr[-3000:]
