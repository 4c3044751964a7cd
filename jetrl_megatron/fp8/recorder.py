"""The precision-flow recorder: what ran in which module, with what precision on its edges (docs/precision_flow.md).

An operator opens a node; everything below it notes edges on the open node. The autograd functions are marked
`@differentiated`: their backward becomes a node of its own at the module of its forward. Recording is off unless
`record()` is active; a note then costs one `if`. One thread per process runs operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import Fp8Tensor

Role = Literal["input", "internal", "output", "saved"]
Phase = Literal["forward", "recompute", "backward"]
C = TypeVar("C", bound=type[torch.autograd.Function])

_ACTIVATION = {"block": "1x128", "channel": "row", "tensor": "tensor"}
_WEIGHT = {"block": "128x128", "channel": "row", "tensor": "tensor"}


@dataclass(frozen=True)
class Edge:
    """Precision of one tensor at a node.

    tensor: its name in the operator. role: enters, leaves, exists only inside (what a GEMM really multiplies), or is
    saved for backward. granularity: elements per scale (`1x128`, `128x128`, `row`, `tensor`); scale_format: `fp32` or
    `pow2`; quantizer: who made the FP8 bytes. The last three are None for what is not FP8.
    """

    tensor: str
    role: Role
    dtype: str
    granularity: str | None = None
    scale_format: str | None = None
    quantizer: str | None = None

    @property
    def precision(self) -> tuple[str | None, ...]:
        """What must agree between training and rollout."""
        return (self.dtype, self.granularity, self.scale_format, self.quantizer)


@dataclass(frozen=True)
class Node:
    """One executed operator. module: canonical (Hugging Face) module path, '' outside any attached module. kernels: the
    kernel set behind it, or the FP8 backend. edges: in order of appearance, each once."""

    operator: str
    module: str
    phase: Phase
    kernels: str
    edges: tuple[Edge, ...]

    def edges_of(self, *roles: Role) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.role in roles)


class Recording(list[Node]):
    """Nodes in the order in which they ended."""


@dataclass
class _Open:
    """A node that is still running."""

    operator: str
    module: str
    phase: Phase
    kernels: str
    edges: dict[Edge, None] = field(default_factory=dict)

    def names(self, role: Role) -> list[str]:
        return [edge.tensor for edge in self.edges if edge.role == role]


_recordings: list[Recording] = []
_open: list[_Open] = []
modules: list[str] = []  # canonical paths of the modules whose forward is running


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record every operator of this process inside the block."""
    recording = Recording()
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings[:] = [other for other in _recordings if other is not recording]


def recording() -> bool:
    return bool(_recordings)


def num_recorded() -> int:
    """Nodes of the innermost recording so far."""
    return len(_recordings[-1]) if _recordings else 0


@contextlib.contextmanager
def node(operator: str, kernels: str) -> Iterator[None]:
    """Open a node of the running module: forward, or recompute where activations are recomputed during backward."""
    phase: Phase = "forward" if torch._C._current_graph_task_id() == -1 else "recompute"
    with _opened(_Open(operator, modules[-1] if modules else "", phase, kernels)):
        yield


@contextlib.contextmanager
def _opened(call: _Open) -> Iterator[None]:
    _open.append(call)
    try:
        yield
    finally:
        _open.pop()
    for active in _recordings:
        active.append(Node(call.operator, call.module, call.phase, call.kernels, tuple(call.edges)))


def note(role: Role, tensor: str, value: Any) -> None:
    """Add an edge to the open node. value: a floating-point tensor, Fp8Tensor, Fp8Weight, or a sequence of them, or the
    dtype of a tensor that a fused kernel never writes; anything else has no precision and is ignored."""
    if not _open or not _recordings:
        return
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor) and item.is_floating_point():
            _open[-1].edges[Edge(tensor, role, _name(item.dtype))] = None
        elif isinstance(item, torch.dtype):
            _open[-1].edges[Edge(tensor, role, _name(item))] = None
        elif isinstance(item, Fp8Tensor):
            _open[-1].edges[_quantized(tensor, role, item, _ACTIVATION)] = None
        elif hasattr(item, "quantized"):  # fp8.linear.Fp8Weight
            _open[-1].edges[_quantized(tensor, role, item.quantized, _WEIGHT)] = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _quantized(tensor: str, role: Role, value: Fp8Tensor, granularities: dict[str, str]) -> Edge:
    fmt = value.format
    return Edge(
        tensor, role, _name(value.data.dtype), granularities[fmt.granularity], fmt.scale_format, value.quantizer
    )


def differentiated(function: C) -> C:
    """Class decorator of an autograd function inside an operator: its backward is recorded as a node.

    The forward's floating-point tensor arguments must be the operator's inputs, in order: gradient names follow."""
    forward, backward = function.forward, function.backward

    def recorded_forward(ctx: Any, *args: Any) -> Any:
        ctx.recorded = _open[-1] if _open and _recordings else None
        if ctx.recorded is not None:
            ctx.tensor_args = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
        return forward(ctx, *args)

    def recorded_backward(ctx: Any, *grads: Any) -> Any:
        of: _Open | None = ctx.recorded
        if of is None or not _recordings:
            return backward(ctx, *grads)
        call = _Open(of.operator, of.module, "backward", of.kernels)
        with _opened(call):
            note("input", "dy", grads)
            results = backward(ctx, *grads)
            for name, i in zip(of.names("input"), ctx.tensor_args, strict=False):
                if f"d{name}" not in call.names("output"):
                    note("output", f"d{name}", results[i])
        return results

    function.forward = staticmethod(recorded_forward)  # type: ignore[method-assign]
    function.backward = staticmethod(recorded_backward)  # type: ignore[method-assign]
    return function
