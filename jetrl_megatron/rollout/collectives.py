"""Collectives over the ranks of one engine whose result does not depend on the backend's order of additions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.fp8 import ordered_add


def tp_group() -> dist.ProcessGroup:
    """All ranks of this engine."""
    from sglang.srt.distributed import get_tp_group

    group: dist.ProcessGroup = get_tp_group().device_group
    return group


def sum_on_rank_0(x: Tensor, tree: bool) -> Tensor:
    """The ordered sum on rank 0 and zeros elsewhere: SGLang's own bf16 all-reduce at the layer boundary then only adds
    zeros."""
    group = tp_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    if dist.get_rank(group):
        return torch.zeros_like(x)
    return ordered_add(parts, tree)


def maximum(x: Tensor) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=tp_group())
    return x


def exact_sum(x: Tensor) -> Tensor:
    """Sum of fp64 partial sums that cannot round."""
    dist.all_reduce(x, group=tp_group())
    return x
