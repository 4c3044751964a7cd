"""The FP8 linear under autograd: FProp, DGrad and WGrad, each in FP8 or BF16 (Jet-RL, section 4).

| GEMM  | contracts | A                       | B                      |
|-------|-----------|-------------------------|------------------------|
| FProp | K         | X 1x128 along K         | W 128x128              |
| DGrad | N         | dY 1x128 along N        | W^T, the same bytes    |
| WGrad | T tokens  | dY^T 1x128 along T      | X^T 1x128 along T      |

Gradient edges between operators are bf16; the weight gradient is fp32 and added to `weight.main_grad` where that
exists. Shape letters: T tokens, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8.backends import active
from jetrl_megatron.fp8.carried import carried
from jetrl_megatron.fp8.format import Fp8Recipe, Fp8Tensor
from jetrl_megatron.fp8.gemm import PreparedWeight, prepare_transposed, prepare_weight
from jetrl_megatron.fp8.quantize import GridSlice
from jetrl_megatron.fp8.recorder import differentiated, note


@dataclass
class Fp8Weight:
    """One version of a linear's FP8 weight [N, K]: what is sent to the engine and what the GEMMs use."""

    quantized: Fp8Tensor
    slices: Sequence[GridSlice]
    fprop: PreparedWeight
    _dgrad: PreparedWeight | None = None

    @classmethod
    def of(cls, quantized: Fp8Tensor, slices: Sequence[GridSlice]) -> Fp8Weight:
        return cls(quantized, slices, prepare_weight(quantized))

    @property
    def dgrad(self) -> PreparedWeight:
        if self._dgrad is None:
            self._dgrad = prepare_transposed(self.quantized, self.slices)
        return self._dgrad


def fp8_matmul(x: Tensor, weight: Fp8Weight, num_segments: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """FProp without autograd: x [T, K] bf16 -> [T, N], the fp32 accumulator rounded once to `dtype`."""
    return _fprop(x, weight, num_segments, dtype)[0]


def _fprop(x: Tensor, weight: Fp8Weight, num_segments: int, dtype: torch.dtype) -> tuple[Tensor, Fp8Tensor]:
    found = carried(x, weight.fprop.format)
    y, quantized = active().fprop(x, weight.fprop, num_segments, dtype, found)
    note("internal", "x", quantized)
    note("internal", "accumulator", torch.float32)
    return y, quantized


def fp8_linear(
    x: Tensor,
    master: Tensor,
    weight: Fp8Weight,
    recipe: Fp8Recipe,
    num_segments: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x [T, K] bf16 -> x @ W^T [T, N], the fp32 accumulator rounded once to `dtype`.

    master: the bf16 weight [N, K] that `weight` was quantized from; it receives the gradient.
    """
    if torch.is_grad_enabled() and (x.requires_grad or master.requires_grad):
        y: Tensor = _Fp8Linear.apply(x, master, weight, recipe, num_segments, dtype)
        return y
    return fp8_matmul(x, weight, num_segments, dtype)


@differentiated
class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        weight: Fp8Weight,
        recipe: Fp8Recipe,
        num_segments: int,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.detach()
        y, quantized = _fprop(x, weight, num_segments, dtype)
        ctx.weight, ctx.recipe, ctx.master, ctx.dtype = weight, recipe, master, x.dtype
        if recipe.saved_activation == "bf16":
            ctx.save_for_backward(x)
            note("saved", "x", x)
        else:
            columnwise = recipe.saved_activation == "columnwise"
            saved = active().quantize_columns(x, recipe.format) if columnwise else quantized
            ctx.save_for_backward(saved.data, saved.scale)
            note("saved", "x along tokens" if columnwise else "x", saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].to(ctx.dtype)
        recipe, weight, master = ctx.recipe, ctx.weight, ctx.master
        need_dx, need_dw = ctx.needs_input_grad[:2]
        dy_rows = dy_t = dx = dw = None
        if need_dx and need_dw and recipe.dgrad == recipe.wgrad == "fp8" and weight.dgrad.order is None:
            dy_rows, dy_t = active().quantize_both(dy, recipe.format)
        if need_dx:
            dx = _dgrad(dy, dy_rows, master.detach(), weight, recipe)
        if need_dw and recipe.wgrad == "fp8":
            dw = _wgrad(dy, dy_t, ctx.saved_tensors, master, recipe)
        elif need_dw:
            dw = _wgrad_bf16(dy, ctx.saved_tensors, master, recipe)
        return dx, dw, None, None, None, None


def _dgrad(dy: Tensor, dy_rows: Fp8Tensor | None, master: Tensor, weight: Fp8Weight, recipe: Fp8Recipe) -> Tensor:
    """dY [T, N], and it quantized if that is done already -> dX [T, K] in dY's dtype."""
    if recipe.dgrad == "bf16":
        note("internal", "dy of DGrad", dy)
        note("internal", "weight of DGrad", master.to(dy.dtype))
        return dy @ master.to(dy.dtype)
    prepared = weight.dgrad
    if dy_rows is None:
        if prepared.order is not None:
            order = prepared.order
            zero = torch.zeros((), dtype=dy.dtype, device=dy.device)
            dy = torch.where(order >= 0, dy[:, order.clamp_min(0)], zero)
        dy_rows = active().quantize_rows(dy, recipe.format)
    note("internal", "dy of DGrad", dy_rows)
    note("internal", "weight of DGrad", weight)
    return active().dgrad(dy_rows, prepared, dy.dtype)


def _wgrad(dy: Tensor, dy_t: Fp8Tensor | None, saved: Sequence[Tensor], master: Tensor, recipe: Fp8Recipe) -> Tensor:
    """dY [T, N], it quantized along tokens if that is done, and the saved activation -> the weight's gradient."""
    if dy_t is None:
        dy_t = active().quantize_columns(dy, recipe.format)
    if recipe.saved_activation == "bf16":
        x_t = active().quantize_columns(saved[0], recipe.format)
    else:
        x_t = Fp8Tensor(saved[0], saved[1], recipe.format)
        if recipe.saved_activation == "rowwise":
            x_t = active().requantize_columns(x_t, dy.dtype)
    note("internal", "dy of WGrad", dy_t)
    note("internal", "x of WGrad", x_t)
    main_grad = getattr(master, "main_grad", None)
    dw = active().wgrad(dy_t, x_t, main_grad)
    return dw.to(master.dtype) if main_grad is None else _main_grad_added(master)


def _wgrad_bf16(dy: Tensor, saved: Sequence[Tensor], master: Tensor, recipe: Fp8Recipe) -> Tensor:
    """The same with bf16 operands."""
    if recipe.saved_activation == "bf16":
        x = saved[0]
    else:
        x = Fp8Tensor(saved[0], saved[1], recipe.format).dequantize(dy.dtype)
        if recipe.saved_activation == "columnwise":
            x = x.t()[: len(dy)]
    note("internal", "dy of WGrad", dy)
    note("internal", "x of WGrad", x)
    return accumulate_main_grad(master, dy.float().t() @ x.float())


def accumulate_main_grad(master: Tensor, dw: Tensor) -> Tensor:
    """Add the fp32 dW to `master.main_grad` (Megatron's fp32 gradient buffer) and tell DDP so; without such a buffer
    return dW in the weight's dtype for autograd."""
    main_grad = getattr(master, "main_grad", None)
    if main_grad is None:
        return dw.to(master.dtype)
    main_grad.add_(dw)
    return _main_grad_added(master)


def _main_grad_added(master: Tensor) -> Tensor:
    """What autograd gets for a weight whose gradient is in `main_grad` already: zeros that take no memory."""
    note("output", "dweight", master.main_grad)  # type: ignore[attr-defined]
    master.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros((), dtype=master.dtype, device=master.device).expand_as(master)
