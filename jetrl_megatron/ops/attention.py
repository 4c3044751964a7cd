"""Causal attention: one kernel for packed training sequences, chunked prefill and paged decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
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
    return _forward(q, k, v, list(cu_seqlens), scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, cu: list[int], scale: float) -> Tensor:
    lengths = [end - start for start, end in pairwise(cu)]
    starts = torch.tensor(cu[:-1], dtype=torch.int32, device=q.device)
    keys = torch.arange(max(lengths), dtype=torch.int32, device=q.device)
    table, rows = (starts[:, None] + keys).clamp_max(q.shape[0] - 1), torch.arange(len(lengths), device=q.device)
    kv_len = torch.zeros(q.shape[0], dtype=torch.int64)
    kv_len[: cu[-1]] = torch.cat([torch.arange(1, n + 1) for n in lengths])
    o: Tensor = kernels().attention(q, k, v, table, rows, cu, kv_len.to(q.device), scale)
    return o


@differentiated
class _PackedAttention(torch.autograd.Function):
    """Exact forward; backward is that of torch's fp32 scaled_dot_product_attention on padded groups of sequences."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: list[int], scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        note("saved", "q, k, v", (q, k, v))
        ctx.cu, ctx.scale = cu, scale
        return _forward(q, k, v, cu, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        for index, valid in _padded_groups(ctx.cu, q.device):
            q_BHSD, k_BGSD, v_BGSD = (t[index].float().transpose(1, 2).requires_grad_() for t in (q, k, v))
            with torch.enable_grad():
                o = F.scaled_dot_product_attention(
                    q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=ctx.scale, enable_gqa=True
                )
            do = (grads[0][index].float() * valid[..., None, None]).transpose(1, 2)
            for total, part in zip((dq, dk, dv), torch.autograd.grad(o, (q_BHSD, k_BGSD, v_BGSD), do), strict=True):
                total[index[valid]] = part.transpose(1, 2)[valid].to(total.dtype)
        return dq, dk, dv, None, None


def _padded_groups(cu: list[int], device: torch.device, max_tokens: int = 8192) -> list[tuple[Tensor, Tensor]]:
    """Sequences of similar length as index [b, s] into the packed tokens and a validity mask [b, s]."""
    spans = sorted(pairwise(cu), key=lambda span: span[1] - span[0])
    spans = [span for span in spans if span[1] > span[0]]
    groups: list[list[tuple[int, int]]] = []
    current: list[tuple[int, int]] = []
    for span in spans:
        length = span[1] - span[0]
        if current and (len(current) + 1) * length > max_tokens:
            groups.append(current)
            current = []
        current.append(span)
    groups.append(current)
    result = []
    for group in groups:
        longest = group[-1][1] - group[-1][0]
        offsets = torch.arange(longest)
        starts = torch.tensor([a for a, _ in group])[:, None]
        ends = torch.tensor([b for _, b in group])[:, None]
        index = starts + offsets
        result.append((torch.minimum(index, ends - 1).to(device), (index < ends).to(device)))
    return result
