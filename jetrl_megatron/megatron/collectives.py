"""Collectives whose result does not depend on the backend's order of additions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.fp8 import ordered_add


def share_amax(grid: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Elementwise maximum over the group. MAX does not define NaN, so non-finite travels as Inf, which the quantizer
    turns into a NaN scale as well."""
    grid = torch.where(torch.isfinite(grid), grid, torch.inf)
    dist.all_reduce(grid, op=dist.ReduceOp.MAX, group=group)
    return grid


def gather_list(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's x, in rank order."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def ordered_sum(x: Tensor, group: dist.ProcessGroup, tree: bool) -> Tensor:
    """Sum of fp32 x over the group's ranks, equal on all of them: a binary tree over ranks, or left to right.

    Differentiable: every rank holds the whole sum, so the gradient passes through unchanged.
    """
    y: Tensor = _OrderedSum.apply(x, group, tree)
    return y


class _OrderedSum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup, tree: bool) -> Tensor:
        return ordered_add(gather_list(x, group), tree)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None
