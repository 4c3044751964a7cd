"""Building blocks as kernels of their own. They serve checks: what they return in fp32, the fused kernels round to
bf16, which would hide most differences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.launch import Plan, check_matrix
from jetrl_megatron.fp8.gpu.rounding import exp32, tree_sum

_LENGTH = 1024


@triton.jit
def exp_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.tensor, LENGTH: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * LENGTH + tl.arange(0, LENGTH)
    tl.store(out_ptr + at, exp32(tl.load(x_ptr + at, mask=at < count, other=0.0)), mask=at < count)


@triton.jit
def tree_sum_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, length: tl.tensor, LENGTH: tl.constexpr, LEVELS: tl.constexpr
) -> None:
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, LENGTH)
    x = tl.load(x_ptr + rows[:, None] * length + columns[None, :], mask=(columns < length)[None, :], other=0.0)
    tl.store(out_ptr + rows, tree_sum(x, LEVELS))


def plan_exp32(x: Tensor) -> Plan[Tensor]:
    """`ops.reference.exp32` of fp32 x [N]."""
    out = torch.empty_like(x)
    arguments = {"x_ptr": x, "out_ptr": out, "count": x.numel()}
    return Plan(exp_kernel, (triton.cdiv(x.numel(), _LENGTH),), arguments, {"LENGTH": _LENGTH}, out)


def plan_tree_sum(x: Tensor) -> Plan[Tensor]:
    """`ops.reference.tree_sum` of fp32 x [T, H], H at least 2."""
    check_matrix("x", x, (torch.float32,))
    t, h = x.shape
    length = triton.next_power_of_2(h)
    out = torch.empty(t, dtype=torch.float32, device=x.device)
    constants = {"LENGTH": length, "LEVELS": length.bit_length() - 1}
    return Plan(tree_sum_kernel, (t,), {"x_ptr": x.contiguous(), "out_ptr": out, "length": h}, constants, out)
