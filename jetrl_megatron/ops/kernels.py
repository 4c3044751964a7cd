"""Which set of kernels the operators call: the one that the FP8 backend of this process brings.

| kernel set | with backend | bits |
|---|---|---|
| `compiled`, `reference` | `emulated` | the same on both |
| `triton` | `triton`, `deep_gemm` | the same where docs/gpu.md says so: not those of tensor-core sums |
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from jetrl_megatron.fp8.backends import active_name
from jetrl_megatron.native import native

KERNEL_SETS = {
    "compiled": "jetrl_megatron.ops.compiled",
    "reference": "jetrl_megatron.ops.reference",
    "triton": "jetrl_megatron.ops.gpu.kernels",
}

_chosen: list[str] = []


def use_kernels(name: str | None) -> None:
    """Select a kernel set for this process, whatever its backend; None: the backend's again. Raises ValueError for an
    unknown name."""
    if name is not None and name not in KERNEL_SETS:
        raise ValueError(f"kernels: {name!r}; rule: a known kernel set; fix: one of {sorted(KERNEL_SETS)}")
    _chosen[:] = [] if name is None else [name]


def kernels_name() -> str:
    """Name of the active kernel set: unless chosen otherwise, Triton's with a GPU backend; with the emulated one
    compiled C++ where it can be built and tensors are on the CPU, else the torch reference."""
    if _chosen:
        return _chosen[0]
    if active_name() != "emulated":
        return "triton"
    return "compiled" if native() is not None and not torch.cuda.is_available() else "reference"


def kernels() -> ModuleType:
    """The active kernel set."""
    return importlib.import_module(KERNEL_SETS[kernels_name()])
