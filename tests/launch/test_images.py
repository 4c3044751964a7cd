"""What the images install: the locks agree with the pins, and every package has a hash."""

from __future__ import annotations

import re

import pytest

from tests.launch.conftest import ROOT

REQUIREMENTS = ROOT / "requirements"
LOCKS = {
    "torch.lock": ["base.txt"],
    "cpu.lock": ["cpu.txt", "nodeps.txt", "dev.txt"],
    "megatron.lock": ["nodeps-ignore-python.txt"],
    "gpu-image.lock": ["gpu-image.txt"],
}


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (REQUIREMENTS / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_agree_with_the_pins(lock: str) -> None:
    """Every pin is locked at its version (`make lock` was run), with a hash, from no named index."""
    text = (REQUIREMENTS / lock).read_text()
    locked = pins(lock)
    for source in LOCKS[lock]:
        assert pins(source).items() <= locked.items(), f"{source} changed; fix: make lock"
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "://" not in text
