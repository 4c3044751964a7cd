"""Quantized forms that memory carries: found where they are right, never where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Tensor, Fp8Weight, quantize_rows, quantize_weight, whole
from jetrl_megatron.fp8.backends import active
from jetrl_megatron.fp8.carried import carried, carry
from jetrl_megatron.megatron.linear import LinearPrecision

FMT, POW2 = Fp8Format(), Fp8Format(scale_format="pow2")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


class _Identity(torch.autograd.Function):
    """As Megatron's copy to a tensor-parallel region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_found_through_views() -> None:
    """Reshapes, detach, autograd's identities and runs of whole rows find it; the tensor may be gone."""
    x = randn(12, 1, 256)
    quantized = quantize_rows(x.view(12, 256), FMT)
    held = carry(x, quantized).view(12, 256)
    del x
    assert carried(held, FMT) is quantized
    assert carried(held.detach().reshape(3, 4, 256).view(12, 256), FMT) is quantized
    assert carried(_Identity.apply(held.requires_grad_()), FMT) is quantized
    rows = carried(held[3:7], FMT)
    assert rows is not None
    assert torch.equal(rows.data.view(torch.uint8), quantized.data[3:7].view(torch.uint8))
    assert torch.equal(rows.scale, quantized.scale[3:7])
    none = carried(held[5:5], FMT)
    assert none is not None
    assert none.shape == (0, 256)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.detach().mul_(2),
        lambda x: (x[0].zero_(), x)[1],
        lambda x: x.clone(),
        lambda x: x.t(),
        lambda x: x[:, :128],
        lambda x: x[:, :128].contiguous(),
        lambda x: x.view(4, 768),
        lambda x: x.view(24, 128),
        lambda x: x[::2],
        lambda x: x.flatten()[128 : 128 + 256].view(1, 256),
    ],
)
def test_void_where_it_would_be_wrong(change: Callable[[Tensor], Tensor]) -> None:
    """After a write, for a copy, another shape, other columns, or rows that do not begin where rows begin."""
    x = randn(12, 256)
    carry(x, quantize_rows(x, FMT))
    assert carried(change(x), FMT) is None


def test_of_one_format() -> None:
    """Another format does not find it; formats whose scales depend on other rows are never carried."""
    x, weight = randn(12, 256), randn(256)
    carry(x, quantize_rows(x, FMT))
    assert carried(x, POW2) is None
    for fmt in (Fp8Format("tensor"), Fp8Format("channel")):
        assert carried(ops.rmsnorm(x, weight, 1e-6, fmt), fmt) is None
        assert carried(ops.add_rmsnorm(x, x, weight, 1e-6, fmt)[0], fmt) is None
        assert carried(ops.swiglu(x, fmt), fmt) is None


@pytest.mark.parametrize("fmt", [FMT, POW2])
@pytest.mark.parametrize("grad", [False, True])
def test_linears_use_it(fmt: Fp8Format, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm -> linear -> SwiGLU -> linear, also per expert: a quantizer less each, the same bits and gradients."""
    weights = [randn(512, 256) * 0.05, randn(256, 256) * 0.05]
    fp8 = [Fp8Weight.of(quantize_weight(w, fmt), whole(len(w))) for w in weights]
    seen: list[bool] = []
    fprop = active().fprop

    def watch(x: Tensor, w: Any, segments: int, dtype: torch.dtype, quantized: Fp8Tensor | None = None) -> Any:
        seen.append(quantized is not None)
        return fprop(x, w, segments, dtype, quantized)

    monkeypatch.setattr(active(), "fprop", watch)

    def run(carried_format: Fp8Format | None) -> list[Tensor]:
        x, norm = randn(6, 1, 256).requires_grad_(grad), (1 + randn(256) * 0.1).requires_grad_(grad)
        masters = [w.clone().requires_grad_(grad) for w in weights]
        y = ops.rmsnorm(x, norm, 1e-6, carried_format)
        y = ops.fp8_linear(y, masters[0], fp8[0], Fp8Recipe(fmt))
        y = ops.swiglu(y, carried_format).view(6, 256)
        y = ops.fp8_grouped_linear(y, [2, 0, 4], [masters[1]] * 3, [fp8[1]] * 3, Fp8Recipe(fmt))
        if grad:
            y.backward(randn(6, 256))  # type: ignore[no-untyped-call]
        return [y.detach(), *(t.grad for t in (x, norm, *masters) if t.grad is not None)]

    with_carried = run(fmt)
    assert seen == [True] * 4
    seen.clear()
    without = run(None)
    assert seen == [False] * 4
    assert len(with_carried) == (5 if grad else 1)
    assert all(torch.equal(a, b) for a, b in zip(with_carried, without, strict=True))


def test_only_where_it_serves() -> None:
    """Megatron's operators leave it for FP8 linears, where it does not outlive them."""
    assert LinearPrecision(True, Fp8Recipe(POW2)).carried_format == POW2
    assert LinearPrecision(False, Fp8Recipe(FMT)).carried_format is None
    assert LinearPrecision(True, Fp8Recipe(FMT, saved_activation="bf16")).carried_format is None
