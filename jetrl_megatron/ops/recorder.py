"""Who is recorded: public functions of `ops` by `@operator(name)`, modules by `attach(root, canonical_name)`.

The recorder itself is `fp8/recorder.py`, below the linears that note their FP8 edges on it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from jetrl_megatron.fp8.backends import active_name
from jetrl_megatron.fp8.recorder import Edge, Node, Recording, modules, node, note, num_recorded, record, recording
from jetrl_megatron.ops.kernels import kernels_name
from jetrl_megatron.ops.timing import timed

__all__ = ["Edge", "Node", "Recording", "attach", "operator", "record", "recording"]

F = TypeVar("F", bound=Callable[..., Any])

_MASTERS = ("master", "masters")
EMBEDDING = "embedding"


def operator(name: str, **names: str) -> Callable[[F], F]:
    """Mark a public function of `ops` as an operator: its tensor arguments and results become edges, its time is kept
    by `timing`. names: edge name of a parameter, where the two callers call it differently.

    `master`, the parameter that a quantized weight was made from, is an edge (named weight) only where no FP8 weight
    stands for it."""

    def decorate(function: F) -> F:
        function = timed(name)(function)
        parameters = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not recording():
                return function(*args, **kwargs)
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            quantized = any(_is_fp8_weight(value) for value in given.values())
            with node(name, _kernels_behind(quantized)):
                for parameter, value in given.items():
                    if parameter not in _MASTERS:
                        note("input", names.get(parameter, parameter), value)
                    elif not quantized:
                        note("input", "weight", value)
                result = function(*args, **kwargs)
                note("output", "y", result)
            return result

        return call  # type: ignore[return-value]

    return decorate


def _kernels_behind(quantized: bool) -> str:
    """What a node's `kernels` says: the kernel set; at an FP8 weight the FP8 backend, unless that is the emulated one,
    which uses the kernel set itself."""
    return active_name() if quantized and active_name() != "emulated" else kernels_name()


def _is_fp8_weight(value: Any) -> bool:
    return any(hasattr(item, "quantized") for item in (value if isinstance(value, list | tuple) else (value,)))


@contextlib.contextmanager
def attach(root: nn.Module, canonical_name: Callable[[str], str | None]) -> Iterator[None]:
    """Inside the block the canonical path of every submodule is known while its forward runs. canonical_name: our
    module path -> Hugging Face path, or None for modules that have none (their operators belong to the enclosing one).

    Modules without any parameters (activation, rope, attention kernel) have no name either. A module with parameters of
    its own that ran without any of our operators is recorded as `stock CLASS` (an embedding
    as `embedding`: a lookup computes nothing), under its own path where it has no canonical one."""
    handles = []
    for path, module in root.named_modules():
        if next(module.parameters(), None) is None:
            continue
        holds_parameters = next(module.parameters(recurse=False), None) is not None
        name = canonical_name(path) or (path if holds_parameters else None)
        if name is None:
            continue
        watch = _Watch(name, holds_parameters)
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(watch.leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The forward hooks of one module."""

    def __init__(self, name: str, holds_parameters: bool) -> None:
        self._name, self._holds_parameters = name, holds_parameters
        self._before: list[int] = []

    def enter(self, _module: nn.Module, _args: Any) -> None:
        modules.append(self._name)
        self._before.append(num_recorded())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._before.pop() == num_recorded() and self._holds_parameters and output is not None:
            stock = type(module).__name__
            with node(EMBEDDING if stock.endswith("Embedding") else f"stock {stock}", "stock"):
                note("input", "x", args)
                for name, parameter in module.named_parameters(recurse=False):
                    note("input", name, parameter)
                note("output", "y", _tensors(output))
        modules.pop()


def _tensors(output: Any) -> tuple[Tensor, ...]:
    values = output if isinstance(output, list | tuple) else (output,)
    return tuple(value for value in values if isinstance(value, Tensor))
