"""RMSNorm (with or without the residual add) and SwiGLU, alone or with the quantizer of the linear that follows in the
same pass. Each gives the bits of the separate operators (`ops.reference`) followed by `fp8.quantize_rows`.

Shape letters: T tokens, H hidden size, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, Fp8Format, Fp8Tensor, num_blocks
from jetrl_megatron.fp8.gpu.launch import Plan, ScaleLayout, check_block_format, check_matrix, empty_scale
from jetrl_megatron.fp8.gpu.rounding import (
    exp32,
    magnitude_bits,
    narrow,
    round_to_bf16,
    scale_of,
    to_e4m3,
    tree_sum,
    widen,
)
from jetrl_megatron.fp8.gpu.tiles import store_quantized_rows, tile_at

MAX_HIDDEN = 16384  # one program holds whole rows
_VALUES = 4096  # of one RMSNorm program: that many short rows (q and k norms) share it
_ROWS = 32


@triton.jit
def rmsnorm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    hidden: tl.tensor,
    one_over_hidden: tl.tensor,
    eps: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    WITH_RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """ROWS whole rows. LENGTH = 2^LEVELS: hidden size rounded up, GROUPS = LENGTH / 128."""
    rows, columns, inside = tile_at(tl.program_id(0), 0, num_rows, hidden, ROWS, LENGTH)
    offsets = rows[:, None] * hidden + columns[None, :]
    x = widen(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    if WITH_RESIDUAL:
        x = round_to_bf16(x + widen(tl.load(residual_ptr + offsets, mask=inside, other=0.0)))
        tl.store(sum_ptr + offsets, narrow(x), mask=inside)
    weight = widen(tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0))
    mean = tree_sum(x * x, LEVELS) * one_over_hidden
    y = round_to_bf16((x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]) * weight[None, :])
    tl.store(out_ptr + offsets, narrow(y), mask=inside)
    if QUANTIZE:
        y = tl.where(inside, y, 0.0)  # a non-finite row must not reach the padding of its last group
        y = tl.reshape(y, (ROWS, GROUPS, 128))
        scale = scale_of(tl.max(magnitude_bits(y), axis=2), POW2)
        code = tl.reshape(to_e4m3(y, scale[:, :, None]), (ROWS, LENGTH))
        tl.store(code_ptr + offsets, code, mask=inside)
        groups = tl.arange(0, GROUPS).to(tl.int64)
        scales = scale_ptr + rows[:, None] * scale_stride_row + groups[None, :] * scale_stride_group
        tl.store(scales, scale, mask=(rows < num_rows)[:, None] & (groups * 128 < hidden)[None, :])


@triton.jit
def swiglu_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    QUANTIZE: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    rows, columns, inside = tile_at(tl.program_id(0), group, num_rows, num_columns, ROWS, COLUMNS)
    gates = x_ptr + rows[:, None] * x_stride + columns[None, :]
    gate = widen(tl.load(gates, mask=inside, other=0.0))
    up = widen(tl.load(gates + num_columns, mask=inside, other=0.0))
    y = round_to_bf16((gate * tl.div_rn(1.0, exp32(-gate) + 1.0)) * up)
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], narrow(y), mask=inside)
    if QUANTIZE:
        store_quantized_rows(
            y,
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


@dataclass(frozen=True)
class Fused:
    """out: bf16. quantized: the same, as the next linear multiplies it, if a format was given. residual: the new
    residual stream, if one was added."""

    out: Tensor
    quantized: Fp8Tensor | None = None
    residual: Tensor | None = None


def _quantized_like(out: Tensor, fmt: Fp8Format | None, layout: ScaleLayout) -> tuple[Fp8Tensor | None, dict[str, Any]]:
    """Memory for out [M, K] quantized, if a format is given, and the kernels' arguments for it."""
    if fmt is None:
        strides = {"scale_stride_row": 0, "scale_stride_group": 0}
        return None, {"code_ptr": None, "scale_ptr": None, **strides}
    check_block_format(fmt)
    m, k = out.shape
    scale = empty_scale(m, num_blocks(k), out.device, layout)
    quantized = Fp8Tensor(torch.empty(m, k, dtype=E4M3, device=out.device), scale, fmt)
    strides = {"scale_stride_row": scale.stride(0), "scale_stride_group": scale.stride(1)}
    return quantized, {"code_ptr": quantized.data.view(torch.uint8), "scale_ptr": scale, **strides}


def plan_rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: Fp8Format | None = None,
    residual: Tensor | None = None,
    layout: ScaleLayout = "row_major",
) -> Plan[Fused]:
    """The launch of `rmsnorm`."""
    check_matrix("x", x, (torch.bfloat16,))
    t, hidden = x.shape
    if not 0 < hidden <= MAX_HIDDEN:
        raise ValueError(f"hidden: {hidden}; rule: 1 to {MAX_HIDDEN}, a program holds rows; fix: backend emulated")
    assert weight.shape == (hidden,)
    x = x.contiguous()
    if residual is not None:
        check_matrix("residual", residual, (torch.bfloat16,))
        assert residual.shape == x.shape
        residual = residual.contiguous()
    total = None if residual is None else torch.empty_like(x)
    out = torch.empty_like(x)
    quantized, destination = _quantized_like(out, fmt, layout)
    length = max(BLOCK, triton.next_power_of_2(hidden))
    rows = max(1, _VALUES // length)
    arguments: dict[str, Any] = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight.contiguous(),
        "sum_ptr": total,
        "out_ptr": out,
        "num_rows": t,
        "hidden": hidden,
        "one_over_hidden": 1.0 / hidden,
        "eps": eps,
        **destination,
    }
    constants = {
        "WITH_RESIDUAL": residual is not None,
        "QUANTIZE": fmt is not None,
        "POW2": fmt is not None and fmt.scale_format == "pow2",
        "ROWS": rows,
        "LENGTH": length,
        "LEVELS": length.bit_length() - 1,
        "GROUPS": length // BLOCK,
    }
    result = Fused(out, quantized, total)
    num_warps = 4 if length <= _VALUES else 8
    return Plan(rmsnorm_kernel, (triton.cdiv(t, rows),), arguments, constants, result, num_warps=num_warps)


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: Fp8Format | None = None,
    residual: Tensor | None = None,
    layout: ScaleLayout = "row_major",
) -> Fused:
    """RMSNorm of bf16 x [T, H] (of bf16(x + residual), rounded first), rounded to bf16; quantized 1x128 if there is a
    format."""
    return plan_rmsnorm(x, weight, eps, fmt, residual, layout).run()


def plan_swiglu(gate_up: Tensor, fmt: Fp8Format | None = None, layout: ScaleLayout = "row_major") -> Plan[Fused]:
    """The launch of `swiglu`."""
    check_matrix("gate_up", gate_up, (torch.bfloat16,))
    t, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up: {both} columns; rule: gate and up of equal width; fix: [T, 2F]")
    width = both // 2
    out = torch.empty(t, width, dtype=torch.bfloat16, device=gate_up.device)
    quantized, destination = _quantized_like(out, fmt, layout)
    arguments: dict[str, Any] = {
        "x_ptr": gate_up,
        "out_ptr": out,
        "num_rows": t,
        "num_columns": width,
        "x_stride": gate_up.stride(0),
        **destination,
    }
    constants = {
        "QUANTIZE": fmt is not None,
        "POW2": fmt is not None and fmt.scale_format == "pow2",
        "ROWS": _ROWS,
        "COLUMNS": BLOCK,
    }
    return Plan(swiglu_kernel, (triton.cdiv(t, _ROWS), num_blocks(width)), arguments, constants, Fused(out, quantized))


def swiglu(gate_up: Tensor, fmt: Fp8Format | None = None, layout: ScaleLayout = "row_major") -> Fused:
    """SwiGLU of bf16 [T, 2F] = [gate | up], rounded to bf16 [T, F]; quantized 1x128 if there is a format."""
    return plan_swiglu(gate_up, fmt, layout).run()
