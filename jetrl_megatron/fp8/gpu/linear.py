"""The BF16 linear (lm_head, router, linears in BF16 mode): one tile shape for every M, no split-K, no autotuning, K
ascending in one fp32 accumulator. So a row's bits do not depend on the batch. They are not those of the exact linear of
`ops.reference`, whose sums do not round: against it this needs a tolerance.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.launch import Plan, check_matrix, interpreting
from jetrl_megatron.fp8.gpu.rounding import interpreted_dot
from jetrl_megatron.fp8.gpu.tiles import TILES_TOGETHER, check_offsets, num_group_tiles, tile_of_group, tile_of_program

TILE_M, TILE_N, TILE_K = 128, 128, 64


@triton.jit
def _linear_tile(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """The tile of the result at these rows (below m) and columns."""
    depth = tl.arange(0, TILE_K)
    has_row, has_column = rows < m, columns < n
    x_tile = x_ptr + rows[:, None] * x_stride + depth[None, :]
    weight_tile = weight_ptr + columns[None, :] * weight_stride + depth[:, None]
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for first in range(0, k, TILE_K):
        has_depth = depth < k - first
        x = tl.load(x_tile, mask=has_row[:, None] & has_depth[None, :], other=0.0)
        weight = tl.load(weight_tile, mask=has_column[None, :] & has_depth[:, None], other=0.0)
        acc = acc + interpreted_dot(x, weight) if INTERPRETED else tl.dot(x, weight, acc)
        x_tile, weight_tile = x_tile + TILE_K, weight_tile + TILE_K
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], acc, mask=has_row[:, None] & has_column[None, :])


@triton.jit
def linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    rows, columns = tile_of_program(m, n, TILE_M, TILE_N, TOGETHER)
    _linear_tile(
        x_ptr,
        weight_ptr,
        out_ptr,
        m,
        n,
        k,
        x_stride,
        weight_stride,
        rows,
        columns,
        TILE_M,
        TILE_N,
        TILE_K,
        INTERPRETED,
    )


@triton.jit
def routed_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    num_groups: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    weight_expert: tl.tensor,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of one expert's rows; weights: stacked, weight_expert elements apart."""
    expert, first, end = tile_of_group(offset_ptr, num_groups, TILE_M, GROUPS)
    if end > 0:
        _linear_tile(
            x_ptr,
            weight_ptr + expert.to(tl.int64) * weight_expert,
            out_ptr,
            end,
            n,
            k,
            x_stride,
            weight_stride,
            first.to(tl.int64) + tl.arange(0, TILE_M),
            tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N),
            TILE_M,
            TILE_N,
            TILE_K,
            INTERPRETED,
        )


def plan_linear(x: Tensor, weight: Tensor) -> Plan[Tensor]:
    """The launch of `linear`."""
    check_matrix("x", x, (torch.bfloat16,))
    check_matrix("weight", weight, (torch.bfloat16,))
    (m, k), (n, other_k) = x.shape, weight.shape
    if k != other_k:
        raise ValueError(f"K: {k} and {other_k}; rule: operands contract the same K; fix: check shapes")
    out = torch.empty(m, n, dtype=torch.float32, device=x.device)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "out_ptr": out,
        "m": m,
        "n": n,
        "k": k,
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(0),
    }
    constants = {
        "TILE_M": TILE_M,
        "TILE_N": TILE_N,
        "TILE_K": TILE_K,
        "TOGETHER": TILES_TOGETHER,
        "INTERPRETED": interpreting(),
    }
    grid = (triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N),)
    return Plan(linear_kernel, grid, arguments, constants, out, num_warps=8)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 x [M, K] times bf16 weight [N, K] transposed: the fp32 accumulator [M, N]. Raises ValueError for other
    dtypes."""
    return plan_linear(x, weight).run()


def plan_routed_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Plan[Tensor]:
    """The launch of `routed_linear`."""
    check_matrix("x", x, (torch.bfloat16,))
    check_matrix("weight", weight[0], (torch.bfloat16,))
    (m, k), (num_groups, n, other_k) = x.shape, weight.shape
    check_offsets(offsets, num_groups)
    if k != other_k:
        raise ValueError(f"K: {k} and {other_k}; rule: operands contract the same K; fix: check shapes")
    out = torch.zeros(m, n, dtype=torch.float32, device=x.device)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "out_ptr": out,
        "offset_ptr": offsets,
        "num_groups": num_groups,
        "n": n,
        "k": k,
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(1),
        "weight_expert": weight.stride(0),
    }
    constants = {
        "GROUPS": triton.next_power_of_2(num_groups),
        "TILE_M": TILE_M,
        "TILE_N": TILE_N,
        "TILE_K": TILE_K,
        "INTERPRETED": interpreting(),
    }
    grid = (num_group_tiles(m, num_groups, TILE_M), triton.cdiv(n, TILE_N))
    return Plan(routed_linear_kernel, grid, arguments, constants, out, num_warps=8)


def routed_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """bf16 x [M, K], rows sorted by group, times the group's weight of bf16 [E, N, K] transposed: fp32 [M, N], the bits
    of `linear`; offsets as in `gemm.routed_gemm_nt`. Rows of no group are zero."""
    return plan_routed_linear(x, weight, offsets).run()
