"""The precision-flow recorder: which operator ran in which module, and with what precision on its edges.

Operators announce themselves by `@operator(name)`; modules by `attach(root, canonical_name)`, which keeps a stack of
module paths through forward hooks. Recording is off unless `record()` is active, and then costs one list append a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from jetrl_megatron.ops.timing import timed

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Edge:
    """Precision of one tensor: dtype, and for FP8 the granularity and scale format."""

    dtype: str
    granularity: str | None = None
    scale_format: str | None = None


@dataclass(frozen=True)
class OperatorCall:
    """One executed operator. module: canonical (Hugging Face) module path, '' outside any attached module."""

    operator: str
    module: str
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    kernels: str


class Recording(list[OperatorCall]):
    """Calls in the order in which they ran."""


_recording: list[Recording] = []
_modules: list[str] = []


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record every operator call of this process inside the block."""
    recording = Recording()
    _recording.append(recording)
    try:
        yield recording
    finally:
        _recording.pop()


def recording() -> bool:
    return bool(_recording)


def operator(name: str) -> Callable[[F], F]:
    """Mark a public function of `ops` as an operator; its tensor arguments and results become edges, its time is kept
    by `timing`."""

    def decorate(function: F) -> F:
        function = timed(name)(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if _recording:
                outputs = result if isinstance(result, tuple) else (result,)
                note(name, [*args, *kwargs.values()], outputs)
            return result

        return call  # type: ignore[return-value]

    return decorate


def note(name: str, inputs: Any, outputs: Any) -> None:
    """Append one call to the active recording."""
    from jetrl_megatron.ops.kernels import kernels

    module = _modules[-1] if _modules else ""
    used = kernels().__name__.rsplit(".", 1)[-1]
    call = OperatorCall(name, module, _edges(inputs), _edges(outputs), used)
    for active in _recording:
        active.append(call)


def _edges(values: Any) -> tuple[Edge, ...]:
    edges = []
    for value in values:
        if isinstance(value, list | tuple) and value:
            value = value[0]  # one edge for a group of alike weights
        if isinstance(value, Tensor) and value.is_floating_point():
            edges.append(Edge(str(value.dtype).removeprefix("torch.")))
        elif hasattr(value, "quantized"):  # fp8.linear.Fp8Weight
            fmt = value.quantized.format
            edges.append(Edge("float8_e4m3fn", fmt.granularity, fmt.scale_format))
    return tuple(edges)


def attach(root: nn.Module, canonical_name: Callable[[str], str | None]) -> list[torch.utils.hooks.RemovableHandle]:
    """Push the canonical path of every submodule for the time of its forward. canonical_name: our module path ->
    Hugging Face path, or None for modules that have none (their calls belong to the enclosing one)."""
    handles = []
    for path, module in root.named_modules():
        name = canonical_name(path)
        if name is None:
            continue
        handles.append(module.register_forward_pre_hook(_pusher(name)))
        handles.append(module.register_forward_hook(_pop, always_call=True))
    return handles


def _pusher(name: str) -> Callable[[nn.Module, Any], None]:
    def push(_module: nn.Module, _args: Any) -> None:
        _modules.append(name)

    return push


def _pop(_module: nn.Module, _args: Any, _output: Any) -> None:
    _modules.pop()
