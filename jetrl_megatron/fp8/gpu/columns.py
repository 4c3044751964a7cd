"""Quantization along tokens, with transposed output: the operands of WGrad, from bf16 or from rowwise FP8 copies.

Shape letters: T tokens, K features, G = ceil(K/128), GT = ceil(T/128) groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, Fp8Format, Fp8Tensor, num_blocks
from jetrl_megatron.fp8.gpu.launch import Plan, ScaleLayout, check_block_format, check_matrix, empty_scale, padded
from jetrl_megatron.fp8.gpu.rounding import from_e4m3, magnitude_bits, round_to_bf16, scale_of, to_e4m3, widen
from jetrl_megatron.fp8.gpu.tiles import tile_at

_COLUMNS = 64  # features of one program; a transposed row is 128 bytes, a whole line of memory


@triton.jit
def _store_transposed(
    x: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    group: tl.tensor,
    code_stride: tl.tensor,
    num_columns: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    POW2: tl.constexpr,
) -> None:
    """Quantize fp32 x [tokens, columns] per column and write it as rows of x^T."""
    scale = scale_of(tl.max(magnitude_bits(x), axis=0), POW2)
    code = tl.trans(to_e4m3(x, scale[None, :]))
    inside = (columns < num_columns)[:, None] & (tokens < code_stride)[None, :]
    columns = columns.to(tl.int64)
    tl.store(code_ptr + columns[:, None] * code_stride + tokens[None, :], code, mask=inside)
    tl.store(scale_ptr + columns * scale_stride_row + group * scale_stride_group, scale, mask=columns < num_columns)


@triton.jit
def columns_kernel(
    x_ptr: tl.tensor,
    row_code_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    code_stride: tl.tensor,
    row_scale_stride_row: tl.tensor,
    row_scale_stride_group: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    POW2: tl.constexpr,
    FROM_FP8: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One read of a [128, COLUMNS] tile. FROM_FP8: x is rowwise E4M3 codes with their scales (requantize). WITH_ROWS:
    the tile is quantized along its rows too, into row_code and row_scale."""
    group_t = tl.program_id(0).to(tl.int64)
    tokens, columns, inside = tile_at(group_t, tl.program_id(1), num_tokens, num_columns, TOKENS, COLUMNS)
    offsets = tokens[:, None] * x_stride + columns[None, :]
    if FROM_FP8 or WITH_ROWS:
        row_group = (tl.program_id(1) * COLUMNS // 128).to(tl.int64)
        row_scales = row_scale_ptr + tokens * row_scale_stride_row + row_group * row_scale_stride_group
    if FROM_FP8:
        code = tl.load(x_ptr + offsets, mask=inside, other=0)
        row_scale = tl.load(row_scales, mask=tokens < num_tokens, other=1.0)
        x = round_to_bf16(from_e4m3(code) * row_scale[:, None])
    else:
        x = widen(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    if WITH_ROWS:
        row_scale = scale_of(tl.max(magnitude_bits(x), axis=1), POW2)
        row_code = to_e4m3(x, row_scale[:, None])
        tl.store(row_code_ptr + tokens[:, None] * num_columns + columns[None, :], row_code, mask=inside)
        tl.store(row_scales, row_scale, mask=tokens < num_tokens)
    _store_transposed(
        x,
        code_ptr,
        scale_ptr,
        tokens,
        columns,
        group_t,
        code_stride,
        num_columns,
        scale_stride_row,
        scale_stride_group,
        POW2,
    )


def _plan(
    x: Tensor, fmt: Fp8Format, layout: ScaleLayout, pad_tokens: bool, rows: Fp8Tensor | None, columns: int
) -> Plan[Fp8Tensor]:
    """x: bf16 or fp32, or uint8 codes whose scales are in `rows`. rows: also the row-quantized output of `both`."""
    t, k = x.shape
    length = padded(t) if pad_tokens else t
    codes = torch.empty(k, length, dtype=E4M3, device=x.device)
    scale = empty_scale(k, num_blocks(t), x.device, layout)
    from_fp8 = x.dtype == torch.uint8
    arguments: dict[str, Any] = {
        "x_ptr": x,
        "row_code_ptr": rows.data.view(torch.uint8) if rows is not None and not from_fp8 else None,
        "row_scale_ptr": None if rows is None else rows.scale,
        "code_ptr": codes.view(torch.uint8),
        "scale_ptr": scale,
        "num_tokens": t,
        "num_columns": k,
        "x_stride": x.stride(0),
        "code_stride": length,
        "row_scale_stride_row": 0 if rows is None else rows.scale.stride(0),
        "row_scale_stride_group": 0 if rows is None else rows.scale.stride(1),
        "scale_stride_row": scale.stride(0),
        "scale_stride_group": scale.stride(1),
    }
    constants = {
        "POW2": check_block_format(fmt),
        "FROM_FP8": from_fp8,
        "WITH_ROWS": rows is not None and not from_fp8,
        "TOKENS": BLOCK,
        "COLUMNS": columns,
    }
    grid = (num_blocks(t), triton.cdiv(k, columns))
    return Plan(columns_kernel, grid, arguments, constants, Fp8Tensor(codes, scale, fmt), num_warps=8)


def plan_columns(
    x: Tensor, fmt: Fp8Format, layout: ScaleLayout = "row_major", pad_tokens: bool = False
) -> Plan[Fp8Tensor]:
    """The launch of `quantize_columns`."""
    check_matrix("x", x)
    return _plan(x, fmt, layout, pad_tokens, None, _COLUMNS)


def quantize_columns(
    x: Tensor, fmt: Fp8Format, layout: ScaleLayout = "row_major", pad_tokens: bool = False
) -> Fp8Tensor:
    """`fp8.quantize_columns`: x [T, K] -> FP8 x^T [K, T] and scales [K, GT], groups along tokens.

    pad_tokens: rows of x^T have 128 * GT elements, zeros at the end, which DeepGEMM's WGrad needs."""
    return plan_columns(x, fmt, layout, pad_tokens).run()


def plan_both(
    x: Tensor, fmt: Fp8Format, layout: ScaleLayout = "row_major", pad_tokens: bool = False
) -> Plan[tuple[Fp8Tensor, Fp8Tensor]]:
    """The launch of `quantize_both`."""
    check_matrix("x", x)
    scale = empty_scale(x.shape[0], num_blocks(x.shape[1]), x.device, layout)
    rows = Fp8Tensor(torch.empty(x.shape, dtype=E4M3, device=x.device), scale, fmt)
    plan = _plan(x, fmt, layout, pad_tokens, rows, BLOCK)
    return Plan(plan.kernel, plan.grid, plan.arguments, plan.constants, (rows, plan.result), num_warps=16)


def quantize_both(
    x: Tensor, fmt: Fp8Format, layout: ScaleLayout = "row_major", pad_tokens: bool = False
) -> tuple[Fp8Tensor, Fp8Tensor]:
    """`quantize_rows` and `quantize_columns` of x [T, K] from one read: dY of DGrad and of WGrad."""
    return plan_both(x, fmt, layout, pad_tokens).run()


def plan_requantize(x: Fp8Tensor, layout: ScaleLayout = "row_major", pad_tokens: bool = False) -> Plan[Fp8Tensor]:
    """The launch of `requantize_columns`."""
    check_matrix("x", x.data, (E4M3,))
    return _plan(x.data.view(torch.uint8), x.format, layout, pad_tokens, x, _COLUMNS)


def requantize_columns(x: Fp8Tensor, layout: ScaleLayout = "row_major", pad_tokens: bool = False) -> Fp8Tensor:
    """FProp's saved copy [T, K], quantized along K -> x^T [K, T] quantized along tokens, through bf16:
    `quantize_columns(x.dequantize(bfloat16))` (`saved_activation: rowwise`)."""
    return plan_requantize(x, layout, pad_tokens).run()
