"""Exact forward, ordinary backward: gradients come from torch's own formula for the same function, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
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


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Sequence[Tensor], cu: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of packed causal attention, dout and q [T, H, D], k and v [T, G, D], offsets cu: those of torch's
    scaled_dot_product_attention in fp32, on padded groups of sequences. saved: what kernels kept, not needed here."""
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for index, valid in _padded_groups(cu, q.device):
        q_BHSD, k_BGSD, v_BGSD = (t[index].float().transpose(1, 2).requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            o = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=scale, enable_gqa=True)
        do = (dout[index].float() * valid[..., None, None]).transpose(1, 2)
        for total, part in zip((dq, dk, dv), torch.autograd.grad(o, (q_BHSD, k_BGSD, v_BGSD), do), strict=True):
            total[index[valid]] = part.transpose(1, 2)[valid].to(total.dtype)
    return dq, dk, dv


def _padded_groups(cu: Sequence[int], device: torch.device, max_tokens: int = 8192) -> list[tuple[Tensor, Tensor]]:
    """Sequences of similar length as index [b, s] into the packed tokens and a validity mask [b, s]."""
    spans = sorted(pairwise(cu), key=lambda span: span[1] - span[0])
    spans = [span for span in spans if span[1] > span[0]]
    groups: list[list[tuple[int, int]]] = []
    current: list[tuple[int, int]] = []
    for span in spans:
        length = span[1] - span[0]
        if current and (len(current) + 1) * length > max_tokens:
            groups.append(current)
            current = []
        current.append(span)
    groups.append(current)
    result = []
    for group in groups:
        longest = group[-1][1] - group[-1][0]
        offsets = torch.arange(longest)
        starts = torch.tensor([a for a, _ in group])[:, None]
        ends = torch.tensor([b for _, b in group])[:, None]
        index = starts + offsets
        result.append((torch.minimum(index, ends - 1).to(device), (index < ends).to(device)))
    return result
