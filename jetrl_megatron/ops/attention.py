"""Causal attention: one kernel for packed training sequences, chunked prefill and paged decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8.recorder import differentiated, note
from jetrl_megatron.ops.kernels import kernels
from jetrl_megatron.ops.recorder import operator


@operator("attention", k_pool="k", v_pool="v")
def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
) -> Tensor:
    """Rollout side; shapes as in `reference.attention`. The Triton set reads nothing on the host in decode
    (cu_queries None)."""
    o: Tensor = kernels().attention(q, k_pool, v_pool, table, rows, cu_queries, kv_len, scale)
    return o


@operator("attention")
def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float) -> Tensor:
    """Training side: q [T, H, D], k and v [T, G, D] of packed sequences with offsets cu_seqlens. Tokens after the last
    offset are padding: they get zeros and no gradient."""
    if torch.is_grad_enabled() and q.requires_grad:
        o: Tensor = _PackedAttention.apply(q, k, v, list(cu_seqlens), scale)
        return o
    o = kernels().attention(q, k, v, *packed_pool(q, list(cu_seqlens)), scale)
    return o


def packed_pool(q: Tensor, cu: list[int]) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Packed sequences as (table, rows, cu_queries, kv_len) of a pool that is the packed keys themselves."""
    lengths = [end - start for start, end in pairwise(cu)]
    starts = torch.tensor(cu[:-1], dtype=torch.int32, device=q.device)
    keys = torch.arange(max(lengths), dtype=torch.int32, device=q.device)
    table, rows = (starts[:, None] + keys).clamp_max(q.shape[0] - 1), torch.arange(len(lengths), device=q.device)
    kv_len = torch.zeros(q.shape[0], dtype=torch.int64)
    kv_len[: cu[-1]] = torch.cat([torch.arange(1, n + 1) for n in lengths])
    return table, rows, cu, kv_len.to(q.device)


@differentiated
class _PackedAttention(torch.autograd.Function):
    """Forward and backward of the kernel set."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: list[int], scale: float) -> Tensor:
        o: Tensor
        o, saved = kernels().attention_forward(q, k, v, *packed_pool(q, cu), scale)
        ctx.save_for_backward(q, k, v, *saved)
        note("saved", "q, k, v", (q, k, v))
        note("saved", "softmax", saved)
        ctx.cu, ctx.scale = cu, scale
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        return *kernels().attention_backward(grads[0], q, k, v, saved, ctx.cu, ctx.scale), None, None
