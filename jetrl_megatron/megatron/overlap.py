"""Tensor-parallel communication of a column-parallel linear's input gradient while its WGrad is computed.

As Megatron-Core's own linears do (`LinearWithGradAccumulationAndAsyncCommunication`): the linear says when dX is there,
and the sum over ranks runs beside WGrad. The collective and its operand are those of Megatron's mappings, so the bits
are theirs. On GPUs CUDA_DEVICE_MAX_CONNECTIONS=1 lets the collective start first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


class ColumnParallelInput:
    """One call's input. group: tensor-parallel; sequence_parallel: ranks hold parts of the first dim of x, else x."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        self._group, self._sequence_parallel = group, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """x [S, ..., K] of this rank -> what the linear contracts, gathered along the first dim where it is split."""
        y: Tensor = _Enter.apply(x, self)
        return y

    def gathered(self, x: Tensor) -> Tensor:
        """`enter` without its gradient."""
        return gather_from_sequence_parallel_region(x, group=self._group) if self._sequence_parallel else x.view_as(x)

    def start(self, dx: Tensor) -> None:
        """Start the sum over ranks of dX [T, K], each rank's own term of it. dX must not be written afterwards."""
        if self._sequence_parallel:
            self._sum = dx.new_empty(dx.shape[0] // self._group.size(), *dx.shape[1:])
            self._work = dist.reduce_scatter_tensor(self._sum, dx.contiguous(), group=self._group, async_op=True)
        else:
            self._sum = dx.contiguous()
            self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def finish(self) -> Tensor:
        """The sum, or this rank's rows of it."""
        self._work.wait()
        return self._sum


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: ColumnParallelInput) -> Tensor:
        ctx.region, ctx.shape = region, x.shape
        return region.gathered(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, None]:
        """The gradient that comes is dX before the sum; `start` has it."""
        return ctx.region.finish().view(ctx.shape), None
