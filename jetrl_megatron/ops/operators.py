"""The operators of the forward path. Megatron's modules and SGLang's modules both call these and nothing else.

Each takes and returns the residual stream's dtype (bf16) unless it says otherwise. Shape letters: T tokens, H hidden,
h heads, D head dim, N outputs, K inputs, V vocabulary, E experts, k experts per token, R rows (token, expert).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Experts, Fp8Format, Fp8Recipe
from jetrl_megatron.fp8.carried import carry
from jetrl_megatron.fp8.linear import UNSHARED, Fp8Weight, SharedInput, accumulate_main_grad
from jetrl_megatron.fp8.linear import fp8_grouped_linear as _fp8_grouped_linear
from jetrl_megatron.fp8.linear import fp8_linear as _fp8_linear
from jetrl_megatron.fp8.linear import fp8_routed_linear as _fp8_routed_linear
from jetrl_megatron.fp8.recorder import differentiated, note
from jetrl_megatron.ops import reference
from jetrl_megatron.ops.autograd import differentiable
from jetrl_megatron.ops.kernels import kernels
from jetrl_megatron.ops.recorder import operator, recording
from jetrl_megatron.ops.rope import RopeTable
from jetrl_megatron.ops.timing import timed

Reduce = Callable[[Tensor], Tensor]


@operator("embedding")
def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Row lookup: ids [...] and weight [V, H] -> [..., H]."""
    return F.embedding(token_ids, weight)


@operator("rmsnorm")
def rmsnorm(x: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None = None) -> Tensor:
    """RMSNorm over the last dim (hidden norms and q/k norms), x [..., H], weight [H]. fmt: of the FP8 linear that reads
    the result; the result then carries its quantized form, made in the same pass."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        carried = _row_by_row(fmt)
        if carried is None:
            y: Tensor = kernels().rmsnorm(x, w, eps)
            return y
        return carry(*kernels().rmsnorm_quantize(x, w, eps, carried))

    return differentiable(
        forward,
        lambda x, w: F.rms_norm(x.float(), (x.shape[-1],), w.float(), eps).to(x.dtype),
        x,
        weight,
    )


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add, rounded to bf16 first, then the norm of the rounded sum: (normed, new residual). fmt: as for
    `rmsnorm`. One pass where neither gradients nor a recording need the two operators apart; the same bits."""
    if recording() or (torch.is_grad_enabled() and any(t.requires_grad for t in (x, residual, weight))):
        residual = residual_add(x, residual)
        return rmsnorm(residual, weight, eps, fmt), residual
    return _add_rmsnorm(x, residual, weight, eps, fmt)


@timed("rmsnorm")
@torch.no_grad()
def _add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None
) -> tuple[Tensor, Tensor]:
    y, residual, quantized = kernels().add_rmsnorm(x, residual, weight, eps, _row_by_row(fmt))
    return y if quantized is None else carry(y, quantized), residual


def _row_by_row(fmt: Fp8Format | None) -> Fp8Format | None:
    """The format, if a row can be quantized without the other rows."""
    return fmt if fmt is not None and fmt.granularity == "block" else None


@operator("residual_add")
def residual_add(x: Tensor, residual: Tensor) -> Tensor:
    """One bf16 add."""
    return x + residual


@operator("bias_add")
def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """A linear's bias: one bf16 add, after the linear's rounding. x [..., N], bias [N]."""
    return x + bias


@operator("rope")
def rope(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    """Rotate x [T, h, D] by positions [T] (half-split layout)."""
    cos, sin = table.lookup(positions)

    return differentiable(lambda x: kernels().rope(x, cos, sin), lambda x: reference.rope(x, cos, sin), x)


@operator("swiglu")
def swiglu(gate_up: Tensor, fmt: Fp8Format | None = None) -> Tensor:
    """[..., 2F] = [gate | up] -> silu(gate) * up, [..., F]. fmt: as for `rmsnorm`."""

    def forward(gate_up: Tensor) -> Tensor:
        carried = _row_by_row(fmt)
        if carried is None:
            y: Tensor = kernels().swiglu(gate_up)
            return y
        return carry(*kernels().swiglu_quantize(gate_up, carried))

    def surrogate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    return differentiable(forward, surrogate, gate_up)


@operator("fp8_linear")
def fp8_linear(
    x: Tensor,
    master: Tensor,
    weight: Fp8Weight,
    recipe: Fp8Recipe,
    num_segments: int = 1,
    reduce: Reduce | None = None,
    shared: SharedInput = UNSHARED,
) -> Tensor:
    """x [..., K] -> [..., N] through the FP8 weight; `reduce` (over tensor-parallel ranks) sees the fp32 accumulator
    before the one rounding. shared: how ranks share x; if they split its first dim, all of it comes out."""
    dtype = x.dtype if reduce is None else torch.float32
    y = _fp8_linear(x.reshape(-1, x.shape[-1]), master, weight, recipe, num_segments, dtype, shared)
    if reduce is not None:
        y = reduce(y).to(x.dtype)
    return _as(y, x, shared)


@operator("fp8_linear", weights="weight")
def fp8_grouped_linear(
    x: Tensor,
    num_rows: Sequence[int],
    masters: Sequence[Tensor],
    weights: Sequence[Fp8Weight],
    recipe: Fp8Recipe,
    num_segments: int = 1,
    reduce: Reduce | None = None,
) -> Tensor:
    """`fp8_linear` with one weight per group: x [R, K], sorted by group, num_rows per group -> [R, N]."""
    dtype = x.dtype if reduce is None else torch.float32
    y = _fp8_grouped_linear(x, num_rows, masters, weights, recipe, num_segments, dtype)
    return y if reduce is None else reduce(y).to(x.dtype)


@operator("fp8_linear", experts="weight")
def fp8_routed_linear(
    x: Tensor, offsets: Tensor, experts: Fp8Experts, num_segments: int = 1, reduce: Reduce | None = None
) -> Tensor:
    """`fp8_grouped_linear` of an engine: stacked experts, without gradients; x [R, K], sorted by expert, rows of expert
    e at offsets[e] to offsets[e + 1] -> [R, N], zero in rows of no expert. GPU kernels read offsets on the device."""
    dtype = x.dtype if reduce is None else torch.float32
    y = _fp8_routed_linear(x, offsets, experts, num_segments, dtype)
    return y if reduce is None else reduce(y).to(x.dtype)


@dataclass
class ExactWeight:
    """One version of a bf16 weight [N, K], prepared for the exact linear. maximum: over the tensor-parallel group,
    where K is split over ranks (row parallel)."""

    prepared: Any

    @classmethod
    @timed("prepare_weight")
    def of(cls, weight: Tensor, maximum: Reduce | None = None) -> ExactWeight:
        weight = weight.detach()
        row_max = None if maximum is None else maximum(reference.row_max(weight))
        return cls(kernels().prepare_linear(weight, row_max))


@operator("linear")
def linear(x: Tensor, master: Tensor, weight: ExactWeight, shared: SharedInput = UNSHARED) -> Tensor:
    """Exact bf16 linear: x [..., K], master [N, K] -> [..., N] in x's dtype. shared: as for `fp8_linear`."""
    return _linear(x, master, weight, shared).to(x.dtype)


@operator("linear")
def row_parallel_linear(x: Tensor, master: Tensor, weight: ExactWeight, maximum: Reduce, sum_fp64: Reduce) -> Tensor:
    """bf16 linear whose K is split over ranks: sums on grids that the ranks share through `maximum`, so that `sum_fp64`
    over the ranks cannot round and needs no order; one rounding. Exact, so equal at every tensor-parallel size, except
    on GPU backends, where training and rollout agree at the same size."""
    y = _apply_linear(
        lambda x2: kernels().row_parallel_linear(x2, weight.prepared, maximum, sum_fp64),
        x.reshape(-1, x.shape[-1]),
        master,
    )
    return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


@operator("linear")
def grouped_linear(
    x: Tensor, num_rows: Sequence[int], masters: Sequence[Tensor], weights: Sequence[ExactWeight]
) -> Tensor:
    """`linear` with one weight per group: x [R, K], sorted by group, num_rows per group -> [R, N]."""
    groups = zip(x.split(list(num_rows)), masters, weights, strict=True)
    return torch.cat([_linear(rows, master, weight) for rows, master, weight in groups]).to(x.dtype)


@dataclass
class ExactExperts:
    """One version of the stacked bf16 weights [E, N, K] of experts, prepared for the exact linear."""

    prepared: Any

    @classmethod
    @timed("prepare_weight")
    def of(cls, weight: Tensor) -> ExactExperts:
        return cls(kernels().prepare_experts(weight.detach()))


@operator("linear")
def routed_linear(x: Tensor, offsets: Tensor, master: Tensor, experts: ExactExperts) -> Tensor:
    """`grouped_linear` of an engine, as `fp8_routed_linear`: master [E, N, K]."""
    y: Tensor = kernels().routed_linear(x, experts.prepared, offsets)
    return y.to(x.dtype)


@operator("router")
def router(x: Tensor, master: Tensor, weight: ExactWeight) -> Tensor:
    """Router logits [..., E] in fp32 (one rounding), x [..., H], master [E, H] bf16."""
    return _linear(x, master, weight)


@operator("route")
def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] fp32 -> expert ids [T, k] int64 and their weights [T, k] fp32.

    Slots are in descending logit; of equal logits the lower expert id comes first. Weights: softmax over the chosen
    experts (renormalize) or over all.
    """
    experts: Tensor = kernels().top_experts(logits.detach(), top_k)

    def surrogate(z: Tensor) -> Tensor:
        if renormalize:
            return torch.softmax(z.gather(-1, experts), -1)
        return torch.softmax(z, -1).gather(-1, experts)

    return experts, differentiable(lambda z: kernels().expert_weights(z, experts, renormalize), surrogate, logits)


@operator("moe_combine")
def moe_combine(outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Sum of expert outputs [T, k, H] times weights [T, k] fp32 -> [T, H].

    experts: distinct ids [T, k] of the slots, which may come in any order: products are added in ascending expert id,
    in fp32, and rounded once.
    """
    order = experts.argsort(dim=-1)
    return differentiable(
        kernels().moe_combine,
        lambda y, w: (y.float() * w.unsqueeze(-1)).sum(1).to(y.dtype),
        outputs.gather(1, order.unsqueeze(-1).expand_as(outputs)),
        weights.gather(1, order),
    )


@operator("lm_head")
def lm_head(x: Tensor, master: Tensor, weight: ExactWeight) -> Tensor:
    """Logits [..., V] in fp32 (one rounding), x [..., H], master [V, H] bf16."""
    return _linear(x, master, weight)


def _linear(x: Tensor, master: Tensor, weight: ExactWeight, shared: SharedInput = UNSHARED) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return _as(_apply_linear(lambda x2: kernels().linear(x2, weight.prepared), rows, master, shared), x, shared)


def _as(y: Tensor, x: Tensor, shared: SharedInput) -> Tensor:
    """y [T, N] in the shape of x [..., K], whose first dim ranks may split."""
    if shared.splits_rows:
        return y.view(-1, *x.shape[1:-1], y.shape[-1])
    return y.view(*x.shape[:-1], y.shape[-1])


def _apply_linear(
    forward: Callable[[Tensor], Tensor], x: Tensor, master: Tensor, shared: SharedInput = UNSHARED
) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or master.requires_grad):
        y: Tensor = _ExactLinear.apply(forward, x, master, shared)
        return y
    return forward(*shared.gather([x])())


@differentiated
class _ExactLinear(torch.autograd.Function):
    """Exact fp32 output; gradients are bf16 GEMMs, dW in fp32 into `main_grad` where that exists."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[Tensor], Tensor], x: Tensor, master: Tensor, shared: SharedInput
    ) -> Tensor:
        ctx.save_for_backward(x)
        note("saved", "x", x)
        ctx.master, ctx.shared = master, shared
        return forward(*shared.gather([x.detach()])())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        shared: SharedInput = ctx.shared
        arriving = shared.gather([x])
        dy = grads[0].to(x.dtype)
        dx = dy @ ctx.master.detach().to(x.dtype) if ctx.needs_input_grad[1] else None
        summed = None if dx is None else shared.add_up(dx)
        (x,) = arriving()
        dw = None
        if ctx.needs_input_grad[2]:
            dw = accumulate_main_grad(ctx.master, dy.float().t() @ x.float())
        return None, None if summed is None else summed(), dw, None


@operator("logprob")
def logprob(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log-softmax(logits / temperature) at the targets: logits [T, V] fp32, targets [T] -> fp32 [T].

    Temperature 0 means greedy sampling: the untempered log-prob."""
    divisor = temperature if temperature > 0 else 1.0

    def forward(z: Tensor) -> Tensor:
        if divisor != 1.0:
            z = torch.div(z, torch.full((), divisor, dtype=torch.float32, device=z.device))
        y: Tensor = kernels().logprob(z, targets)
        return y

    return differentiable(
        forward, lambda z: torch.log_softmax(z / divisor, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1), logits
    )


@timed("sample")
def sample(logits: Tensor, uniforms: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Token ids [B] drawn from tempered logits [B, V]; see `reference.sample`."""
    ids: Tensor = kernels().sample(logits, uniforms, top_p, top_k)
    return ids
