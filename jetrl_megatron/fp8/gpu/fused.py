"""Operators of the forward path fused with the quantizer of the linear that follows: RMSNorm (with the residual add)
and SwiGLU. Each gives the bits of the separate operators (`ops.reference`) followed by `fp8.quantize_rows`.

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

MAX_HIDDEN = 16384  # one program holds a whole row
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
    hidden: tl.tensor,
    one_over_hidden: tl.tensor,
    eps: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    WITH_RESIDUAL: tl.constexpr,
    KEEP_BF16: tl.constexpr,
    POW2: tl.constexpr,
    LENGTH: tl.constexpr,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """One row. LENGTH = 2^LEVELS: hidden size rounded up, GROUPS = LENGTH / 128."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, LENGTH)
    inside = columns < hidden
    offsets = row * hidden + columns
    x = widen(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    if WITH_RESIDUAL:
        x = round_to_bf16(x + widen(tl.load(residual_ptr + offsets, mask=inside, other=0.0)))
        tl.store(sum_ptr + offsets, narrow(x), mask=inside)
    weight = widen(tl.load(weight_ptr + columns, mask=inside, other=0.0))
    mean = tree_sum(x * x, LEVELS) * one_over_hidden
    y = round_to_bf16((x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))) * weight)
    y = tl.where(inside, y, 0.0)  # a non-finite row must not reach the padding of its last group
    if KEEP_BF16:
        tl.store(out_ptr + offsets, narrow(y), mask=inside)
    y = tl.reshape(y, (GROUPS, 128))
    scale = scale_of(tl.max(magnitude_bits(y), axis=1), POW2)
    code = tl.reshape(to_e4m3(y, scale[:, None]), (LENGTH,))
    tl.store(code_ptr + offsets, code, mask=inside)
    groups = tl.arange(0, GROUPS).to(tl.int64)
    scales = scale_ptr + row * scale_stride_row + groups * scale_stride_group
    tl.store(scales, scale, mask=groups * 128 < hidden)


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
    KEEP_BF16: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    gates = x_ptr + rows[:, None] * x_stride + columns[None, :]
    gate = widen(tl.load(gates, mask=inside, other=0.0))
    up = widen(tl.load(gates + num_columns, mask=inside, other=0.0))
    y = round_to_bf16((gate * tl.div_rn(1.0, exp32(-gate) + 1.0)) * up)
    offsets = rows[:, None] * num_columns + columns[None, :]
    if KEEP_BF16:
        tl.store(out_ptr + offsets, narrow(y), mask=inside)
    scale = scale_of(tl.max(magnitude_bits(y), axis=1), POW2)
    tl.store(code_ptr + offsets, to_e4m3(y, scale[:, None]), mask=inside)
    tl.store(scale_ptr + rows * scale_stride_row + group * scale_stride_group, scale, mask=rows < num_rows)


@dataclass(frozen=True)
class Fused:
    """quantized: what the next linear multiplies. out: the same before quantization, bf16, if kept. residual: the new
    residual stream, if one was added."""

    quantized: Fp8Tensor
    out: Tensor | None = None
    residual: Tensor | None = None


def plan_rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: Fp8Format,
    residual: Tensor | None = None,
    keep_bf16: bool = False,
    layout: ScaleLayout = "row_major",
) -> Plan[Fused]:
    """The launch of `rmsnorm_quantize`."""
    check_matrix("x", x, (torch.bfloat16,))
    t, hidden = x.shape
    if not 0 < hidden <= MAX_HIDDEN:
        raise ValueError(f"hidden: {hidden}; rule: 1 to {MAX_HIDDEN}, a row is one program; fix: use ops.rmsnorm")
    x = x.contiguous()
    if residual is not None:
        check_matrix("residual", residual, (torch.bfloat16,))
        residual = residual.contiguous()
    total = None if residual is None else torch.empty_like(x)
    out = torch.empty_like(x) if keep_bf16 else None
    codes = torch.empty(t, hidden, dtype=E4M3, device=x.device)
    scale = empty_scale(t, num_blocks(hidden), x.device, layout)
    length = max(BLOCK, triton.next_power_of_2(hidden))
    arguments: dict[str, Any] = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight.contiguous(),
        "sum_ptr": total,
        "out_ptr": out,
        "code_ptr": codes.view(torch.uint8),
        "scale_ptr": scale,
        "hidden": hidden,
        "one_over_hidden": 1.0 / hidden,
        "eps": eps,
        "scale_stride_row": scale.stride(0),
        "scale_stride_group": scale.stride(1),
    }
    constants = {
        "WITH_RESIDUAL": residual is not None,
        "KEEP_BF16": keep_bf16,
        "POW2": check_block_format(fmt),
        "LENGTH": length,
        "LEVELS": length.bit_length() - 1,
        "GROUPS": length // BLOCK,
    }
    result = Fused(Fp8Tensor(codes, scale, fmt), out, total)
    return Plan(rmsnorm_kernel, (t,), arguments, constants, result, num_warps=4 if length <= 4096 else 8)


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: Fp8Format,
    residual: Tensor | None = None,
    keep_bf16: bool = False,
    layout: ScaleLayout = "row_major",
) -> Fused:
    """RMSNorm of bf16 x [T, H] (of bf16(x + residual), rounded first), rounded to bf16, quantized 1x128."""
    return plan_rmsnorm(x, weight, eps, fmt, residual, keep_bf16, layout).run()


def plan_swiglu(
    gate_up: Tensor, fmt: Fp8Format, keep_bf16: bool = False, layout: ScaleLayout = "row_major"
) -> Plan[Fused]:
    """The launch of `swiglu_quantize`."""
    check_matrix("gate_up", gate_up, (torch.bfloat16,))
    t, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up: {both} columns; rule: gate and up of equal width; fix: [T, 2F]")
    width = both // 2
    out = torch.empty(t, width, dtype=torch.bfloat16, device=gate_up.device) if keep_bf16 else None
    codes = torch.empty(t, width, dtype=E4M3, device=gate_up.device)
    scale = empty_scale(t, num_blocks(width), gate_up.device, layout)
    arguments: dict[str, Any] = {
        "x_ptr": gate_up,
        "out_ptr": out,
        "code_ptr": codes.view(torch.uint8),
        "scale_ptr": scale,
        "num_rows": t,
        "num_columns": width,
        "x_stride": gate_up.stride(0),
        "scale_stride_row": scale.stride(0),
        "scale_stride_group": scale.stride(1),
    }
    constants = {"KEEP_BF16": keep_bf16, "POW2": check_block_format(fmt), "ROWS": _ROWS, "COLUMNS": BLOCK}
    grid = (triton.cdiv(t, _ROWS), num_blocks(width))
    return Plan(swiglu_kernel, grid, arguments, constants, Fused(Fp8Tensor(codes, scale, fmt), out))


def swiglu_quantize(
    gate_up: Tensor, fmt: Fp8Format, keep_bf16: bool = False, layout: ScaleLayout = "row_major"
) -> Fused:
    """SwiGLU of bf16 [T, 2F] = [gate | up], rounded to bf16 [T, F], quantized 1x128."""
    return plan_swiglu(gate_up, fmt, keep_bf16, layout).run()
