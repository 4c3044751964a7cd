"""Every operator against fp64 mathematics, and exactly independent of its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Weight, quantize_weight, whole
from jetrl_megatron.ops.kernels import kernels
from tests.support.oracles import rel_error, spread, ulp_bf16

H, V = 576, 1000


def gauss(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def assert_rounded(actual: Tensor, exact: Tensor, slack: float) -> None:
    """bf16 `actual` is within half a bf16 ulp plus `slack` (relative: the fp32 work before the one rounding) of
    fp64."""
    assert actual.dtype == torch.bfloat16
    expected = exact.numpy()
    error = np.abs(actual.double().numpy() - expected)
    allowed = ulp_bf16(expected) / 2 + slack * np.abs(expected) + 1e-38
    assert (error <= allowed).all(), float((error / allowed).max())


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------ against fp64
@pytest.mark.parametrize("size", [H, 128, 100])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rmsnorm(size: int, eps: float) -> None:
    """Half a bf16 ulp plus 1e-6 relative of fp64 RMSNorm, from magnitudes where eps dominates to 1e4."""
    x, w = spread((40, size), 0, 1.0), gauss((size,), 1) + 1
    x = (x * torch.tensor([1e-4, 1e-2, 1.0, 1e4]).repeat(10)[:, None]).bfloat16()
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w.double()
    assert_rounded(ops.rmsnorm(x, w, eps), exact, 1e-6)


def test_residual_is_rounded_before_the_norm() -> None:
    """add_rmsnorm: the residual is one bf16 add, and the norm reads the rounded sum."""
    x, residual, w = gauss((9, H), 0), gauss((9, H), 1, 50.0), gauss((H,), 2)
    normed, total = ops.add_rmsnorm(x, residual, w, 1e-6)
    expected = (x.double() + residual.double()).bfloat16()
    assert torch.equal(total, expected)
    assert torch.equal(normed, ops.rmsnorm(expected, w, 1e-6))


def test_swiglu() -> None:
    """Half a bf16 ulp plus 1e-6 relative of fp64 silu(gate) * up where -gate does not overflow exp; gates down to
    -80."""
    gate_up = spread((50, 2 * 300), 3, 1.0).clamp(-80, 80).bfloat16()
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded(ops.swiglu(gate_up), F.silu(gate) * up, 1e-6)


def test_embedding() -> None:
    """A row copy."""
    w, ids = gauss((V, 64), 4), torch.tensor([[0, V - 1], [5, 5]])
    assert torch.equal(ops.embedding(ids, w), torch.stack([torch.stack([w[i] for i in row]) for row in ids.tolist()]))


@pytest.mark.parametrize("k", [64, H, 9000])
def test_linear_and_lm_head(k: int) -> None:
    """Rows on 20-bit grids: within 2^-19 of |x|.|w| of the fp64 product (plus one rounding to fp32 for logits, to bf16
    for linears); K = 9000 is two chunks."""
    x, w = gauss((20, k), 5), gauss((33, k), 6, 0.02)
    exact = x.double() @ w.double().T
    top = (x.double().abs().amax(-1)[:, None] * w.double().abs().sum(-1)) + (
        x.double().abs().sum(-1)[:, None] * w.double().abs().amax(-1)
    )
    prepared = ops.ExactWeight.of(w)
    logits = ops.lm_head(x, w, prepared)
    assert logits.dtype == torch.float32
    assert ((logits.double() - exact).abs() <= 2.0**-20 * top + 2.0**-24 * exact.abs()).all()
    assert rel_error(logits, exact) < 1e-6
    assert torch.equal(ops.linear(x, w, prepared), logits.bfloat16())


def test_linear_is_exact_where_the_grid_is() -> None:
    """Values of few binades fit the grids: the result is the correctly rounded fp64 product, bit for bit."""
    generator = torch.Generator().manual_seed(7)
    x, w = (torch.randint(-255, 256, (n, H), generator=generator).bfloat16() for n in (12, 40))
    exact = x.double() @ w.double().T  # integers below 2^53
    assert torch.equal(ops.lm_head(x, w, ops.ExactWeight.of(w)), exact.float())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprob(temperature: float) -> None:
    """Within one fp32 ulp of the result plus 2e-7 of fp64 log_softmax(logits / temperature); 0 means untempered, and
    the temperature divides the logits, not the log-probs."""
    logits = spread((60, V), 8, 0.5) * 5
    targets = torch.randint(V, (60,), generator=torch.Generator().manual_seed(0))
    targets[0] = logits[0].argmax()
    tempered = logits / (temperature or 1.0)
    exact = torch.log_softmax(tempered.double(), -1)[torch.arange(60), targets]
    actual = ops.logprob(logits, targets, temperature)
    assert actual.dtype == torch.float32
    assert ((actual.double() - exact).abs() <= 2.0**-23 * exact.abs() + 2e-7).all()
    certain = torch.full((1, 8), -200.0)
    certain[0, 3] = 10.0
    assert ops.logprob(certain, torch.tensor([3]), 1.0).item() == 0.0


def test_logprob_reads_the_token_at_its_own_row() -> None:
    """Row i is asked for target i: distinct targets, distinct answers."""
    logits = gauss((V, V), 9).float()
    targets = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    exact = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(ops.logprob(logits, targets, 1.0).double(), exact[torch.arange(V), targets], atol=1e-5)


# ------------------------------------------------------------------------------------------------ batch invariance
def fp8_weight(n: int, k: int) -> tuple[Tensor, Fp8Weight]:
    w = gauss((n, k), 20, 0.05)
    return w, Fp8Weight.of(quantize_weight(w, Fp8Format()), whole(n))


def row_operators() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """name: (function of rows, 67 rows)."""
    x, w = gauss((67, H), 10), gauss((H,), 11)
    linear_w, (fp8_w, fp8) = gauss((130, H), 12, 0.05), fp8_weight(130, H)
    exact, table = ops.ExactWeight.of(linear_w), ops.RopeTable(1e4, 64, 4096)
    heads = gauss((67, 5 * 64 + 1), 13)
    heads[:, -1] = torch.arange(67) * 3  # the position travels with the row
    logits = torch.cat([gauss((67, V), 14).float() * 4, torch.arange(67.0)[:, None]], 1)  # the target too

    def rope(rows: Tensor) -> Tensor:
        return ops.rope(rows[:, :-1].reshape(-1, 5, 64), rows[:, -1].long(), table)

    return {
        "rmsnorm": (lambda rows: ops.rmsnorm(rows, w, 1e-6), x),
        "swiglu": (ops.swiglu, x),
        "linear": (lambda rows: ops.linear(rows, linear_w, exact), x),
        "lm_head": (lambda rows: ops.lm_head(rows, linear_w, exact), x),
        "fp8_linear": (lambda rows: ops.fp8_linear(rows, fp8_w, fp8, Fp8Recipe()), x),
        "rope": (rope, heads),
        "logprob": (lambda rows: ops.logprob(rows[:, :-1].contiguous(), rows[:, -1].long(), 0.7), logits),
    }


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", list(row_operators()))
def test_rows_do_not_depend_on_the_batch(name: str, num_threads: int, restore_threads: None) -> None:
    """Each row of an operator's result has the same bits alone, in any prefix, in any order, beside padding rows."""
    function, rows = row_operators()[name]
    torch.set_num_threads(1)
    full = function(rows)
    torch.set_num_threads(num_threads)
    for m in (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 66):
        assert torch.equal(function(rows[:m]), full[:m]), m
        assert torch.equal(function(rows[-m:]), full[-m:]), m
    order = torch.randperm(67, generator=torch.Generator().manual_seed(0))
    assert torch.equal(function(rows[order]), full[order])
    padded = torch.cat([torch.zeros_like(rows[:3]), rows[20:30], torch.zeros_like(rows[:6])])
    assert torch.equal(function(padded)[3:13], full[20:30])


def test_leading_dimensions_are_rows() -> None:
    """[B, S, K] gives the bits of [B*S, K]."""
    x, (w, fp8) = gauss((4, 6, H), 15), fp8_weight(64, H)
    exact = ops.ExactWeight.of(w)
    flat = x.view(24, H)
    assert torch.equal(ops.linear(x, w, exact).view(24, -1), ops.linear(flat, w, exact))
    y = ops.fp8_linear(x, w, fp8, Fp8Recipe())
    assert torch.equal(y.view(24, -1), ops.fp8_linear(flat, w, fp8, Fp8Recipe()))


@pytest.mark.parametrize("tp", [2, 4])
def test_row_parallel_bf16_linear_equals_the_whole_one(tp: int) -> None:
    """K split over ranks, with row maxima and exact fp64 sums shared: the bits of the unsplit linear, in any order of
    the sum."""
    x, w = spread((11, 512), 16).bfloat16(), spread((40, 512), 17).bfloat16()
    expected = ops.linear(x, w, ops.ExactWeight.of(w))
    xs, ws = x.chunk(tp, 1), w.chunk(tp, 1)

    def x_max(_local: Tensor) -> Tensor:
        return x.double().abs().amax(-1, keepdim=True)

    def w_max(_local: Tensor) -> Tensor:
        return w.double().abs().amax(-1, keepdim=True)

    weights = [ops.ExactWeight.of(part, w_max) for part in ws]
    partials = [kernels().linear_partial(a, b.prepared, x_max(a)) for a, b in zip(xs, weights, strict=True)]

    def total(local: Tensor) -> Tensor:
        return local + sum(p for p in reversed(partials[1:]))

    assert torch.equal(ops.row_parallel_linear(xs[0], ws[0], weights[0], x_max, total), expected)


# ------------------------------------------------------------------------------------------------ gradients
def test_gradients() -> None:
    """Backward of each operator against fp64 autograd of its formula: relative error below 1 % (gradients are bf16)."""
    w, gate_up, x = gauss((H,), 18) + 1, gauss((30, 2 * 64), 19), gauss((30, H), 20)
    linear_w = gauss((50, H), 21, 0.05)
    exact = ops.ExactWeight.of(linear_w)
    targets = torch.arange(30)

    def norm64(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w

    def swiglu64(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    def logprob64(x: Tensor, w: Tensor) -> Tensor:
        return torch.log_softmax(x @ w.T / 0.7, -1)[torch.arange(30), targets]

    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda x, w: ops.rmsnorm(x, w, 1e-6), norm64, (x, w)),
        (ops.swiglu, swiglu64, (gate_up,)),
        (lambda x, w: ops.linear(x, w, exact), lambda x, w: x @ w.T, (x, linear_w)),
        (lambda x, w: ops.logprob(ops.lm_head(x, w, exact), targets, 0.7), logprob64, (x, linear_w)),
    ]
    for ours, oracle, inputs in cases:
        narrow = [t.clone().requires_grad_() for t in inputs]
        wide = [t.double().requires_grad_() for t in inputs]
        y = ours(*narrow)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        y.backward(dy.to(y.dtype))
        oracle(*wide).backward(dy.to(y.dtype).double())
        for a, b in zip(narrow, wide, strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert rel_error(a.grad, b.grad) < 0.01
            assert math.isfinite(float(a.grad.sum()))


def test_stock_operators_depend_on_the_batch() -> None:
    """Negative control for the whole design: some stock bf16/fp32 linear of this CPU changes bits with the batch, or
    the check above would be met by anything. Skipped where this machine's BLAS happens to be invariant."""
    x, w = gauss((67, H), 10), gauss((130, H), 12, 0.05)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = x.to(dtype), w.to(dtype)
        full = F.linear(a, b)
        if any(not torch.equal(F.linear(a[:m], b), full[:m]) for m in (1, 2, 3, 5, 7, 9, 33)):
            return
    pytest.skip("stock linears are batch-invariant here")
