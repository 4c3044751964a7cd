"""Tensors that claim to be on a GPU and hold their values on the CPU: where code puts its tensors, shown without one.

As on a GPU, an operator refuses tensors of two devices, except for copies, CPU numbers without a dimension, and CPU
indices. A factory called with `device="cuda:0"` inside `pretending()` makes such tensors. Values are the CPU's, so
results must equal a run on the CPU bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

DEVICE = torch.device("cuda", 0)
_MIXED = {  # operators that take tensors of two devices
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
}


class PretendGpu(Tensor):
    """held: the values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> PretendGpu:
        made: PretendGpu = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendGpu({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sends what is made on DEVICE there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Inside, DEVICE exists."""
    with _Factories():
        yield


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found, _ = tree_flatten((args, kwargs))
    tensors = [value for value in found if isinstance(value, Tensor)]
    pretend = [t for t in tensors if isinstance(t, PretendGpu)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    if pretend and func not in _MIXED:
        elsewhere = [t for t in tensors if not isinstance(t, PretendGpu) and t.dim()]
        if elsewhere:
            raise RuntimeError(f"{func}: tensors on {DEVICE} and cpu {[tuple(t.shape) for t in elsewhere]}")
    if target is not None and target.type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map_only(PretendGpu, lambda t: t.held, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if target is not None:
        there = target.type == "cuda"
    elif func in _MIXED:
        there = isinstance(tensors[0], PretendGpu)
    else:
        there = bool(pretend)
    if not there:
        return result
    wrapped = tree_map(lambda t: PretendGpu(t) if isinstance(t, Tensor) else t, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)
