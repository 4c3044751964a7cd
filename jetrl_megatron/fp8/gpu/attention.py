"""Causal attention in Triton over a paged pool, with a reduction order that belongs to the keys' absolute positions.

Keys are taken in blocks of 64 that start at positions 0, 64, ... of the sequence, whatever the chunk, the batch or
the page; a block that a query may not see changes nothing (its weights are exact zeros, the running maximum stays).
The tile shape never changes. So prefill, chunked prefill and decode give a query the same bits. They are not the bits
of `ops.reference.attention`, whose sums are exact: tensor cores and exp2 round, so that needs a tolerance.
Shape letters: T queries, H heads, G key/value heads, D head dim, P slots, B sequences, R requests, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.launch import Plan, interpreting
from jetrl_megatron.fp8.gpu.rounding import interpreted_dot, narrow, round_to_bf16

TILE_ROWS, TILE_KEYS = 64, 64
MAX_HEAD_DIM = 128


@triton.jit
def attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    num_groups: tl.tensor,
    head_dim: tl.tensor,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DECODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of queries of one sequence, times the PER_GROUP heads that share a key head. DECODE: tile i is query i,
    the one of sequence i; else tiles hold (sequence, first query, end of the sequence's queries)."""
    tile, group = tl.program_id(0), tl.program_id(1)
    rows, keys, dims = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, DIM)
    if DECODE:
        sequence, first, end = tile, tile, tile + 1
    else:
        place = tiles_ptr + tile * 3
        sequence, first, end = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    query = first + rows // PER_GROUP
    used = (query < end) & (rows < (ROWS // PER_GROUP) * PER_GROUP)
    lengths = tl.load(kv_len_ptr + query, mask=used, other=0)
    row = query.to(tl.int64) * (num_groups * PER_GROUP) + group * PER_GROUP + rows % PER_GROUP
    q_offsets = row[:, None] * head_dim + dims[None, :]
    q_mask = used[:, None] & (dims < head_dim)[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    slots_ptr = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    longest = tl.max(lengths, axis=0)
    for start in range(0, longest, KEYS):
        position = start + keys
        slot = tl.load(slots_ptr + position, mask=position < longest, other=0).to(tl.int64)
        offsets = (slot * num_groups + group)[:, None] * head_dim + dims[None, :]
        kv_mask = (position < longest)[:, None] & (dims < head_dim)[None, :]
        k = tl.load(k_ptr + offsets, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=kv_mask, other=0.0)
        scores = (interpreted_dot(q, tl.trans(k)) if INTERPRETED else tl.dot(q, tl.trans(k))) * scale
        scores = tl.where(position[None, :] < lengths[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without keys: exp(-inf), not exp(NaN)
        weight = tl.exp(scores - base[:, None])
        keep = tl.exp(top - base)
        total = total * keep + tl.sum(weight, axis=1)
        rounded = narrow(round_to_bf16(weight))
        acc = acc * keep[:, None] + (interpreted_dot(rounded, v) if INTERPRETED else tl.dot(rounded, v))
        top = new_top
    out = tl.div_rn(acc, tl.where(total == 0.0, 1.0, total)[:, None])
    tl.store(out_ptr + q_offsets, narrow(round_to_bf16(out)), mask=q_mask)


def plan_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
) -> Plan[Tensor]:
    """The launch of `attention`."""
    _, heads, head_dim = q.shape
    groups = k_pool.shape[1]
    if q.dtype != torch.bfloat16 or k_pool.dtype != torch.bfloat16 or v_pool.dtype != torch.bfloat16:
        raise ValueError(f"q, k, v: {q.dtype}, {k_pool.dtype}, {v_pool.dtype}; rule: bf16; fix: .bfloat16()")
    if heads % groups or heads // groups > TILE_ROWS or head_dim > MAX_HEAD_DIM or v_pool.shape != k_pool.shape:
        raise ValueError(
            f"heads: {heads} over {groups}, head_dim {head_dim}; rule: key heads divide the heads, at most {TILE_ROWS} "
            f"heads share one, head_dim at most {MAX_HEAD_DIM}; fix: precision.backend: emulated"
        )
    tiles = None if cu_queries is None else _tiles(cu_queries, TILE_ROWS // (heads // groups)).to(q.device)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)  # queries of no sequence stay zero
    arguments: dict[str, Any] = {
        "q_ptr": q.contiguous(),
        "k_ptr": k_pool.contiguous(),
        "v_ptr": v_pool.contiguous(),
        "out_ptr": out,
        "table_ptr": table.contiguous(),
        "rows_ptr": rows.contiguous(),
        "tiles_ptr": tiles,
        "kv_len_ptr": kv_len.contiguous(),
        "scale": scale,
        "table_stride": table.shape[1],
        "num_groups": groups,
        "head_dim": head_dim,
    }
    constants = {
        "PER_GROUP": heads // groups,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": TILE_ROWS,
        "KEYS": TILE_KEYS,
        "DECODE": tiles is None,
        "INTERPRETED": interpreting(),
    }
    return Plan(attention_kernel, (len(q) if tiles is None else len(tiles), groups), arguments, constants, out)


def _tiles(cu_queries: Sequence[int], per_tile: int) -> Tensor:
    """int32 [tiles, 3]: sequence, first query, end of the sequence's queries."""
    tiles = [
        (sequence, first, end)
        for sequence, (start, end) in enumerate(pairwise(cu_queries))
        for first in range(start, end, per_tile)
    ]
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 3)


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
) -> Tensor:
    """As `ops.reference.attention`, of bf16 tensors on a GPU. In decode (cu_queries None) the host reads no tensor, and
    the grid depends on shapes alone."""
    return plan_attention(q, k_pool, v_pool, table, rows, cu_queries, kv_len, scale).run()
