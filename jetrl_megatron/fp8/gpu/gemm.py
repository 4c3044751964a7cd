"""The FP8 GEMM in Triton, in the contract's order (docs/numerics.md, section 2), for GPUs without DeepGEMM.

D[M, N] = A[M, K] @ B[N, K].T: per 128-wide K block a tensor-core partial sum, then
acc = fma(RN(scale_a * scale_b), partial, acc), K blocks ascending; one rounding to bf16, or one fp32 add into D.
One tile shape for every M, no split-K, no autotuning: a row's bits do not depend on the batch. The partial sums of
tensor cores are not exact (section 2), so against the exact GEMM this needs a tolerance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, num_blocks
from jetrl_megatron.fp8.gpu.launch import Plan, check_matrix
from jetrl_megatron.fp8.gpu.rounding import narrow, round_to_bf16, widen

TILE_M, TILE_N = 64, 128
_TILES_TOGETHER = 8  # tiles of M that run side by side, so that they share B's tiles in the L2 cache


@triton.jit
def gemm_nt_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale_a_ptr: tl.tensor,
    scale_b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
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
    WITH_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """B_ROWS: rows of B that share a scale, 1 or 128. OUT: 0 fp32, 1 bf16, 2 added to the fp32 that is there."""
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    wave = tl.program_id(0) // (TOGETHER * tiles_n)
    height = tl.minimum(tiles_m - wave * TOGETHER, TOGETHER)
    inside_wave = tl.program_id(0) % (TOGETHER * tiles_n)
    rows = (wave * TOGETHER + inside_wave % height).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = (inside_wave // height).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
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
        partial = tl.dot(a, b)
        acc = tl.fma(scale_a[:, None] * scale_b[None, :], partial, acc)
        a_tile, b_tile = a_tile + TILE_K, b_tile + TILE_K
        scale_a_tile += scale_a_group
        scale_b_tile += scale_b_group
    inside = has_row[:, None] & has_column[None, :]
    out = out_ptr + rows[:, None] * n + columns[None, :]
    if OUT == 1:
        y = round_to_bf16(acc)
        if WITH_BIAS:
            y = round_to_bf16(y + widen(tl.load(bias_ptr + columns, mask=has_column, other=0.0))[None, :])
        tl.store(out, narrow(y), mask=inside)
    else:
        if OUT == 2:
            acc = tl.load(out, mask=inside, other=0.0) + acc
        tl.store(out, acc, mask=inside)


def plan_gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor | torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Plan[Tensor]:
    """The launch of `gemm_nt`."""
    (codes_a, scale_a), (codes_b, scale_b) = a, b
    check_matrix("a", codes_a, (E4M3,))
    check_matrix("b", codes_b, (E4M3,))
    (m, k), (n, other_k) = codes_a.shape, codes_b.shape
    if k != other_k:
        raise ValueError(f"K: {k} and {other_k}; rule: operands contract the same K; fix: check shapes")
    rows_per_scale = _rows_per_scale(n, k, scale_b)
    if scale_a.shape != (m, num_blocks(k)):
        raise ValueError(f"scale_a: {tuple(scale_a.shape)}; rule: {(m, num_blocks(k))}; fix: check shapes")
    accumulate = isinstance(out, Tensor)
    target = out if isinstance(out, Tensor) else torch.empty(m, n, dtype=out, device=codes_a.device)
    if accumulate and (target.dtype != torch.float32 or target.shape != (m, n) or not target.is_contiguous()):
        raise ValueError(
            f"out: {target.dtype} {tuple(target.shape)}; rule: contiguous fp32 {(m, n)} to accumulate into"
        )
    if bias is not None and (target.dtype != torch.bfloat16 or bias.dtype != torch.bfloat16):
        raise ValueError("bias: rule: a bf16 bias is added to a bf16 output; fix: add it outside")
    arguments = {
        "a_ptr": codes_a,
        "b_ptr": codes_b,
        "scale_a_ptr": scale_a,
        "scale_b_ptr": scale_b,
        "out_ptr": target,
        "bias_ptr": None if bias is None else bias.contiguous(),
        "m": m,
        "n": n,
        "k": k,
        "stride_a": codes_a.stride(0),
        "stride_b": codes_b.stride(0),
        "scale_a_row": scale_a.stride(0),
        "scale_a_group": scale_a.stride(1),
        "scale_b_row": scale_b.stride(0),
        "scale_b_group": scale_b.stride(1),
    }
    constants = {
        "B_ROWS": rows_per_scale,
        "OUT": 2 if accumulate else int(target.dtype == torch.bfloat16),
        "WITH_BIAS": bias is not None,
        "TILE_M": TILE_M,
        "TILE_N": TILE_N,
        "TILE_K": BLOCK,
        "TOGETHER": _TILES_TOGETHER,
    }
    return Plan(gemm_nt_kernel, (triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N),), arguments, constants, target)


def _rows_per_scale(n: int, k: int, scale_b: Tensor) -> int:
    """1 for a row-expanded scale [N, G], 128 for a weight's grid [ceil(N/128), G]."""
    for rows in (BLOCK, 1):
        if scale_b.shape == (-(-n // rows), num_blocks(k)):
            return rows
    raise ValueError(
        f"scale_b: {tuple(scale_b.shape)}; rule: {(n, num_blocks(k))}, one per row, or "
        f"{(num_blocks(n), num_blocks(k))}, one per 128 rows; fix: check shapes"
    )


def gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor | torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """A [M, K] times B [N, K] transposed, each as (E4M3 codes, fp32 scales in any layout): scales of A [M, G], of B
    [N, G] or [ceil(N/128), G].

    out: bfloat16 or float32, a new [M, N] rounded once; or an fp32 tensor [M, N] to which the product is added (WGrad
    into main_grad). bias [N] bf16: added after the rounding. Raises ValueError for shapes that do not fit."""
    return plan_gemm_nt(a, b, out, bias).run()
