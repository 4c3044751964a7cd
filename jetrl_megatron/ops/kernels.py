"""Which set of kernels the operators call. Every set gives the same bits; they differ in speed only."""

from __future__ import annotations

import importlib
from types import ModuleType

from jetrl_megatron.native import native

KERNEL_SETS = {
    "compiled": "jetrl_megatron.ops.compiled",
    "reference": "jetrl_megatron.ops.reference",
}

_active: list[ModuleType] = []


def use_kernels(name: str) -> None:
    """Select a kernel set for this process. Raises ValueError for an unknown name."""
    if name not in KERNEL_SETS:
        raise ValueError(f"kernels: {name!r}; rule: a known kernel set; fix: one of {sorted(KERNEL_SETS)}")
    _active[:] = [importlib.import_module(KERNEL_SETS[name])]


def kernels() -> ModuleType:
    """The active kernel set: unless chosen otherwise, compiled C++ where it can be built, else the torch reference."""
    if not _active:
        use_kernels("compiled" if native() is not None else "reference")
    return _active[0]
