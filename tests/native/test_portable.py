"""The kernels without Python: one checksum over all their outputs, the same on every processor."""

from __future__ import annotations

import subprocess
from pathlib import Path

from jetrl_megatron import native

CHECKSUM = "09c4a4075696caac"  # x86-64 and, emulated, aarch64


def test_checksum_of_every_instruction_set(tmp_path: Path) -> None:
    """Quantizers, FP8 and bf16 linear, attention, norms, activations and log-sum-exp, compiled for this processor."""
    program = tmp_path / "portable"
    flags = [flag for flag in native.FLAGS if flag not in ("-shared", "-fPIC")]
    source = Path(__file__).with_name("portable.cpp")
    subprocess.run(["g++", *flags, "-o", str(program), str(source)], capture_output=True, check=True, timeout=300)
    best = native.native()
    assert best is not None
    for level in range(min(2, best.library.jetrl_best_level()) + 1):
        done = subprocess.run([str(program), str(level)], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == CHECKSUM, native.LEVELS[level]
