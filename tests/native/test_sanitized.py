"""The compiled kernels touch no memory that is not theirs and do nothing undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    """All kernel tests pass with ASan and UBSan, on every instruction set of this processor."""
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    assert all(Path(path).is_absolute() for path in libraries), "the compiler comes without sanitizer libraries"
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch leak at exit by design
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "tests/native/sanitized.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
