"""Compiled exact CPU kernels: the same bits as the torch reference, several times faster.

Built with g++ on first use into a cache that is keyed by the source, the compiler and its flags; checked against
constants when loaded. Without a compiler, or if the check fails, the torch forms are used: slower, same bits.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "kernels.inc", "amx.inc"))
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # a product and a sum are two roundings unless the source says fma
    "-fno-trapping-math",
    "-fno-math-errno",
)
LEVELS = ("baseline", "avx2", "avx512", "amx")


@dataclass(frozen=True)
class Native:
    """The loaded library. level: name of the instruction set in use."""

    library: ctypes.CDLL
    level: str


@dataclass(frozen=True)
class Unavailable:
    """Why the compiled kernels are not in use."""

    reason: str


def native() -> Native | None:
    """The library, or None where the torch forms are used."""
    found = status()
    return found if isinstance(found, Native) else None


@functools.cache
def status() -> Native | Unavailable:
    """Build and load once per process. JETRL_NATIVE=0 turns the compiled kernels off; the name of an instruction set
    (baseline, avx2, avx512, amx) asks for that one."""
    wanted = os.environ.get("JETRL_NATIVE", "auto")
    if wanted == "0":
        return Unavailable("turned off by JETRL_NATIVE=0")
    try:
        library = ctypes.CDLL(str(build()))
    except (OSError, subprocess.SubprocessError) as error:
        return Unavailable(f"not built: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    level = library.jetrl_best_level() if wanted == "auto" else LEVELS.index(wanted)
    if library.jetrl_use_level(level) != level:
        raise ValueError(f"JETRL_NATIVE: {wanted}; rule: an instruction set of this processor; fix: leave it unset")
    if not _self_test(library):
        log.warning("native kernels: self-test failed, the torch forms are used")
        return Unavailable("self-test failed")
    return Native(library, LEVELS[level])


def build() -> Path:
    """Path of the shared library, compiled unless the cache has it. Raises OSError or SubprocessError."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise OSError("no g++ on PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.blake2b(
        b"".join(p.read_bytes() for p in SOURCES) + version + " ".join(FLAGS).encode(), digest_size=12
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jetrl-megatron"
    target = cache / f"kernels-{digest.hexdigest()}.so"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a run start together: one builds, the others wait
        if not target.is_file():
            output = Path(folder) / "kernels.so"
            command = [compiler, *FLAGS, "-o", str(output), str(SOURCES[0])]
            subprocess.run(command, capture_output=True, check=True, timeout=600)
            os.replace(output, target)
    return target


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _self_test(library: ctypes.CDLL) -> bool:
    """One ragged quantized GEMM whose exact result is known: catches a miscompiled kernel or a wrong fma."""
    m, n, k = 3, 18, 130
    rng = np.random.default_rng(0)
    codes_a = rng.integers(0, 0x7E, (m, k), dtype=np.uint8)
    codes_b = rng.integers(0, 0x7E, (n, k), dtype=np.uint8)
    scale_a = (rng.random((m, 2)) + 0.5).astype(np.float32)
    scale_b = (rng.random((2, n)) + 0.5).astype(np.float32)
    packed = np.empty(2 * 256 * 16, dtype=np.uint16)
    out = np.empty((m, n), dtype=np.float32)
    library.jetrl_pack_fp8(pointer(codes_b), ctypes.c_int64(n), ctypes.c_int64(k), pointer(packed))
    library.jetrl_fp8_gemm(
        *map(pointer, (codes_a, scale_a, packed, scale_b, out)),
        *map(ctypes.c_int64, (m, n, k, 1)),
    )
    a, b = _decode(codes_a), _decode(codes_b)
    expected = np.zeros((m, n), dtype=np.float32)
    for g, (first, last) in enumerate(((0, 128), (128, 130))):
        partial = (a[:, first:last] @ b[:, first:last].T).astype(np.float32).astype(np.longdouble)
        scale = (scale_a[:, g : g + 1] * scale_b[g]).astype(np.longdouble)
        expected = (partial * scale + expected.astype(np.longdouble)).astype(np.float32)
    return bool(np.array_equal(out, expected))


def _decode(codes: np.ndarray) -> np.ndarray:
    """Non-negative finite E4M3 codes -> fp64."""
    exponent, fraction = (codes >> 3).astype(np.float64), (codes & 7).astype(np.float64)
    normal = np.exp2(exponent - 7) * (1 + fraction / 8)
    decoded: np.ndarray = np.where(exponent > 0, normal, fraction * 2.0**-9)
    return decoded
