"""Kernel set of the GPU backends: the functions of `reference` in Triton, on bf16 tensors of a GPU.

Byte-equal to `reference`: everything but `linear`, `row_parallel_linear` and `attention`, whose sums of products round
on tensor cores (docs/gpu.md). What takes no time worth a kernel (routing, sampling) is the torch form. Scales lie as
DeepGEMM reads them. An input that no kernel takes is refused; nothing falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, Fp8Tensor
from jetrl_megatron.fp8.gpu import fused
from jetrl_megatron.fp8.gpu.attention import States, attention, plan_attention
from jetrl_megatron.fp8.gpu.attention_backward import packed_attention_backward
from jetrl_megatron.fp8.gpu.elementwise import moe_combine, rope
from jetrl_megatron.fp8.gpu.linear import linear
from jetrl_megatron.fp8.gpu.linear import routed_linear as _routed_linear
from jetrl_megatron.fp8.gpu.logprob import sum_exp
from jetrl_megatron.ops import reference

__all__ = [
    "add_rmsnorm",
    "attention",
    "attention_backward",
    "attention_forward",
    "expert_weights",
    "linear",
    "logprob",
    "moe_combine",
    "prepare_experts",
    "prepare_linear",
    "rmsnorm",
    "rmsnorm_quantize",
    "rope",
    "routed_linear",
    "row_parallel_linear",
    "sample",
    "swiglu",
    "swiglu_quantize",
    "top_experts",
]
Prepared = Tensor
top_experts, expert_weights, sample = reference.top_experts, reference.expert_weights, reference.sample
# Bits of a partial sum relative to the largest of its row over all ranks: 2^8 of them add up in fp64 without rounding.
_PARTIAL_BITS = 44


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return fused.rmsnorm(_rows(x), weight, eps).out.view(x.shape)


def rmsnorm_quantize(x: Tensor, weight: Tensor, eps: float, fmt: Fp8Format) -> tuple[Tensor, Fp8Tensor]:
    result = fused.rmsnorm(_rows(x), weight, eps, fmt, layout="tma")
    assert result.quantized is not None
    return result.out.view(x.shape), result.quantized


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None
) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
    result = fused.rmsnorm(_rows(x), weight, eps, fmt, _rows(residual), "tma")
    assert result.residual is not None
    return result.out.view(x.shape), result.residual.view(x.shape), result.quantized


def swiglu(gate_up: Tensor) -> Tensor:
    return fused.swiglu(_rows(gate_up)).out.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def swiglu_quantize(gate_up: Tensor, fmt: Fp8Format) -> tuple[Tensor, Fp8Tensor]:
    result = fused.swiglu(_rows(gate_up), fmt, "tma")
    assert result.quantized is not None
    return result.out.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2), result.quantized


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def prepare_linear(weight: Tensor, weight_max: Tensor | None = None) -> Prepared:
    """The weight itself: it is read as it is, without a copy. weight_max: of the exact forms, unused here."""
    return weight


def prepare_experts(weight: Tensor) -> Prepared:
    """The stacked weights [E, N, K] themselves."""
    return weight


def routed_linear(x: Tensor, prepared: Prepared, offsets: Tensor) -> Tensor:
    return _routed_linear(x.contiguous(), prepared, offsets)


def row_parallel_linear(
    x: Tensor, prepared: Prepared, maximum: Callable[[Tensor], Tensor], sum_fp64: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each rank's fp32 product is brought onto a grid that the ranks share, so that their fp64 sum cannot round and has
    no order: training and rollout at one tensor-parallel size agree whatever their collectives do."""
    partial = linear(x, prepared)
    integers, scale = reference.grid(partial, _PARTIAL_BITS, maximum(reference.row_max(partial)))
    return sum_fp64(integers).mul_(scale).float()


def attention_forward(*inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attention`, and what its backward needs besides the inputs: the result, and of every row the largest score
    and the sum of weights."""
    states = plan_attention(*inputs).run()
    return states.out, (states.out, states.tops, states.totals)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Sequence[Tensor], cu: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return packed_attention_backward(dout, q, k, v, States(*saved), cu, scale)


def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    top, total = sum_exp(logits)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - top
    return (chosen.double() - reference.log64(total)).float()
