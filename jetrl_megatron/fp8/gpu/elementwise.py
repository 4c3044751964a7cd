"""Rope and the sum over experts, byte for byte those of `ops.reference`.

Shape letters: T tokens, h heads, D head dim, k experts per token, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK
from jetrl_megatron.fp8.gpu.launch import Plan, check_matrix
from jetrl_megatron.fp8.gpu.rounding import narrow, round_to_bf16, widen
from jetrl_megatron.fp8.gpu.tiles import tile_at

_ROWS = 32


@triton.jit
def rope_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """ROWS heads of any tokens. HALF: half the head dim rounded up."""
    rows, columns, inside = tile_at(tl.program_id(0), 0, num_rows, half, ROWS, HALF)
    offsets = rows[:, None] * (2 * half) + columns[None, :]
    angles = (rows // num_heads)[:, None] * half + columns[None, :]
    a = widen(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    b = widen(tl.load(x_ptr + offsets + half, mask=inside, other=0.0))
    cos = tl.load(cos_ptr + angles, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, narrow(round_to_bf16(a * cos - b * sin)), mask=inside)
    tl.store(out_ptr + offsets + half, narrow(round_to_bf16(b * cos + a * sin)), mask=inside)


@triton.jit
def _weighted(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    slots: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    hidden: tl.tensor,
) -> tl.tensor:
    """Expert outputs in these slots times their weights, fp32."""
    y = widen(tl.load(rows_ptr + slots[:, None] * hidden + columns[None, :], mask=inside, other=0.0))
    return y * tl.load(weight_ptr + slots[:, None], mask=inside, other=0.0)


@triton.jit
def moe_combine_kernel(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    top_k: tl.tensor,
    hidden: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tokens, columns, inside = tile_at(tl.program_id(0), tl.program_id(1), num_tokens, hidden, ROWS, COLUMNS)
    slots = tokens * top_k
    total = _weighted(rows_ptr, weight_ptr, slots, columns, inside, hidden)
    for slot in range(1, top_k):
        total += _weighted(rows_ptr, weight_ptr, slots + slot, columns, inside, hidden)
    tl.store(out_ptr + tokens[:, None] * hidden + columns[None, :], narrow(round_to_bf16(total)), mask=inside)


def plan_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Plan[Tensor]:
    """The launch of `rope`."""
    t, heads, dim = x.shape
    check_matrix("x", x.view(t * heads, dim), (torch.bfloat16,))
    check_matrix("cos", cos, (torch.float32,))
    check_matrix("sin", sin, (torch.float32,))
    if dim % 2 or cos.shape != (t, dim // 2) or sin.shape != cos.shape:
        raise ValueError(f"cos: {tuple(cos.shape)}; rule: half the head dim of {tuple(x.shape)}; fix: check shapes")
    out = torch.empty_like(x)
    arguments = {
        "x_ptr": x,
        "cos_ptr": cos.contiguous(),
        "sin_ptr": sin.contiguous(),
        "out_ptr": out,
        "num_rows": t * heads,
        "num_heads": heads,
        "half": dim // 2,
    }
    constants = {"ROWS": _ROWS, "HALF": triton.next_power_of_2(max(dim // 2, 1))}
    return Plan(rope_kernel, (triton.cdiv(t * heads, _ROWS),), arguments, constants, out)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """bf16 x [T, h, D] rotated by fp32 cos, sin [T, D/2] (half-split layout), rounded once."""
    return plan_rope(x.contiguous(), cos, sin).run()


def plan_moe_combine(outputs: Tensor, weights: Tensor) -> Plan[Tensor]:
    """The launch of `moe_combine`."""
    t, top_k, hidden = outputs.shape
    check_matrix("outputs", outputs.view(t * top_k, hidden), (torch.bfloat16,))
    check_matrix("weights", weights, (torch.float32,))
    if weights.shape != (t, top_k) or not top_k:
        raise ValueError(f"weights: {tuple(weights.shape)}; rule: {(t, top_k)}, one or more; fix: check shapes")
    out = torch.empty(t, hidden, dtype=outputs.dtype, device=outputs.device)
    arguments = {
        "rows_ptr": outputs,
        "weight_ptr": weights.contiguous(),
        "out_ptr": out,
        "num_tokens": t,
        "top_k": top_k,
        "hidden": hidden,
    }
    constants = {"ROWS": _ROWS, "COLUMNS": BLOCK}
    return Plan(moe_combine_kernel, (triton.cdiv(t, _ROWS), triton.cdiv(hidden, BLOCK)), arguments, constants, out)


def moe_combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """bf16 outputs [T, k, H], fp32 weights [T, k] -> [T, H]: fp32 products, added left to right, rounded once."""
    return plan_moe_combine(outputs.contiguous(), weights).run()
