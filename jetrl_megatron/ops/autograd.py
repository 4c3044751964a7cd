"""Exact forward, ordinary backward: gradients come from torch's own formula for the same function, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8.recorder import differentiated, note


def differentiable(forward: Callable[..., Tensor], surrogate: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`forward(*tensors)`, differentiated as `surrogate(*tensors)`: the same function in stock torch operators, run
    again in backward at the saved inputs (nothing but the inputs is kept)."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        y: Tensor = _Differentiable.apply(forward, surrogate, *tensors)
        return y
    with torch.no_grad():
        return forward(*tensors)


@differentiated
class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Tensor], surrogate: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.surrogate = surrogate
        ctx.save_for_backward(*tensors)
        note("saved", "inputs", tensors)
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            y = ctx.surrogate(*inputs)
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grads[0].to(y.dtype)))
        return (None, None, *(next(found) if need else None for need in needs))
