"""Row maximum and sum of exponentials over the vocabulary in one kernel, with the fixed tree of `ops.reference`: no
copy of the logits, no dependence on the batch.

The tree over p = R * C padded logits halves i = r * C + c, so it adds over r first, for every c on its own, and then
over c. One program has one row: R x COLUMNS logits at a time become COLUMNS sums, which wait in `part`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.launch import Plan, check_matrix
from jetrl_megatron.fp8.gpu.rounding import exp32, tree_sum

MAX_VOCABULARY = 1 << 20
_R, _COLUMNS = 64, 128


@triton.jit
def sum_exp_kernel(
    logits_ptr: tl.tensor,
    part_ptr: tl.tensor,
    top_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    R: tl.constexpr,
    R_LEVELS: tl.constexpr,
    C: tl.constexpr,
    C_LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    part = part_ptr + row * C
    all_r, some_c = tl.arange(0, R), tl.arange(0, COLUMNS)
    highest = tl.full((R * COLUMNS,), float("-inf"), tl.float32)
    at = tl.arange(0, R * COLUMNS)
    for first in range(0, vocabulary, R * COLUMNS):
        inside = first + at < vocabulary
        highest = tl.maximum(highest, tl.load(logits + first + at, mask=inside, other=float("-inf")))
    top = tl.max(highest, axis=0)
    for first in range(0, C, COLUMNS):
        index = all_r[None, :] * C + (first + some_c)[:, None]
        z = tl.load(logits + index, mask=index < vocabulary, other=0.0)
        weight = tl.where(index < vocabulary, exp32(z - top), 0.0)
        tl.store(part + first + some_c, tree_sum(weight, R_LEVELS))
    tl.debug_barrier()  # the sums are read by other threads than those that wrote them
    one, every_c = tl.arange(0, 1), tl.arange(0, C)
    sums = tl.load(part + one[:, None] + every_c[None, :])
    tl.store(sum_ptr + row + one, tree_sum(sums, C_LEVELS))
    tl.store(top_ptr + row, top)


def plan_sum_exp(logits: Tensor) -> Plan[tuple[Tensor, Tensor]]:
    """The launch of `sum_exp`."""
    check_matrix("logits", logits, (torch.float32,))
    t, vocabulary = logits.shape
    if not 0 < vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"vocabulary: {vocabulary}; rule: 1 to {MAX_VOCABULARY}; fix: precision.backend: emulated")
    columns = max(2, triton.next_power_of_2(vocabulary) // _R)
    top, total = (torch.empty(t, dtype=torch.float32, device=logits.device) for _ in range(2))
    arguments = {
        "logits_ptr": logits,
        "part_ptr": torch.empty(t, columns, dtype=torch.float32, device=logits.device),
        "top_ptr": top,
        "sum_ptr": total,
        "vocabulary": vocabulary,
        "stride": logits.stride(0),
    }
    constants = {
        "R": _R,
        "R_LEVELS": _R.bit_length() - 1,
        "C": columns,
        "C_LEVELS": columns.bit_length() - 1,
        "COLUMNS": min(_COLUMNS, columns),
    }
    return Plan(sum_exp_kernel, (t,), arguments, constants, (top, total), num_warps=8)


def sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 logits [T, V] -> max over V and `tree_sum(exp32(logits - max))`, fp32 [T] each."""
    return plan_sum_exp(logits).run()
