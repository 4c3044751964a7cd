"""`jetrl doctor`: what is installed, what this machine offers, and which FP8 backend a run would use."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from jetrl_megatron.cli import machine
from jetrl_megatron.cli.hardware import FP8_CAPABILITY, find_gpus, fp8_backend, has_nvcc

# what we call it -> distributions that provide it, the first one installed counts
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "triton": ("triton",),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm", "deep_gemm"),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "jetrl-megatron": ("jetrl-megatron",),
    "apex": ("apex",),
    "flash-attn": ("flash-attn", "flash_attn"),
    "numpy": ("numpy",),
    "pydantic": ("pydantic",),
    "safetensors": ("safetensors",),
    "datasets": ("datasets",),
    "math-verify": ("math-verify",),
}
REQUIRED = ("torch", "megatron-core", "sglang", "transformers", "triton")
ENTRY_POINTS = {
    "sglang.srt.platforms": ("jetrl_cpu", "jetrl_megatron.rollout.platform:activate"),
    "sglang.srt.plugins": ("jetrl", "jetrl_megatron.rollout.plugin:register"),
}
MIN_NOFILE = 4096
MIN_SHM_BYTES = MIN_DISK_BYTES = 1 << 30
MAX_IDLE_MIB = 1024  # of a GPU that nobody uses
GIB = 1 << 30


def installed(name: str) -> str | None:
    """Version of the first installed distribution that provides `name`."""
    for distribution in DISTRIBUTIONS[name]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def has_deep_gemm() -> bool:
    """Whether DeepGEMM can be used: the package, and nvcc for its kernels."""
    return installed("deep_gemm") is not None and has_nvcc()


def collect(ports: Sequence[int] = ()) -> dict[str, Any]:
    """The whole report as JSON-able data. Imports torch (for gloo, NCCL and the CUDA build) where it is installed, and
    the modules of our entry points. ports: those that must be free."""
    gpus = find_gpus()
    versions = {name: installed(name) for name in DISTRIBUTIONS}
    backend, reason = fp8_backend(gpus, has_deep_gemm())
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions,
        "entry_points": {group: _registered(group, *spec) for group, spec in ENTRY_POINTS.items()},
        "torch_cuda_build": None,
        "gloo": False,
        "gpus": [
            {
                "name": g.name,
                "capability": f"{g.capability[0]}.{g.capability[1]}",
                "fp8": g.capability >= FP8_CAPABILITY,
                "memory_mib": g.memory_mib,
            }
            for g in gpus
        ],
        "fp8_backend": backend,
        "fp8_backend_reason": reason,
        "cpu_kernels": _cpu_kernels(),
        "cores": num_cores(),
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "memlock_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "shm_free_bytes": _free(Path("/dev/shm")),
        "disk_free_bytes": _free(Path.cwd()),
        "entry_point_faults": {group: machine.load_fault(group, *spec) for group, spec in ENTRY_POINTS.items()},
        "nccl": None,
        "torch_float8": False,
        "gpu_use": machine.gpu_use(),
        "shm_total_bytes": machine.total_bytes(Path("/dev/shm")),
        "memory_available_bytes": machine.memory_bytes(),
        "nofile_hard": _limit(resource.RLIMIT_NOFILE, hard=True),
        "memlock_hard_bytes": _limit(resource.RLIMIT_MEMLOCK, hard=True),
        "ephemeral_ports": machine.ephemeral_ports(),
        "ports_checked": list(ports),
        "ports_busy": machine.busy_ports(ports),
        "clock": machine.clock(),
    }
    if versions["torch"] is not None:
        import torch

        report["torch_cuda_build"] = torch.version.cuda
        report["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        report["torch_float8"] = hasattr(torch, "float8_e4m3fn")
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    report["problems"] = problems(report)
    return report


def problems(report: dict[str, Any]) -> list[str]:
    """Findings that would stop or hamper a run, each with its fix."""
    found = [f"{name}: not installed; fix: make setup" for name in REQUIRED if report["versions"][name] is None]
    for group, registered in report["entry_points"].items():
        if not registered:
            found.append(
                f"entry point {group}: {ENTRY_POINTS[group][0]} is not registered, SGLang would not load our plugin; "
                "fix: pip install --no-deps -e . in this environment"
            )
    if not report["gloo"]:
        found.append("gloo: torch has no gloo backend; fix: install a torch build with distributed support")
    if report["gpus"] and report["torch_cuda_build"] is None:
        found.append("torch: a CPU build on a machine with a GPU; fix: install the CUDA build of torch")
    if report["nofile"] is not None and report["nofile"] < MIN_NOFILE:
        found.append(f"nofile: {report['nofile']}; rule: at least {MIN_NOFILE}; fix: ulimit -n {MIN_NOFILE}")
    if report["shm_free_bytes"] is None:
        found.append("/dev/shm: absent; fix: set sync.staging_dir to another folder")
    elif report["shm_free_bytes"] < MIN_SHM_BYTES:
        free = report["shm_free_bytes"] / GIB
        found.append(f"/dev/shm: {free:.1f} GiB free; fix: enlarge it (docker run --shm-size) or set sync.staging_dir")
    return found + _machine_problems(report)


def _machine_problems(report: dict[str, Any]) -> list[str]:
    found = [
        f"entry point {group}: registered, but cannot be loaded ({fault}); fix: make setup"
        for group, fault in report["entry_point_faults"].items()
        if fault is not None and report["entry_points"][group]
    ]
    if report["gpus"] and report["nccl"] is None:
        found.append("nccl: torch has none on a machine with GPUs; fix: install the CUDA build of torch")
    if report["gpus"] and report["memlock_bytes"] is not None:
        found.append(f"memlock: {report['memlock_bytes']} bytes; rule: unlimited with GPUs; fix: ulimit -l unlimited")
    for index, used in enumerate(report["gpu_use"]["used_mib"]):
        if used > MAX_IDLE_MIB:
            found.append(f"GPU {index}: {used} MiB in use; rule: idle before a run; fix: end what runs there")
    if report["disk_free_bytes"] is not None and report["disk_free_bytes"] < MIN_DISK_BYTES:
        found.append(f"disk: {_gib(report['disk_free_bytes'])} free here; fix: run from a folder with space")
    found += [f"port {port}: in use; rule: free; fix: another port" for port in report["ports_busy"]]
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """The report as plain text."""
    out = [f"python {report['python']}"]
    out += [f"{name} {found or 'not installed'}" for name, found in report["versions"].items()]
    out += [f"entry point {g}: {'registered' if ok else 'MISSING'}" for g, ok in report["entry_points"].items()]
    out.append(f"torch CUDA build: {report['torch_cuda_build'] or 'none (CPU build)'}")
    out.append(f"gloo: {'yes' if report['gloo'] else 'no'}")
    for gpu in report["gpus"]:
        fp8 = "FP8 tensor cores" if gpu["fp8"] else "no FP8 tensor cores"
        out.append(f"GPU {gpu['name']}: compute capability {gpu['capability']}, {gpu['memory_mib']} MiB, {fp8}")
    if not report["gpus"]:
        out.append("GPU: none")
    out.append(f"FP8 backend: {report['fp8_backend']} ({report['fp8_backend_reason']})")
    out.append(f"CPU kernels: {report['cpu_kernels']}")
    out.append(f"cores: {report['cores']}")
    out.append(f"nofile: {_unlimited(report['nofile'])}, memlock: {_unlimited(report['memlock_bytes'])} bytes")
    out.append(f"/dev/shm free: {_gib(report['shm_free_bytes'])}, disk free here: {_gib(report['disk_free_bytes'])}")
    out += _machine_lines(report)
    out += [f"problem: {p}" for p in report["problems"]] or ["no problems found"]
    return out


def _machine_lines(report: dict[str, Any]) -> list[str]:
    use, times = report["gpu_use"], report["clock"]
    out = [f"entry point {g}: {f if f else 'can be loaded'}" for g, f in report["entry_point_faults"].items()]
    out.append(f"NCCL: {report['nccl'] or 'none'}, torch float8: {'yes' if report['torch_float8'] else 'no'}")
    if use["driver"]:
        out.append(f"NVIDIA driver {use['driver']}, MiB in use per GPU: {use['used_mib']}")
    out.append(f"/dev/shm size: {_gib(report['shm_total_bytes'])}, memory: {_gib(report['memory_available_bytes'])}")
    hard = f"nofile {_unlimited(report['nofile_hard'])}, memlock {_unlimited(report['memlock_hard_bytes'])} bytes"
    out.append(f"hard limits: {hard}")
    out.append(f"ephemeral ports: {report['ephemeral_ports'] or 'unknown'}, ports checked: {report['ports_checked']}")
    synchronized = {True: "synchronized", False: "NOT synchronized", None: "synchronization unknown"}
    out.append(f"clock: {times['unix_s']:.0f} s since 1970, {synchronized[times['synchronized']]}")
    return out


def _cpu_kernels() -> str:
    """Which form of the exact operators runs: compiled for an instruction set, or the torch reference and why."""
    from jetrl_megatron.native import Native, status

    found = status()
    return f"compiled, {found.level}" if isinstance(found, Native) else f"torch reference ({found.reason})"


def num_cores() -> int:
    """Cores this process may use (a container or taskset may allow fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _registered(group: str, name: str, target: str) -> bool:
    return any(e.name == name and e.value == target for e in entry_points(group=group))


def _limit(kind: int, hard: bool = False) -> int | None:
    """Soft or hard limit; None: unlimited."""
    value = resource.getrlimit(kind)[1 if hard else 0]
    return None if value == resource.RLIM_INFINITY else value


def _free(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _unlimited(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _gib(value: int | None) -> str:
    return "absent" if value is None else f"{value / GIB:.1f} GiB"
