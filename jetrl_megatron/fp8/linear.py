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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jetrl_megatron.fp8.backends import active, joined
from jetrl_megatron.fp8.carried import carried
from jetrl_megatron.fp8.format import Fp8Format, Fp8Recipe, Fp8Tensor
from jetrl_megatron.fp8.gemm import Fp8Experts, PreparedWeight, prepare_transposed, prepare_weight
from jetrl_megatron.fp8.quantize import GridSlice
from jetrl_megatron.fp8.recorder import differentiated, note


class SharedInput(Protocol):
    """A column-parallel linear's input among tensor-parallel ranks, each of which has all rows or a part of them, and
    then a term of their gradient (`megatron/overlap.py`). What is started runs beside computation; the callables wait.
    `UNSHARED`: one rank.
    """

    @property
    def splits_rows(self) -> bool:
        """Whether a rank has a part of the rows only."""

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start gathering tensors along their first dim, over the ranks' rows; themselves where ranks have all rows."""

    def add_up(self, dx: Tensor) -> Callable[[], Tensor]:
        """Start the sum over ranks of dX [T, K], which must not be written afterwards: this rank's rows of it."""


class _Unshared:
    """One rank, which has all rows."""

    splits_rows = False

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: list(parts)

    def add_up(self, dx: Tensor) -> Callable[[], Tensor]:
        return lambda: dx


UNSHARED = _Unshared()


def quantize_weight(
    weight: Tensor,
    fmt: Fp8Format,
    slices: Sequence[GridSlice] | None = None,
    share_amax: Callable[[Tensor], Tensor] | None = None,
) -> Fp8Tensor:
    """Quantize a weight [N, K] on the 128x128 grid of its Hugging Face tensors.

    slices: one per Hugging Face tensor held in `weight` (fused qkv: three); default: `weight` is one whole tensor.
    share_amax: maximum over the tensor-parallel group, applied to the amax of each tensor's whole grid
    [ceil(total/128), G]; required when a boundary between ROW shards cuts a block, harmless for other row shards, wrong
    for column shards (their grids cover different columns).
    """
    return active().quantize_weight(weight.detach(), fmt, slices, share_amax)


@dataclass
class Fp8Weight:
    """One version of a linear's FP8 weight [N, K]: what is sent to the engine and what the GEMMs use."""

    quantized: Fp8Tensor
    slices: Sequence[GridSlice]
    fprop: PreparedWeight
    _dgrad: PreparedWeight | None = None

    @classmethod
    def of(cls, quantized: Fp8Tensor, slices: Sequence[GridSlice]) -> Fp8Weight:
        return cls(quantized, slices, prepare_weight(quantized, slices))

    def refresh(self) -> None:
        """Follow what was written into the memory of `quantized`; see `PreparedWeight.refresh`."""
        self.fprop.refresh(self.quantized)
        self._dgrad = None

    @property
    def dgrad(self) -> PreparedWeight:
        if self._dgrad is None:
            self._dgrad = prepare_transposed(self.quantized, self.slices)
        return self._dgrad


def fp8_matmul(x: Tensor, weight: Fp8Weight, num_segments: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """FProp without autograd: x [T, K] bf16 -> [T, N], the fp32 accumulator rounded once to `dtype`."""
    return _fprop(x, [len(x)], [weight], num_segments, dtype)[0]


def _fprop(
    x: Tensor, num_rows: Sequence[int], weights: Sequence[Fp8Weight], num_segments: int, dtype: torch.dtype
) -> tuple[Tensor, list[Fp8Tensor]]:
    fmt = weights[0].fprop.format
    groups = x.split(list(num_rows))
    y, quantized = active().fprop_grouped(groups, [w.fprop for w in weights], num_segments, dtype, carried(x, fmt))
    note("internal", "x", quantized)
    note("internal", "accumulator", torch.float32)
    return y, quantized


def _fprop_shared(
    x: Tensor,
    num_rows: Sequence[int],
    weights: Sequence[Fp8Weight],
    num_segments: int,
    dtype: torch.dtype,
    shared: SharedInput,
) -> tuple[Tensor, list[Fp8Tensor]]:
    """FProp of all ranks' rows, and the codes of this rank's, which is what travels."""
    if not shared.splits_rows:
        return _fprop(x, num_rows, weights, num_segments, dtype)
    (weight,) = weights
    fmt = weight.fprop.format
    assert num_segments == 1
    assert fmt.granularity != "tensor"  # no row's scales depend on another rank's rows
    mine = carried(x, fmt)
    if mine is None:
        mine = active().quantize_rows(x, fmt)
    note("internal", "x", mine)
    note("internal", "accumulator", torch.float32)
    codes, scale = shared.gather([mine.data, mine.scale])()
    return active().matmul(Fp8Tensor(codes, scale, fmt), weight.fprop, dtype), [mine]


def fp8_linear(
    x: Tensor,
    master: Tensor,
    weight: Fp8Weight,
    recipe: Fp8Recipe,
    num_segments: int = 1,
    dtype: torch.dtype = torch.float32,
    shared: SharedInput = UNSHARED,
) -> Tensor:
    """x [T, K] bf16 -> x @ W^T [T, N], the fp32 accumulator rounded once to `dtype`.

    master: the bf16 weight [N, K] that `weight` was quantized from; it receives the gradient. shared: ranks share x; if
    they split its rows, all ranks' rows come out, and the recipe's saved activation is not `columnwise`.
    """
    return fp8_grouped_linear(x, [len(x)], [master], [weight], recipe, num_segments, dtype, shared)


def fp8_grouped_linear(
    x: Tensor,
    num_rows: Sequence[int],
    masters: Sequence[Tensor],
    weights: Sequence[Fp8Weight],
    recipe: Fp8Recipe,
    num_segments: int = 1,
    dtype: torch.dtype = torch.float32,
    shared: SharedInput = UNSHARED,
) -> Tensor:
    """`fp8_linear` with one weight per group: x [T, K], sorted by group, num_rows per group -> [T, N]. The weights have
    one shape. shared: of a lone group."""
    if torch.is_grad_enabled() and (x.requires_grad or any(master.requires_grad for master in masters)):
        y: Tensor = _Fp8Linear.apply(x, num_rows, weights, recipe, num_segments, dtype, shared, *masters)
        return y
    return _fprop_shared(x, num_rows, weights, num_segments, dtype, shared)[0]


def fp8_routed_linear(
    x: Tensor, offsets: Tensor, experts: Fp8Experts, num_segments: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """FProp alone, of rows whose numbers per expert may be known to the device only: x [R, K], sorted by expert, those
    of expert e at offsets[e] to offsets[e + 1] -> [R, N], zero in rows of no expert."""
    found = carried(x, experts.quantized.format)
    y, quantized = active().fprop_routed(x, experts, offsets, num_segments, dtype, found)
    note("internal", "x", quantized)
    note("internal", "accumulator", torch.float32)
    return y


@differentiated
class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        num_rows: Sequence[int],
        weights: Sequence[Fp8Weight],
        recipe: Fp8Recipe,
        num_segments: int,
        dtype: torch.dtype,
        shared: SharedInput,
        *masters: Tensor,
    ) -> Tensor:
        x = x.detach()
        ctx.weights, ctx.recipe, ctx.masters, ctx.dtype, ctx.shared = weights, recipe, masters, x.dtype, shared
        # of a rank's own rows nothing can be kept along tokens: they begin anywhere in a group of 128
        assert not shared.splits_rows or recipe.saved_activation != "columnwise"
        y, quantized = _fprop_shared(x, num_rows, weights, num_segments, dtype, shared)
        ctx.num_rows = [len(y)] if shared.splits_rows else num_rows
        groups = x.split(list(num_rows))
        if recipe.saved_activation == "bf16":
            ctx.save_for_backward(*groups)
            note("saved", "x", x)
        else:
            columnwise = recipe.saved_activation == "columnwise"
            saved = [active().quantize_columns(rows, recipe.format) for rows in groups] if columnwise else quantized
            ctx.save_for_backward(*(tensor for group in saved for tensor in (group.data, group.scale)))
            note("saved", "x along tokens" if columnwise else "x", saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].to(ctx.dtype).split(list(ctx.num_rows))
        recipe, weights, masters = ctx.recipe, ctx.weights, ctx.masters
        shared: SharedInput = ctx.shared
        need_dx, need_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[7:])
        assert need_dw == all(ctx.needs_input_grad[7:])  # weights of one call are trained or frozen together
        per_group = 1 if recipe.saved_activation == "bf16" else 2
        saved = [ctx.saved_tensors[i : i + per_group] for i in range(0, len(ctx.saved_tensors), per_group)]
        arriving = [shared.gather(tensors) for tensors in saved] if need_dw else []
        operands: list[tuple[Fp8Tensor | None, Fp8Tensor | None]] = [(None, None)] * len(dy)
        if need_dx and need_dw and recipe.dgrad == recipe.wgrad == "fp8" and weights[0].dgrad.order is None:
            operands = [active().quantize_both(rows, recipe.format) for rows in dy]
        dx = _dgrad(dy, [rows for rows, _ in operands], masters, weights, recipe) if need_dx else None
        summed = None if dx is None else shared.add_up(dx)
        whole = [wait() for wait in arriving]
        dw: list[Tensor | None] = [None] * len(masters)
        if need_dw and recipe.wgrad == "fp8":
            dw = [*_wgrad(dy, [columns for _, columns in operands], whole, masters, recipe)]
        elif need_dw:
            dw = [_wgrad_bf16(*group, recipe) for group in zip(dy, whole, masters, strict=True)]
        return None if summed is None else summed(), None, None, None, None, None, None, *dw


def _dgrad(
    dy: Sequence[Tensor],
    dy_rows: Sequence[Fp8Tensor | None],
    masters: Sequence[Tensor],
    weights: Sequence[Fp8Weight],
    recipe: Fp8Recipe,
) -> Tensor:
    """dY [T, N] of every group, and it quantized if that is done already -> dX [T, K] in dY's dtype."""
    dtype = dy[0].dtype
    if recipe.dgrad == "bf16":
        note("internal", "dy of DGrad", dy)
        wide = [master.detach().to(dtype) for master in masters]
        note("internal", "weight of DGrad", wide)
        return joined([rows @ weight for rows, weight in zip(dy, wide, strict=True)])
    prepared = [weight.dgrad for weight in weights]
    operands = [
        _dgrad_operand(rows, weight.order, recipe) if done is None else done
        for rows, done, weight in zip(dy, dy_rows, prepared, strict=True)
    ]
    note("internal", "dy of DGrad", operands)
    note("internal", "weight of DGrad", weights)
    return active().matmul_grouped(operands, prepared, dtype)


def _dgrad_operand(dy: Tensor, order: Tensor | None, recipe: Fp8Recipe) -> Fp8Tensor:
    """dY [T, N] quantized along N, its columns first put where W^T has them (`PreparedWeight.order`)."""
    if order is not None:
        zero = torch.zeros((), dtype=dy.dtype, device=dy.device)
        dy = torch.where(order >= 0, dy[:, order.clamp_min(0)], zero)
    return active().quantize_rows(dy, recipe.format)


def _wgrad(
    dy: Sequence[Tensor],
    dy_columns: Sequence[Fp8Tensor | None],
    saved: Sequence[Sequence[Tensor]],
    masters: Sequence[Tensor],
    recipe: Fp8Recipe,
) -> Sequence[Tensor]:
    """dY [T, N] of every group, it quantized along tokens if that is done, and the saved activations -> the weights'
    gradients."""
    dy_t = [
        active().quantize_columns(rows, recipe.format) if done is None else done
        for rows, done in zip(dy, dy_columns, strict=True)
    ]
    x_t = [_wgrad_operand(tensors, recipe, dy[0].dtype) for tensors in saved]
    note("internal", "dy of WGrad", dy_t)
    note("internal", "x of WGrad", x_t)
    main_grads = [getattr(master, "main_grad", None) for master in masters]
    dw = active().wgrad_grouped(dy_t, x_t, main_grads)
    return [
        made.to(master.dtype) if grad is None else _main_grad_added(master)
        for made, grad, master in zip(dw, main_grads, masters, strict=True)
    ]


def _wgrad_operand(saved: Sequence[Tensor], recipe: Fp8Recipe, dtype: torch.dtype) -> Fp8Tensor:
    """X^T [K, T] quantized along tokens, from what forward saved."""
    if recipe.saved_activation == "bf16":
        return active().quantize_columns(saved[0], recipe.format)
    x = Fp8Tensor(saved[0], saved[1], recipe.format)
    return active().requantize_columns(x, dtype) if recipe.saved_activation == "rowwise" else x


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
