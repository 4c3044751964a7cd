"""Collectives over the ranks of one engine whose result does not depend on the backend's order of additions.

All are SGLang's own all-gather, which CUDA graphs can capture, and arithmetic on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from jetrl_megatron.fp8 import BLOCK, num_segments_for, ordered_add


def is_rank_0() -> bool:
    """Of this engine."""
    from sglang.srt.distributed import get_tp_group

    return bool(get_tp_group().rank_in_group == 0)


def _of_all_ranks(x: Tensor) -> Tensor:
    """Every rank's x [...], in rank order: [ranks, ...]."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    parts: Tensor = group.all_gather(x.contiguous(), dim=0)
    return parts.view(group.world_size, *x.shape)


def sum_on_rank_0(x: Tensor, tree: bool) -> Tensor:
    """The ordered sum on rank 0 and zeros elsewhere: SGLang's own bf16 all-reduce at the layer boundary then only adds
    zeros."""
    parts = _of_all_ranks(x)
    return ordered_add(list(parts), tree) if is_rank_0() else torch.zeros_like(x)


def row_parallel(num_columns: int, num_ranks: int, tree: bool) -> tuple[int, Callable[[Tensor], Tensor] | None]:
    """How a product that contracts num_columns, shared out over num_ranks, is added up: in how many segments on a rank,
    and then over the ranks (None: there is one). tree: the fixed segments and tree of any number of ranks."""
    segments = num_segments_for(-(-num_columns // BLOCK)) if tree else 1
    if tree and segments % num_ranks:
        raise ValueError(
            f"rollout.tensor_parallel: {num_ranks}; rule: divides {segments} segments; fix: a smaller size"
        )
    return max(segments // num_ranks, 1), partial(sum_on_rank_0, tree=tree) if num_ranks > 1 else None


def maximum(x: Tensor) -> Tensor:
    """Elementwise, over the ranks."""
    return _of_all_ranks(x).amax(dim=0)


def exact_sum(x: Tensor) -> Tensor:
    """Sum of fp64 partial sums that cannot round."""
    return _of_all_ranks(x).sum(dim=0)
