"""Triton forms of the quantizer (`fp8.quantize`), byte for byte: 1x128 rows, 128x128 weights, and dequantize.

Shape letters: M rows, K columns, G = ceil(K/128) groups, N rows of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, Fp8Format, Fp8Tensor, num_blocks
from jetrl_megatron.fp8.gpu.launch import Plan, ScaleLayout, check_block_format, check_matrix, empty_scale
from jetrl_megatron.fp8.gpu.rounding import (
    from_e4m3,
    magnitude_bits,
    narrow,
    round_to_bf16,
    scale_of,
    to_e4m3,
    widen,
)
from jetrl_megatron.fp8.gpu.tiles import store_quantized_rows, tile_at

_ROWS = 32  # rows of one program; with 128 columns 4 warps hold 32 values per thread


@triton.jit
def rows_kernel(
    x_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    rows, columns, inside = tile_at(tl.program_id(0), group, num_rows, num_columns, ROWS, COLUMNS)
    x = widen(tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0))
    store_quantized_rows(
        x,
        code_ptr,
        scale_ptr,
        rows,
        columns,
        group,
        inside,
        num_rows,
        num_columns,
        scale_stride_row,
        scale_stride_group,
        POW2,
    )


@triton.jit
def blocks_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    num_groups: tl.tensor,
    WITH_ORDER: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One block. WITH_ORDER: its rows are named by `order`, -1 where it has fewer than ROWS."""
    group = tl.program_id(1)
    rows, columns, inside = tile_at(tl.program_id(0), group, num_rows, num_columns, ROWS, COLUMNS)
    if WITH_ORDER:
        rows = tl.load(order_ptr + rows)
        inside = (rows >= 0)[:, None] & (columns < num_columns)[None, :]
    x = widen(tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0))
    scale = scale_of(tl.max(tl.max(magnitude_bits(x), axis=1), axis=0), POW2)
    tl.store(code_ptr + rows[:, None] * num_columns + columns[None, :], to_e4m3(x, scale), mask=inside)
    used = (rows >= 0) & (rows < num_rows)
    tl.store(scale_ptr + rows * num_groups + group, scale + tl.zeros((ROWS,), tl.float32), mask=used)


@triton.jit
def dequantize_kernel(
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    rows, columns, inside = tile_at(tl.program_id(0), group, num_rows, num_columns, ROWS, COLUMNS)
    offsets = rows[:, None] * num_columns + columns[None, :]
    code = tl.load(code_ptr + offsets, mask=inside, other=0)
    scales = scale_ptr + rows * scale_stride_row + group.to(tl.int64) * scale_stride_group
    value = from_e4m3(code) * tl.load(scales, mask=rows < num_rows, other=1.0)[:, None]
    if BF16:
        value = narrow(round_to_bf16(value))
    tl.store(out_ptr + offsets, value, mask=inside)


def plan_rows(x: Tensor, fmt: Fp8Format, layout: ScaleLayout = "row_major") -> Plan[Fp8Tensor]:
    """The launch of `quantize_rows`."""
    check_matrix("x", x)
    m, k = x.shape
    codes = torch.empty(m, k, dtype=E4M3, device=x.device)
    scale = empty_scale(m, num_blocks(k), x.device, layout)
    arguments = {
        "x_ptr": x,
        "code_ptr": codes.view(torch.uint8),
        "scale_ptr": scale,
        "num_rows": m,
        "num_columns": k,
        "x_stride": x.stride(0),
        "scale_stride_row": scale.stride(0),
        "scale_stride_group": scale.stride(1),
    }
    constants = {"POW2": check_block_format(fmt), "ROWS": _ROWS, "COLUMNS": BLOCK}
    grid = (triton.cdiv(m, _ROWS), num_blocks(k))
    return Plan(rows_kernel, grid, arguments, constants, Fp8Tensor(codes, scale, fmt))


def quantize_rows(x: Tensor, fmt: Fp8Format, layout: ScaleLayout = "row_major") -> Fp8Tensor:
    """`fp8.quantize_rows`: x [M, K] bf16 or fp32, groups of 1x128 along K. Raises ValueError for other inputs."""
    return plan_rows(x, fmt, layout).run()


def plan_weight(weight: Tensor, fmt: Fp8Format, order: Tensor | None = None) -> Plan[Fp8Tensor]:
    """The launch of `quantize_weight`."""
    check_matrix("weight", weight)
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=E4M3, device=weight.device)
    scale = torch.empty(n, num_blocks(k), dtype=torch.float32, device=weight.device)
    arguments = {
        "x_ptr": weight,
        "order_ptr": order,
        "code_ptr": codes.view(torch.uint8),
        "scale_ptr": scale,
        "num_rows": n,
        "num_columns": k,
        "x_stride": weight.stride(0),
        "num_groups": num_blocks(k),
    }
    constants = {
        "WITH_ORDER": order is not None,
        "POW2": check_block_format(fmt),
        "ROWS": BLOCK,
        "COLUMNS": BLOCK,
    }
    grid = (num_blocks(n if order is None else len(order)), num_blocks(k))
    return Plan(blocks_kernel, grid, arguments, constants, Fp8Tensor(codes, scale, fmt), num_warps=8)


def quantize_weight(weight: Tensor, fmt: Fp8Format, order: Tensor | None = None) -> Fp8Tensor:
    """`fp8.quantize_weight`: weight [N, K] on 128x128 blocks, scales row-expanded [N, G].

    order: int64 [128 * number of blocks], the rows of each block, -1 for none, every row once
    (`fp8.gemm.contraction_order`); default: one whole Hugging Face tensor."""
    return plan_weight(weight, fmt, order).run()


def plan_dequantize(x: Fp8Tensor, dtype: torch.dtype = torch.float32) -> Plan[Tensor]:
    """The launch of `dequantize`."""
    check_matrix("x", x.data, (E4M3,))
    codes = x.data.contiguous()
    m, k = codes.shape
    out = torch.empty(m, k, dtype=dtype, device=codes.device)
    check_matrix("out", out)
    arguments = {
        "code_ptr": codes.view(torch.uint8),
        "scale_ptr": x.scale,
        "out_ptr": out,
        "num_rows": m,
        "num_columns": k,
        "scale_stride_row": x.scale.stride(0),
        "scale_stride_group": x.scale.stride(1),
    }
    constants = {"BF16": dtype == torch.bfloat16, "ROWS": _ROWS, "COLUMNS": BLOCK}
    return Plan(dequantize_kernel, (triton.cdiv(m, _ROWS), num_blocks(k)), arguments, constants, out)


def dequantize(x: Fp8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`Fp8Tensor.dequantize`: data * scale [M, K] as fp32, or rounded once to bf16. Scales in either layout."""
    return plan_dequantize(x, dtype).run()
