"""A CUDA graph without CUDA: what a forward does to tensors is recorded, then done again to the same memory.

Torch's operators are seen by a dispatch mode, launches of our Triton kernels (in Triton's interpreter) at `Plan.run`.
As in a real capture, host values are frozen, addresses too, results stay where they were in the capture, no Python of
the model runs in a replay, and whatever would make the host wait for the device is refused: values read, shapes that
depend on values, tensors made from host data. On a CPU a copy of a tensor between devices is none, so that alone goes
unseen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from jetrl_megatron.fp8.gpu.launch import Plan

aten = torch.ops.aten
_READS_VALUES = {  # by name: every overload
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",  # of torch.tensor(...): a copy from the host
    "lift_fresh_copy",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}
_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, torch.from_numpy}


class CaptureError(RuntimeError):
    """Something that CUDA refuses while it captures."""


class RecordedGraph:
    """What ran inside `capture()`. inputs: addresses of the storages that were read and not made inside."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._made: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        launch = Plan.run
        graph = self

        def run(plan: Plan[Any]) -> Any:
            tensors = [value for value in plan.arguments.values() if isinstance(value, Tensor)]
            graph._reads(tensors)
            graph._steps.append(lambda: launch(plan))
            with _disable_current_modes():
                return launch(plan)

        with mock.patch.object(Plan, "run", run), _NoHost(), _Recorder(self):
            yield

    def replay(self) -> None:
        with torch.no_grad():
            for step in self._steps:
                step()

    @property
    def inputs(self) -> set[int]:
        return set(self._inputs)

    def __len__(self) -> int:
        return len(self._steps)

    def _reads(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if address and address not in self._made:
                self._inputs[address] = tensor

    def _ran(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._reads(given)
        if func._schema.is_mutable:
            self._steps.append(lambda: func(*args, **kwargs))
            return
        held = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [result for result in results if result.untyped_storage().data_ptr() not in held]
        self._made |= {result.untyped_storage().data_ptr(): result for result in new}
        if not new or func in (aten.empty.memory_format, aten.empty_strided.default):
            return  # a view, or memory without values
        assert len(new) == len(results), func

        def again() -> None:
            made = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for result, value in zip(results, made, strict=True):
                result.copy_(value)

        self._steps.append(again)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        masks = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _READS_VALUES or masks or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            raise CaptureError(f"{func}: the host would wait for the device")
        out = func(*args, **kwargs)
        self._graph._ran(func, args, kwargs, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out


class _NoHost(TorchFunctionMode):
    """What reads a tensor below the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST:
            raise CaptureError(f"{func}: the host would wait for the device")
        return func(*args, **(kwargs or {}))
