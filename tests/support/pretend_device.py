"""A device that is none: its tensors hold their values on the CPU, so where code puts tensors can be shown without GPU.

As on a GPU, an operator refuses tensors of two devices, except for copies, CPU numbers without a dimension, and CPU
indices. Inside `pretending()`, factories make tensors on DEVICE when asked to. Values are the CPU's, so results must
equal a run on the CPU bit for bit. (Torch knows it as meta, the one device
that needs no library.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

DEVICE = torch.device("meta")
_MIXED = {  # operators that take tensors of two devices
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
}


class Pretended(Tensor):
    """held: the values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Pretended) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sends what is made on DEVICE there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """`torch.tensor` and `new_tensor` allocate below the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return Pretended(func(*args, **{**kwargs, "device": "cpu"}))
        if func is Tensor.new_tensor and isinstance(args[0], Pretended):
            return Pretended(func(args[0].held, *args[1:], **kwargs))
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Inside, DEVICE exists."""
    with _Factories(), _FromNumbers():
        yield


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found, _ = tree_flatten((args, kwargs))
    tensors = [value for value in found if isinstance(value, Tensor)]
    pretend = [t for t in tensors if isinstance(t, Pretended)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    if pretend and func not in _MIXED:
        elsewhere = [t for t in tensors if not isinstance(t, Pretended) and t.dim()]
        if elsewhere:
            raise RuntimeError(f"{func}: tensors on {DEVICE} and cpu {[tuple(t.shape) for t in elsewhere]}")
    if target is not None and target == DEVICE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map_only(Pretended, lambda t: t.held, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if target is not None:
        there = target == DEVICE
    elif func in _MIXED:
        there = isinstance(tensors[0], Pretended)
    else:
        there = bool(pretend)
    if not there:
        return result
    wrapped = tree_map(lambda t: Pretended(t) if isinstance(t, Tensor) else t, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)
