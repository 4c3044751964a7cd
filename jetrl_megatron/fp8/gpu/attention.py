"""Causal attention in Triton over a paged pool, with a reduction order that belongs to the keys' absolute positions.

Keys are cut into segments of 512 at positions 0, 512, ... of the sequence, a segment into blocks of 64. Inside a
segment an online softmax takes its blocks in ascending order, from a fresh state; the segments' states are merged in
ascending order. One program does all of that (training, prefill), or programs share out the segments and a second
kernel merges them (decode of few sequences): the same operations, whatever the chunk, the batch, the page or the number
of programs; a block that a query may not see changes nothing (its weights are exact zeros, the running maximum stays).
The tile shape never changes. So prefill, chunked prefill and decode give a query the same bits. They are not the bits
of `ops.reference.attention`, whose sums are exact: tensor cores and exp2 round, so that needs a tolerance.
Shape letters: T queries, H heads, G key/value heads, D head dim, P slots, B sequences, R requests, L keys, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.launch import Plan, interpreting
from jetrl_megatron.fp8.gpu.rounding import dot, narrow, round_to_bf16

TILE_ROWS, TILE_KEYS, SEGMENT = 64, 64, 512
MAX_HEAD_DIM = 128
# Two waves on a large GPU. Only up to half as many (query, key head) pairs are split over keys: the states of segments
# take at most 256 x (heads per key head) x S x (D + 2) floats, 140 MB at 131072 keys and 4 heads.
_PROGRAMS = 512
_MERGED_ROWS = 4


@triton.jit
def _segment(
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths: tl.tensor,
    longest: tl.tensor,
    segment: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    head_dim: tl.tensor,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax's state over one segment: largest score, sum of weights, weighted sum of values of each row."""
    keys, dims = tl.arange(0, KEYS), tl.arange(0, DIM)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, longest), KEYS):
        position = start + keys
        slot = tl.load(slots_ptr + position, mask=position < longest, other=0).to(tl.int64)
        offsets = (slot * num_groups + group)[:, None] * head_dim + dims[None, :]
        kv_mask = (position < longest)[:, None] & (dims < head_dim)[None, :]
        k = tl.load(k_ptr + offsets, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=kv_mask, other=0.0)
        scores = dot(q, tl.trans(k), INTERPRETED) * scale
        scores = tl.where(position[None, :] < lengths[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without keys: exp(-inf), not exp(NaN)
        weight = tl.exp(scores - base[:, None])
        keep = tl.exp(top - base)
        total = total * keep + tl.sum(weight, axis=1)
        acc = acc * keep[:, None] + dot(narrow(round_to_bf16(weight)), v, INTERPRETED)
        top = new_top
    return top, total, acc


@triton.jit
def _merge(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, next_top: tl.tensor, next_total: tl.tensor, next_acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state over two ranges of keys from theirs; a range without keys (-inf, 0, 0) changes nothing."""
    new_top = tl.maximum(top, next_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, gain = tl.exp(top - base), tl.exp(next_top - base)
    total = total * keep + next_total * gain
    return new_top, total, acc * keep[:, None] + next_acc * gain[:, None]


@triton.jit
def _result(total: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """bf16 output of a final state. A sum of -0 becomes +0, as it does by adding a block or segment without keys."""
    out = tl.div_rn(acc, tl.where(total == 0.0, 1.0, total)[:, None]) + 0.0
    return narrow(round_to_bf16(out))


@triton.jit
def attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    num_states: tl.tensor,
    num_groups: tl.tensor,
    head_dim: tl.tensor,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of queries of one sequence, times the PER_GROUP heads that share a key head. DECODE: tile i is query i,
    the one of sequence i; else tiles hold (sequence, first query, end of the sequence's queries). SPLIT: the states of
    every num_programs(2)-th segment into out, tops and totals [S, T * H, ...]; else the result of all segments."""
    tile, group = tl.program_id(0), tl.program_id(1)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    if DECODE:
        sequence, first, end = tile, tile, tile + 1
    else:
        place = tiles_ptr + tile * 3
        sequence, first, end = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    query = first + rows // PER_GROUP
    used = (query < end) & (rows < (ROWS // PER_GROUP) * PER_GROUP)
    lengths = tl.load(kv_len_ptr + query, mask=used, other=0).to(tl.int32)
    longest = tl.max(lengths, axis=0)
    row = query.to(tl.int64) * (num_groups * PER_GROUP) + group * PER_GROUP + rows % PER_GROUP
    q_mask = used[:, None] & (dims < head_dim)[None, :]
    q = tl.load(q_ptr + row[:, None] * head_dim + dims[None, :], mask=q_mask, other=0.0)
    slots_ptr = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
    if SPLIT:
        for segment in range(tl.program_id(2), tl.cdiv(longest, SEGMENT), tl.num_programs(2)):
            top, total, acc = _segment(
                q, k_ptr, v_ptr, slots_ptr, lengths, longest, segment, group, scale, num_groups, head_dim,
                DIM, ROWS, KEYS, SEGMENT, INTERPRETED,
            )  # fmt: skip
            state = row + segment * num_states
            tl.store(tops_ptr + state, top, mask=used)
            tl.store(totals_ptr + state, total, mask=used)
            tl.store(out_ptr + state[:, None] * head_dim + dims[None, :], acc, mask=q_mask)
    else:
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM), tl.float32)
        for segment in range(0, tl.cdiv(longest, SEGMENT)):
            next_top, next_total, next_acc = _segment(
                q, k_ptr, v_ptr, slots_ptr, lengths, longest, segment, group, scale, num_groups, head_dim,
                DIM, ROWS, KEYS, SEGMENT, INTERPRETED,
            )  # fmt: skip
            top, total, acc = _merge(top, total, acc, next_top, next_total, next_acc)
        tl.store(tops_ptr + row, top, mask=used)
        tl.store(totals_ptr + row, total, mask=used)
        tl.store(out_ptr + row[:, None] * head_dim + dims[None, :], _result(total, acc), mask=q_mask)


@triton.jit
def merge_segments_kernel(
    sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_states: tl.tensor,
    num_heads: tl.tensor,
    head_dim: tl.tensor,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """The result of ROWS (query, head) rows from the states [S, T * H, ...] of their segments."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    lengths = tl.load(kv_len_ptr + row // num_heads, mask=row < num_states, other=0).to(tl.int32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for segment in range(0, tl.cdiv(tl.max(lengths, axis=0), SEGMENT)):
        has = segment * SEGMENT < lengths
        state = row.to(tl.int64) + segment * num_states
        next_top = tl.load(tops_ptr + state, mask=has, other=float("-inf"))
        next_total = tl.load(totals_ptr + state, mask=has, other=0.0)
        mask = has[:, None] & (dims < head_dim)[None, :]
        next_acc = tl.load(sums_ptr + state[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        top, total, acc = _merge(top, total, acc, next_top, next_total, next_acc)
    mask = (row < num_states)[:, None] & (dims < head_dim)[None, :]
    out = out_ptr + row.to(tl.int64)[:, None] * head_dim + dims[None, :]
    tl.store(out, _result(total, acc), mask=mask)


@dataclass(frozen=True)
class States:
    """Softmax of every (query, head): largest score and sum of weights, fp32 [T, H], and the result, bf16 [T, H, D].
    Of every segment: all with S in front, and out is the weighted sum of values in fp32."""

    out: Tensor
    tops: Tensor
    totals: Tensor


def num_splits(num_queries: int, groups: int, width: int) -> int:
    """Programs that share out the keys of a query (of a key head) in decode, from shapes alone; it never changes bits.
    width: of the table, at least the keys of any sequence."""
    return max(1, min(_PROGRAMS // max(1, num_queries * groups), triton.cdiv(width, SEGMENT)))


def plan_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
    splits: int = 1,
) -> Plan[States]:
    """The launch of `attention`, or, with more than one split (decode only), of its first kernel."""
    constants = tile_constants(q, k_pool, v_pool)
    tiles = None if cu_queries is None else tiles_of(cu_queries, TILE_ROWS // constants["PER_GROUP"]).to(q.device)
    assert splits == 1 or tiles is None
    num_tiles = len(q) if tiles is None else len(tiles)
    states = _states(q, (triton.cdiv(table.shape[1], SEGMENT),) if splits > 1 else ())
    if tiles is not None:
        states.out.zero_()  # queries of no sequence stay zero
    arguments: dict[str, Any] = {
        "q_ptr": q.contiguous(),
        "k_ptr": k_pool.contiguous(),
        "v_ptr": v_pool.contiguous(),
        "out_ptr": states.out,
        "tops_ptr": states.tops,
        "totals_ptr": states.totals,
        "table_ptr": table.contiguous(),
        "rows_ptr": rows.contiguous(),
        "tiles_ptr": tiles,
        "kv_len_ptr": kv_len.contiguous(),
        "scale": scale,
        "table_stride": table.shape[1],
        "num_states": q.shape[0] * q.shape[1],
        "num_groups": k_pool.shape[1],
        "head_dim": q.shape[2],
    }
    constants |= {"SEGMENT": SEGMENT, "DECODE": tiles is None, "SPLIT": splits > 1}
    return Plan(attention_kernel, (num_tiles, k_pool.shape[1], splits), arguments, constants, states)


def tile_constants(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What every attention kernel is compiled for. Raises ValueError for dtypes and shapes without a kernel."""
    if q.dtype != torch.bfloat16 or k.dtype != torch.bfloat16 or v.dtype != torch.bfloat16:
        raise ValueError(f"q, k, v: {q.dtype}, {k.dtype}, {v.dtype}; rule: bf16; fix: .bfloat16()")
    (_, heads, head_dim), groups = q.shape, k.shape[1]
    if heads % groups or heads // groups > TILE_ROWS or head_dim > MAX_HEAD_DIM or v.shape != k.shape:
        raise ValueError(
            f"heads: {heads} over {groups}, head_dim {head_dim}; rule: key heads divide the heads, at most {TILE_ROWS} "
            f"heads share one, head_dim at most {MAX_HEAD_DIM}; fix: precision.backend: emulated"
        )
    return {
        "PER_GROUP": heads // groups,
        "DIM": _padded_dim(head_dim),
        "ROWS": TILE_ROWS,
        "KEYS": TILE_KEYS,
        "INTERPRETED": interpreting(),
    }


def _padded_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def tiles_of(cu: Sequence[int], per_tile: int) -> Tensor:
    """Sequences cut into tiles, int32 [tiles, 3]: sequence, first token, end of the sequence."""
    tiles = [
        (sequence, first, end)
        for sequence, (start, end) in enumerate(pairwise(cu))
        for first in range(start, end, per_tile)
    ]
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 3)


def _states(q: Tensor, segments: tuple[int, ...]) -> States:
    """Room for them; segments: (S,) or ()."""
    out = torch.empty(*segments, *q.shape, dtype=torch.float32 if segments else q.dtype, device=q.device)
    tops, totals = (torch.empty(*segments, *q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    return States(out, tops, totals)


def plan_merge_segments(states: States, kv_len: Tensor) -> Plan[Tensor]:
    """The second kernel of a split launch: the states of all segments -> bf16 [T, H, D]."""
    _, num_queries, heads, head_dim = states.out.shape
    out = states.out.new_empty(num_queries, heads, head_dim, dtype=torch.bfloat16)
    arguments = {
        "sums_ptr": states.out,
        "tops_ptr": states.tops,
        "totals_ptr": states.totals,
        "kv_len_ptr": kv_len.contiguous(),
        "out_ptr": out,
        "num_states": num_queries * heads,
        "num_heads": heads,
        "head_dim": head_dim,
    }
    constants = {"DIM": _padded_dim(head_dim), "ROWS": _MERGED_ROWS, "SEGMENT": SEGMENT}
    grid = (triton.cdiv(num_queries * heads, _MERGED_ROWS),)
    return Plan(merge_segments_kernel, grid, arguments, constants, out)


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
    *,
    splits: int | None = None,
) -> Tensor:
    """As `ops.reference.attention`, of bf16 tensors on a GPU. In decode (cu_queries None) the host reads no tensor, and
    grids depend on shapes alone. splits: programs along the keys in decode, of the same bits; None: as many as pay."""
    if splits is None:
        splits = num_splits(len(q), k_pool.shape[1], table.shape[1]) if cu_queries is None else 1
    states = plan_attention(q, k_pool, v_pool, table, rows, cu_queries, kv_len, scale, splits).run()
    return states.out if splits == 1 else plan_merge_segments(states, kv_len).run()
