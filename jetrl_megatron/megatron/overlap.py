"""Tensor-parallel communication of a column-parallel linear's input beside its GEMMs.

As Megatron-Core's own linears do (`LinearWithGradAccumulationAndAsyncCommunication`): under sequence parallelism a rank
keeps its part of the rows and gathers the others again in backward, beside DGrad; the sum of dX over ranks runs beside
WGrad. The collectives of gradients and their operands are those of Megatron's mappings, so the bits are theirs; what is
gathered is not computed with. On GPUs CUDA_DEVICE_MAX_CONNECTIONS=1 lets the collectives start first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ColumnParallelInput:
    """See `fp8.linear.SharedInput`. splits_rows: sequence parallelism, in the order of the group's ranks."""

    group: dist.ProcessGroup
    splits_rows: bool

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        return self._gather(parts) if self.splits_rows else lambda: list(parts)

    def _gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        whole, works = [], []
        for part in parts:
            out = torch.empty(part.shape[0] * self.group.size(), *part.shape[1:], dtype=part.dtype, device=part.device)
            works.append(
                dist.all_gather_into_tensor(_bytes(out), _bytes(part.contiguous()), group=self.group, async_op=True)
            )
            whole.append(out)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            return whole

        return wait

    def add_up(self, dx: Tensor) -> Callable[[], Tensor]:
        dx = dx.contiguous()
        if self.splits_rows:
            out = dx.new_empty(dx.shape[0] // self.group.size(), *dx.shape[1:])
            work = dist.reduce_scatter_tensor(out, dx, group=self.group, async_op=True)
        else:
            out, work = dx, dist.all_reduce(dx, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return out

        return wait


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: not every backend of torch.distributed moves it."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
