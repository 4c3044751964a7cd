"""Which NVIDIA GPUs are here, without importing torch: `jetrl check` must answer fast."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0), which the DeepGEMM kernels need
DEEPGEMM_CAPABILITY = (9, 0)
QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_mib: int


def find_gpus() -> list[Gpu]:
    """GPUs as `nvidia-smi` reports them; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(csv_text: str) -> list[Gpu]:
    """Rows `name, 9.0, 81559`; rows that a driver fills with [N/A] are left out."""
    gpus = []
    for line in csv_text.splitlines():
        fields = [f.strip() for f in line.rsplit(",", 2)]
        if len(fields) != 3:
            continue
        major, _, minor = fields[1].partition(".")
        if major.isdigit() and minor.isdigit() and fields[2].isdigit():
            gpus.append(Gpu(fields[0], (int(major), int(minor)), int(fields[2])))
    return gpus


def fp8_backend(gpus: list[Gpu], has_deep_gemm: bool) -> tuple[str, str]:
    """(backend, reason): `emulated` unless every GPU has Hopper's FP8 tensor cores and DeepGEMM is installed."""
    if not gpus:
        return "emulated", "no NVIDIA GPU"
    lowest = min(g.capability for g in gpus)
    if lowest < FP8_CAPABILITY:
        return "emulated", f"compute capability {lowest[0]}.{lowest[1]} has no FP8 tensor cores"
    if lowest < DEEPGEMM_CAPABILITY:
        return "emulated", f"DeepGEMM needs compute capability 9.0, found {lowest[0]}.{lowest[1]}"
    if not has_deep_gemm:
        return "emulated", "deep_gemm is not installed (pip install 'jetrl-megatron[gpu]')"
    return "deepgemm", "FP8 tensor cores and DeepGEMM are present"
