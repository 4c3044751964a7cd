"""Backward of packed causal attention in Triton, without a T x T matrix (FlashAttention-2, arXiv 2307.08691).

Scores are computed again, and weights from them and from what the forward kernel kept: P = exp(S - log-sum-exp),
dS = P * (dO V^T - rowsum(dO * O)). Products take bf16 and add in fp32; P and dS are rounded to bf16 before theirs. A
program owns its tile of dQ, or of dK and dV, and adds in ascending order: no atomics, so two runs give the same bits.
Shape letters: T tokens, H heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.attention import TILE_KEYS, TILE_ROWS, States, tile_constants, tiles_of
from jetrl_megatron.fp8.gpu.launch import Plan
from jetrl_megatron.fp8.gpu.rounding import dot, narrow, round_to_bf16, widen


@triton.jit
def attention_dq_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    cu_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    head_dim: tl.tensor,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """dQ of one tile of queries of one sequence, times the PER_GROUP heads that share a key head; and
    delta = rowsum(dO * O) of its rows, for the other kernel."""
    place, group = tiles_ptr + tl.program_id(0) * 3, tl.program_id(1)
    start, first, end = tl.load(cu_ptr + tl.load(place)), tl.load(place + 1), tl.load(place + 2)
    rows, keys, dims = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, DIM)
    query = first + rows // PER_GROUP
    used = (query < end) & (rows < (ROWS // PER_GROUP) * PER_GROUP)
    row = query.to(tl.int64) * (num_groups * PER_GROUP) + group * PER_GROUP + rows % PER_GROUP
    offsets = row[:, None] * head_dim + dims[None, :]
    mask = used[:, None] & (dims < head_dim)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0)
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0)
    log_sum = tl.load(log_sum_ptr + row, mask=used, other=0.0)
    delta = tl.sum(widen(dout) * widen(out), axis=1)
    tl.store(delta_ptr + row, delta, mask=used)
    dq = tl.zeros((ROWS, DIM), tl.float32)
    for position in range(start, tl.minimum(first + ROWS // PER_GROUP, end), KEYS):
        key = position + keys
        kv_offsets = (key.to(tl.int64) * num_groups + group)[:, None] * head_dim + dims[None, :]
        kv_mask = (key < end)[:, None] & (dims < head_dim)[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=kv_mask, other=0.0)
        weight = tl.exp(dot(q, tl.trans(k), INTERPRETED) * scale - log_sum[:, None])
        weight = tl.where(used[:, None] & (key[None, :] <= query[:, None]), weight, 0.0)
        dscore = weight * (dot(dout, tl.trans(v), INTERPRETED) - delta[:, None])
        dq += dot(narrow(round_to_bf16(dscore)), k, INTERPRETED)
    tl.store(dq_ptr + offsets, narrow(round_to_bf16(dq * scale)), mask=mask)


@triton.jit
def attention_dkv_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    head_dim: tl.tensor,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """dK and dV of one tile of keys of one sequence and one key head, from all queries that see it: those of its own
    positions first, each with its PER_GROUP heads."""
    place, group = tiles_ptr + tl.program_id(0) * 3, tl.program_id(1)
    first, end = tl.load(place + 1), tl.load(place + 2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    key = first + tl.arange(0, KEYS)
    kv_offsets = (key.to(tl.int64) * num_groups + group)[:, None] * head_dim + dims[None, :]
    kv_mask = (key < end)[:, None] & (dims < head_dim)[None, :]
    k = tl.load(k_ptr + kv_offsets, mask=kv_mask, other=0.0)
    v = tl.load(v_ptr + kv_offsets, mask=kv_mask, other=0.0)
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    for position in range(first, end, ROWS // PER_GROUP):
        query = position + rows // PER_GROUP
        used = (query < end) & (rows < (ROWS // PER_GROUP) * PER_GROUP)
        row = query.to(tl.int64) * (num_groups * PER_GROUP) + group * PER_GROUP + rows % PER_GROUP
        offsets = row[:, None] * head_dim + dims[None, :]
        mask = used[:, None] & (dims < head_dim)[None, :]
        q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
        dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0)
        log_sum = tl.load(log_sum_ptr + row, mask=used, other=0.0)
        delta = tl.load(delta_ptr + row, mask=used, other=0.0)
        weight = tl.exp(dot(k, tl.trans(q), INTERPRETED) * scale - log_sum[None, :])
        weight = tl.where(used[None, :] & (key[:, None] <= query[None, :]), weight, 0.0)
        dv += dot(narrow(round_to_bf16(weight)), dout, INTERPRETED)
        dscore = weight * (dot(v, tl.trans(dout), INTERPRETED) - delta[None, :])
        dk += dot(narrow(round_to_bf16(dscore)), q, INTERPRETED)
    tl.store(dk_ptr + kv_offsets, narrow(round_to_bf16(dk * scale)), mask=kv_mask)
    tl.store(dv_ptr + kv_offsets, narrow(round_to_bf16(dv)), mask=kv_mask)


def plan_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, states: States, cu: Sequence[int], scale: float
) -> tuple[Plan[Tensor], Plan[tuple[Tensor, Tensor]]]:
    """The launches of `packed_attention_backward`, in order: dQ, then dK and dV. Tokens of no sequence get zeros."""
    constants = tile_constants(q, k, v)
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    shared: dict[str, Any] = {
        "q_ptr": q.contiguous(),
        "k_ptr": k.contiguous(),
        "v_ptr": v.contiguous(),
        "dout_ptr": dout.contiguous(),
        "log_sum_ptr": states.tops + states.totals.log(),
        "delta_ptr": torch.empty_like(states.tops),
        "scale": scale,
        "num_groups": k.shape[1],
        "head_dim": q.shape[2],
    }
    tiles = tiles_of(cu, TILE_ROWS // constants["PER_GROUP"]).to(q.device)
    offsets = torch.tensor(cu, dtype=torch.int32).to(q.device)
    arguments = {**shared, "out_ptr": states.out, "dq_ptr": dq, "cu_ptr": offsets, "tiles_ptr": tiles}
    first = Plan(attention_dq_kernel, (len(tiles), k.shape[1]), arguments, constants, dq, num_stages=2)
    tiles = tiles_of(cu, TILE_KEYS).to(q.device)
    arguments = {**shared, "dk_ptr": dk, "dv_ptr": dv, "tiles_ptr": tiles}
    second = Plan(attention_dkv_kernel, (len(tiles), k.shape[1]), arguments, constants, (dk, dv), num_stages=2)
    return first, second


def packed_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, states: States, cu: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of packed attention: dout and q [T, H, D], k and v [T, G, D] bf16, states: of the forward kernel, cu:
    offsets of the sequences -> dq, dk, dv in bf16."""
    first, second = plan_backward(dout, q, k, v, states, cu, scale)
    return first.run(), *second.run()
