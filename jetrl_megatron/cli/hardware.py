"""Which NVIDIA GPUs are here, without importing torch: `jetrl check` must answer fast."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FP8_CAPABILITY = (8, 9)  # Ada: the first with FP8 tensor cores
DEEPGEMM_CAPABILITY, ABOVE_DEEPGEMM = (9, 0), (10, 0)  # Hopper
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


def has_nvcc() -> bool:
    """Whether CUDA's compiler is here, with which DeepGEMM makes its kernels at run time."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return shutil.which("nvcc") is not None or any(home and Path(home, "bin", "nvcc").is_file() for home in homes)


def backend_obstacle(name: str, gpus: list[Gpu], has_deep_gemm: bool) -> str | None:
    """Why the FP8 backend `triton` or `deep_gemm` cannot run on these GPUs; None if it can. The weakest GPU decides."""
    if not gpus:
        return "no NVIDIA GPU"
    lowest, highest = min(g.capability for g in gpus), max(g.capability for g in gpus)
    if lowest < FP8_CAPABILITY:
        return f"compute capability {lowest[0]}.{lowest[1]} has no FP8 tensor cores"
    if name == "deep_gemm" and (lowest < DEEPGEMM_CAPABILITY or highest >= ABOVE_DEEPGEMM):
        return f"the DeepGEMM kernels need compute capability 9.x (Hopper), found {lowest[0]}.{lowest[1]}"
    if name == "deep_gemm" and not has_deep_gemm:
        return "deep_gemm or nvcc is not installed (pip install 'jetrl-megatron[gpu]', and the CUDA toolkit)"
    return None


def fp8_backend(gpus: list[Gpu], has_deep_gemm: bool) -> tuple[str, str]:
    """What `precision.backend: auto` is here, and why. has_deep_gemm: the package and nvcc."""
    obstacles = {name: backend_obstacle(name, gpus, has_deep_gemm) for name in ("deep_gemm", "triton")}
    if obstacles["deep_gemm"] is None:
        return "deep_gemm", "Hopper GPUs, DeepGEMM and nvcc are present"
    if obstacles["triton"] is None:
        return "triton", obstacles["deep_gemm"]
    return "emulated", obstacles["triton"]
