"""The FP8 GEMM in Triton, in the contract's order (docs/numerics.md, section 2), for GPUs without DeepGEMM.

D[M, N] = A[M, K] @ B[N, K].T: per 128-wide K block a tensor-core partial sum, then
acc = fma(RN(scale_a * scale_b), partial, acc), K blocks ascending; one rounding to bf16, or one fp32 add into D.
One tile shape for every M, no split-K, no autotuning: a row's bits do not depend on the batch. The partial sums of
tensor cores are not exact (section 2), so against the exact GEMM this needs a tolerance.

A grouped launch is many such GEMMs, of one N, whose operands lie anywhere: experts. A routed one takes rows sorted by
expert and learns on the device how many each has: the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, num_blocks
from jetrl_megatron.fp8.gpu.launch import Plan, check_matrix, interpreting
from jetrl_megatron.fp8.gpu.rounding import interpreted_dot, narrow, round_to_bf16
from jetrl_megatron.fp8.gpu.tiles import TILES_TOGETHER, check_offsets, num_group_tiles, tile_of_group, tile_of_program

TILE_M, TILE_N = 64, 128
_FP32, _BF16, _ADD = range(3)
Operand = tuple[Tensor, Tensor]  # E4M3 codes [M, K] and fp32 scales


@triton.jit
def _gemm_tile(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale_a_ptr: tl.tensor,
    scale_b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    scale_a_row: tl.tensor,
    scale_a_group: tl.tensor,
    scale_b_row: tl.tensor,
    scale_b_group: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    B_ROWS: tl.constexpr,
    OUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """The tile of D at these rows (below m) and columns. B_ROWS: rows of B that share a scale, 1 or 128. OUT: 0 fp32,
    1 bf16, 2 added to the fp32 that is there."""
    depth = tl.arange(0, TILE_K)
    has_row, has_column = rows < m, columns < n
    a_tile = a_ptr + rows[:, None] * stride_a + depth[None, :]
    b_tile = b_ptr + columns[None, :] * stride_b + depth[:, None]
    scale_a_tile = scale_a_ptr + rows * scale_a_row
    scale_b_tile = scale_b_ptr + (columns // B_ROWS) * scale_b_row
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for group in range(0, tl.cdiv(k, TILE_K)):
        has_depth = depth < k - group * TILE_K
        a = tl.load(a_tile, mask=has_row[:, None] & has_depth[None, :], other=0.0)
        b = tl.load(b_tile, mask=has_column[None, :] & has_depth[:, None], other=0.0)
        scale_a = tl.load(scale_a_tile, mask=has_row, other=0.0)
        scale_b = tl.load(scale_b_tile, mask=has_column, other=0.0)
        partial = interpreted_dot(a, b) if INTERPRETED else tl.dot(a, b)
        acc = tl.fma(scale_a[:, None] * scale_b[None, :], partial, acc)
        a_tile, b_tile = a_tile + TILE_K, b_tile + TILE_K
        scale_a_tile += scale_a_group
        scale_b_tile += scale_b_group
    inside = has_row[:, None] & has_column[None, :]
    out = out_ptr + rows[:, None] * n + columns[None, :]
    if OUT == 1:
        tl.store(out, narrow(round_to_bf16(acc)), mask=inside)
    else:
        if OUT == 2:
            acc = tl.load(out, mask=inside, other=0.0) + acc
        tl.store(out, acc, mask=inside)


@triton.jit
def gemm_nt_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale_a_ptr: tl.tensor,
    scale_b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    scale_a_row: tl.tensor,
    scale_a_group: tl.tensor,
    scale_b_row: tl.tensor,
    scale_b_group: tl.tensor,
    B_ROWS: tl.constexpr,
    OUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    rows, columns = tile_of_program(m, n, TILE_M, TILE_N, TOGETHER)
    _gemm_tile(
        a_ptr,
        b_ptr,
        scale_a_ptr,
        scale_b_ptr,
        out_ptr,
        m,
        n,
        k,
        stride_a,
        stride_b,
        scale_a_row,
        scale_a_group,
        scale_b_row,
        scale_b_group,
        rows,
        columns,
        B_ROWS,
        OUT,
        TILE_M,
        TILE_N,
        TILE_K,
        INTERPRETED,
    )


@triton.jit
def grouped_gemm_nt_kernel(
    table_ptr: tl.tensor,
    n: tl.tensor,
    ALIGNMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    B_ROWS: tl.constexpr,
    OUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of GEMM number program_id(1). ALIGNMENT: bytes that divide every address and stride of codes and D."""
    row = table_ptr + tl.program_id(1) * FIELDS
    m, k = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    if tl.program_id(0) < tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N):
        D_TYPE: tl.constexpr = tl.bfloat16 if OUT == 1 else tl.float32
        rows, columns = tile_of_program(m, n, TILE_M, TILE_N, TOGETHER)
        _gemm_tile(
            tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float8e4nv)), ALIGNMENT),
            tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float8e4nv)), ALIGNMENT),
            tl.load(row + 2).to(tl.pointer_type(tl.float32)),
            tl.load(row + 3).to(tl.pointer_type(tl.float32)),
            tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(D_TYPE)), ALIGNMENT),
            m,
            n,
            tl.multiple_of(k, ALIGNMENT),
            tl.multiple_of(tl.load(row + 7), ALIGNMENT),
            tl.multiple_of(tl.load(row + 8), ALIGNMENT),
            tl.load(row + 9),
            tl.load(row + 10),
            tl.load(row + 11),
            tl.load(row + 12),
            rows,
            columns,
            B_ROWS,
            OUT,
            TILE_M,
            TILE_N,
            TILE_K,
            INTERPRETED,
        )


@triton.jit
def routed_gemm_nt_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale_a_ptr: tl.tensor,
    scale_b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    num_groups: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    scale_a_row: tl.tensor,
    scale_a_group: tl.tensor,
    scale_b_row: tl.tensor,
    scale_b_group: tl.tensor,
    b_expert: tl.tensor,
    scale_b_expert: tl.tensor,
    GROUPS: tl.constexpr,
    B_ROWS: tl.constexpr,
    OUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of one expert's rows; B and its scales: stacked, b_expert and scale_b_expert elements apart."""
    expert, first, end = tile_of_group(offset_ptr, num_groups, TILE_M, GROUPS)
    if end > 0:
        _gemm_tile(
            a_ptr,
            b_ptr + expert.to(tl.int64) * b_expert,
            scale_a_ptr,
            scale_b_ptr + expert.to(tl.int64) * scale_b_expert,
            out_ptr,
            end,
            n,
            k,
            stride_a,
            stride_b,
            scale_a_row,
            scale_a_group,
            scale_b_row,
            scale_b_group,
            first.to(tl.int64) + tl.arange(0, TILE_M),
            tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N),
            B_ROWS,
            OUT,
            TILE_M,
            TILE_N,
            TILE_K,
            INTERPRETED,
        )


def _problem(a: Operand, b: Operand, target: Tensor) -> dict[str, Any]:
    """Arguments of one GEMM. Raises ValueError for shapes that do not fit."""
    (codes_a, scale_a), (codes_b, scale_b) = a, b
    check_matrix("a", codes_a, (E4M3,))
    check_matrix("b", codes_b, (E4M3,))
    (m, k), (n, other_k) = codes_a.shape, codes_b.shape
    if k != other_k:
        raise ValueError(f"K: {k} and {other_k}; rule: operands contract the same K; fix: check shapes")
    if scale_a.shape != (m, num_blocks(k)):
        raise ValueError(f"scale_a: {tuple(scale_a.shape)}; rule: {(m, num_blocks(k))}; fix: check shapes")
    if target.shape != (m, n) or not target.is_contiguous():
        raise ValueError(f"out: {tuple(target.shape)}; rule: contiguous {(m, n)}; fix: check shapes")
    return {
        "a_ptr": codes_a,
        "b_ptr": codes_b,
        "scale_a_ptr": scale_a,
        "scale_b_ptr": scale_b,
        "out_ptr": target,
        "m": m,
        "k": k,
        "stride_a": codes_a.stride(0),
        "stride_b": codes_b.stride(0),
        "scale_a_row": scale_a.stride(0),
        "scale_a_group": scale_a.stride(1),
        "scale_b_row": scale_b.stride(0),
        "scale_b_group": scale_b.stride(1),
    }


def _constants(b: Operand, target: Tensor, add: bool) -> dict[str, Any]:
    if add and target.dtype != torch.float32:
        raise ValueError(f"out: {target.dtype}; rule: products are added in fp32; fix: an fp32 main_grad")
    return {
        "B_ROWS": _rows_per_scale(b[0], b[1]),
        "OUT": _ADD if add else _BF16 if target.dtype == torch.bfloat16 else _FP32,
        "TILE_M": TILE_M,
        "TILE_N": TILE_N,
        "TILE_K": BLOCK,
        "TOGETHER": TILES_TOGETHER,
        "INTERPRETED": interpreting(),
    }


def _rows_per_scale(codes_b: Tensor, scale_b: Tensor) -> int:
    """1 for a row-expanded scale [N, G], 128 for a weight's grid [ceil(N/128), G]."""
    n, k = codes_b.shape
    for rows in (BLOCK, 1):
        if scale_b.shape == (-(-n // rows), num_blocks(k)):
            return rows
    raise ValueError(
        f"scale_b: {tuple(scale_b.shape)}; rule: {(n, num_blocks(k))}, one per row, or "
        f"{(num_blocks(n), num_blocks(k))}, one per 128 rows; fix: check shapes"
    )


def plan_gemm_nt(a: Operand, b: Operand, out: Tensor | torch.dtype = torch.bfloat16) -> Plan[Tensor]:
    """The launch of `gemm_nt`."""
    m, n = len(a[0]), len(b[0])
    target = out if isinstance(out, Tensor) else torch.empty(m, n, dtype=out, device=a[0].device)
    arguments = {**_problem(a, b, target), "n": n}
    constants = _constants(b, target, isinstance(out, Tensor))
    return Plan(gemm_nt_kernel, (triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N),), arguments, constants, target)


def gemm_nt(a: Operand, b: Operand, out: Tensor | torch.dtype = torch.bfloat16) -> Tensor:
    """A [M, K] times B [N, K] transposed, each as (E4M3 codes, fp32 scales in any layout): scales of A [M, G], of B
    [N, G] or [ceil(N/128), G].

    out: bfloat16 or float32, a new [M, N] rounded once; or an fp32 tensor [M, N] to which the product is added (WGrad
    into main_grad). Raises ValueError for shapes that do not fit."""
    return plan_gemm_nt(a, b, out).run()


def plan_grouped_gemm_nt(
    a: Sequence[Operand], b: Sequence[Operand], out: Sequence[Tensor], add: bool
) -> Plan[Sequence[Tensor]]:
    """The launch of `grouped_gemm_nt`, of one GEMM or more."""
    problems = [_problem(*problem) for problem in zip(a, b, out, strict=True)]
    constants = _constants(b[0], out[0], add)
    if any(
        _constants(right, target, add) != constants or len(right[0]) != len(b[0][0])
        for right, target in zip(b, out, strict=True)
    ):
        raise ValueError("groups: rule: GEMMs of one launch have one N, one output type and one form of scales")
    fields = [[v.data_ptr() if isinstance(v, Tensor) else v for v in problem.values()] for problem in problems]
    n, device = len(b[0][0]), out[0].device
    for problem in problems:
        if any(value.device != device for value in problem.values() if isinstance(value, Tensor)):
            raise ValueError(f"groups: rule: all operands on {device}; fix: move them")
    codes_and_out = [row[i] for row in fields for i in (0, 1, 4, 6, 7, 8)] + [n * out[0].element_size()]
    arguments = {"table_ptr": torch.tensor(fields, dtype=torch.int64).to(device), "n": n}
    constants |= {"ALIGNMENT": 16 if all(value % 16 == 0 for value in codes_and_out) else 1, "FIELDS": len(fields[0])}
    tiles = max(triton.cdiv(problem["m"], TILE_M) for problem in problems) * triton.cdiv(n, TILE_N)
    return Plan(grouped_gemm_nt_kernel, (tiles, len(problems)), arguments, constants, out)


def grouped_gemm_nt(a: Sequence[Operand], b: Sequence[Operand], out: Sequence[Tensor], add: bool = False) -> None:
    """`gemm_nt` of every group in one launch, the same bits: A [M_g, K_g] times B [N, K_g] transposed into (add: added
    to) out [M_g, N]. Groups without rows, or without anything to contract, are left as they are."""
    used = [g for g, (codes, _) in enumerate(a) if codes.numel()]
    if used:
        plan_grouped_gemm_nt([a[g] for g in used], [b[g] for g in used], [out[g] for g in used], add).run()


def plan_routed_gemm_nt(a: Operand, b: Operand, offsets: Tensor, dtype: torch.dtype) -> Plan[Tensor]:
    """The launch of `routed_gemm_nt`."""
    (codes_b, scale_b), m = b, len(a[0])
    num_groups, n, _ = codes_b.shape
    check_offsets(offsets, num_groups)
    out = torch.zeros(m, n, dtype=dtype, device=a[0].device)
    first = codes_b[0], scale_b[0]
    arguments = _problem(a, first, out) | {
        "b_ptr": codes_b,
        "scale_b_ptr": scale_b,
        "offset_ptr": offsets,
        "num_groups": num_groups,
        "n": n,
        "b_expert": codes_b.stride(0),
        "scale_b_expert": scale_b.stride(0),
    }
    del arguments["m"]
    constants = _constants(first, out, add=False) | {"GROUPS": triton.next_power_of_2(num_groups)}
    del constants["TOGETHER"]
    grid = (num_group_tiles(m, num_groups, TILE_M), triton.cdiv(n, TILE_N))
    return Plan(routed_gemm_nt_kernel, grid, arguments, constants, out)


def routed_gemm_nt(a: Operand, b: Operand, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """A [M, K], rows sorted by group, times the group's B [N, K] transposed, the bits of `gemm_nt`: B stacked [E, N, K]
    with scales [E, N, G] or [E, ceil(N/128), G], rows of group e at offsets[e] to offsets[e + 1] (integers, read on the
    device alone). Rows of no group are zero."""
    return plan_routed_gemm_nt(a, b, offsets, dtype).run()
