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

from jetrl_megatron.fp8.format import Fp8Recipe, Fp8Tensor
from jetrl_megatron.fp8.gemm import PreparedWeight, gemm_nt, prepare_transposed, prepare_weight, quantized_matmul
from jetrl_megatron.fp8.quantize import GridSlice, quantize_columns, quantize_rows
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
    y, quantized = quantized_matmul(x, weight.fprop, num_segments, dtype)
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
            saved = quantize_columns(x, recipe.format) if columnwise else quantized
            ctx.save_for_backward(saved.data, saved.scale)
            note("saved", "x along tokens" if columnwise else "x", saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].to(ctx.dtype)
        recipe, weight = ctx.recipe, ctx.weight
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _dgrad(dy, ctx.master.detach(), weight, recipe)
        if ctx.needs_input_grad[1]:
            dw = accumulate_main_grad(ctx.master, _wgrad(dy, ctx.saved_tensors, recipe))
        return dx, dw, None, None, None, None


def _dgrad(dy: Tensor, master: Tensor, weight: Fp8Weight, recipe: Fp8Recipe) -> Tensor:
    """dY [T, N] -> dX [T, K] in dY's dtype."""
    if recipe.dgrad == "bf16":
        note("internal", "dy of DGrad", dy)
        note("internal", "weight of DGrad", master.to(dy.dtype))
        return dy @ master.to(dy.dtype)
    prepared = weight.dgrad
    if prepared.order is not None:
        order = prepared.order
        dy = torch.where(order >= 0, dy[:, order.clamp_min(0)], torch.zeros((), dtype=dy.dtype))
    quantized = quantize_rows(dy, recipe.format)
    note("internal", "dy of DGrad", quantized)
    note("internal", "weight of DGrad", weight)
    return gemm_nt(quantized, prepared).to(dy.dtype)


def _wgrad(dy: Tensor, saved: Sequence[Tensor], recipe: Fp8Recipe) -> Tensor:
    """dY [T, N] and the saved activation -> dW [N, K] fp32."""
    if recipe.saved_activation == "bf16":
        x = saved[0]
    else:
        x = Fp8Tensor(saved[0], saved[1], recipe.format).dequantize(dy.dtype)
        if recipe.saved_activation == "columnwise":
            x = x.t()
    if recipe.wgrad == "bf16":
        note("internal", "dy of WGrad", dy)
        note("internal", "x of WGrad", x)
        return dy.float().t() @ x.float()
    dy_t = quantize_columns(dy, recipe.format)
    if recipe.saved_activation == "columnwise":
        x_t = Fp8Tensor(saved[0], saved[1], recipe.format)
    else:
        x_t = quantize_columns(x, recipe.format)
    note("internal", "dy of WGrad", dy_t)
    note("internal", "x of WGrad", x_t)
    return gemm_nt(dy_t, prepare_weight(x_t))


def accumulate_main_grad(master: Tensor, dw: Tensor) -> Tensor:
    """Add the fp32 dW to `master.main_grad` (Megatron's fp32 gradient buffer) and tell DDP so; without such a buffer
    return dW in the weight's dtype for autograd."""
    main_grad = getattr(master, "main_grad", None)
    if main_grad is None:
        return dw.to(master.dtype)
    main_grad.add_(dw)
    note("output", "dweight", main_grad)
    master.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros((), dtype=master.dtype).expand_as(master)
