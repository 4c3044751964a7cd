"""FProp, DGrad and WGrad of the FP8 linear."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Weight, GridSlice, fp8_linear, quantize_weight, whole
from jetrl_megatron.fp8.format import Granularity
from jetrl_megatron.fp8.gemm import PreparedWeight, prepare_transposed
from jetrl_megatron.weights.plan import ConversionPlan
from jetrl_megatron.weights.rules import Rule
from tests.support.models import DEFAULT_DIMS
from tests.support.oracles import fake_quantize, rel_error, spread

T, K, N = 150, 384, 264  # ragged in tokens and outputs

# Relative Frobenius error against fp64 on gaussian data. One E4M3 operand contributes about .026; independent errors
# add in squares: two operands .037, three (WGrad requantizes the rowwise activation) .046; pow2 scales alike. Measured
# values are within 4 % of these.
ONE, TWO, THREE = 0.028, 0.040, 0.049
BF16 = 0.003


def problem(seed: int = 0, t: int = T, k: int = K, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K], w [N, K], dy [T, N] in bf16, gaussian."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((t, k, 1.0), (n, k, 0.05), (t, n, 1e-3))
    x, w, dy = (torch.randn(a, b, generator=generator).mul(s).bfloat16() for a, b, s in shapes)
    return x, w, dy


def run(x: Tensor, w: Tensor, dy: Tensor, recipe: Fp8Recipe, slices: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """(y fp32, dx bf16, dw fp32) through main_grad, as Megatron runs it."""
    slices = whole(len(w)) if slices is None else slices
    weight = Fp8Weight.of(quantize_weight(w, recipe.format, slices), slices)
    x, master = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
    master.main_grad = torch.zeros(w.shape, dtype=torch.float32)  # type: ignore[attr-defined]
    y = fp8_linear(x, master, weight, recipe)
    y.to(x.dtype).backward(dy)
    assert x.grad is not None
    assert master.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert master.grad is None or not master.grad.any()
    return y.detach(), x.grad, master.main_grad  # type: ignore[attr-defined]


SAVED = ("rowwise", "columnwise", "bf16")
RECIPES = [
    Fp8Recipe(Fp8Format("block", scale), dgrad, wgrad, saved)
    for scale, dgrad, wgrad, saved in itertools.product(("fp32", "pow2"), ("fp8", "bf16"), ("fp8", "bf16"), SAVED)
]


def wgrad_bound(recipe: Fp8Recipe) -> float:
    if recipe.wgrad == "bf16":
        return BF16 if recipe.saved_activation == "bf16" else ONE
    return THREE if recipe.saved_activation == "rowwise" else TWO


@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda r: f"{r.format.scale_format}-{r.dgrad}-{r.wgrad}-{r.saved_activation}"
)
def test_error_of_every_recipe(recipe: Fp8Recipe) -> None:
    """Against fp64 math on the unquantized values each GEMM's relative error is that of its number of FP8 operands, and
    an FP8 GEMM is not secretly a BF16 one."""
    x, w, dy = problem()
    y, dx, dw = run(x, w, dy, recipe)
    x64, w64, dy64 = (t.double() for t in (x, w, dy))
    assert dw.dtype == torch.float32
    assert 0.8 * ONE < rel_error(y, x64 @ w64.T) < TWO
    dgrad, wgrad = rel_error(dx, dy64 @ w64), rel_error(dw, dy64.T @ x64)
    assert dgrad < (TWO if recipe.dgrad == "fp8" else BF16)
    assert wgrad < wgrad_bound(recipe)
    assert recipe.dgrad == "bf16" or dgrad > 0.8 * ONE
    assert recipe.wgrad == "bf16" or wgrad > 0.8 * ONE


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_error_of_other_granularities(granularity: str) -> None:
    """Per-channel and per-tensor scales obey the same bounds on gaussian data (DGrad requantizes the weight: three)."""
    x, w, dy = problem(1)
    y, dx, dw = run(x, w, dy, Fp8Recipe(Fp8Format(granularity)))
    assert rel_error(y, x.double() @ w.double().T) < TWO
    assert rel_error(dx, dy.double() @ w.double()) < THREE
    assert rel_error(dw, dy.double().T @ x.double()) < THREE


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("saved", SAVED)
def test_groups_lie_on_the_contracted_axis(saved: str, scale_format: str) -> None:
    """Up to fp32 accumulation (2e-6; dX 2^-8, rounded to bf16) the GEMMs are fp64 products of the oracle's quantized
    operands: X 1x128 along K with W 128x128; dY along N with W's own bytes; dY^T and X^T along tokens."""
    x, w, dy = problem(2)
    y, dx, dw = run(x, w, dy, Fp8Recipe(Fp8Format("block", scale_format), saved_activation=saved))
    x32, w32, dy32 = (t.float().numpy() for t in (x, w, dy))
    xq, wq = fake_quantize(x32, 1, scale_format), fake_quantize(w32, 128, scale_format)
    assert rel_error(y, xq @ wq.T) < 2e-6
    assert rel_error(dx, fake_quantize(dy32, 1, scale_format) @ wq) < 2.0**-8
    kept = torch.from_numpy(xq.astype(np.float32)).bfloat16().float().numpy() if saved == "rowwise" else x32
    xq_t, dyq_t = (fake_quantize(np.ascontiguousarray(v.T), 1, scale_format) for v in (kept, dy32))
    assert rel_error(dw, dyq_t @ xq_t.T) < 2e-6


def test_main_grad_is_an_fp32_sum_over_micro_batches() -> None:
    """Three micro-batches accumulate in fp32, in order, bitwise the sum of their separate gradients; without a
    main_grad the weight gets the same gradient as p.grad in its own dtype."""
    recipe = Fp8Recipe()
    _, w, _ = problem(3)
    parts = [(x, dy) for x, _, dy in (problem(s, t=t) for s, t in ((4, 40), (5, 128), (6, 1)))]
    separate = [run(x, w, dy, recipe)[2] for x, dy in parts]
    master = torch.nn.Parameter(w.clone())
    master.main_grad = torch.zeros(w.shape)  # type: ignore[attr-defined]
    weight = Fp8Weight.of(quantize_weight(w, recipe.format), whole(N))
    for x, dy in parts:
        fp8_linear(x, master, weight, recipe).to(x.dtype).backward(dy)
    assert torch.equal(master.main_grad, (separate[0] + separate[1]) + separate[2])  # type: ignore[attr-defined]

    plain = torch.nn.Parameter(w.clone())
    fp8_linear(parts[0][0], plain, weight, recipe).to(w.dtype).backward(parts[0][1])
    assert plain.grad is not None
    assert plain.grad.dtype == torch.bfloat16
    assert torch.equal(plain.grad, separate[0].bfloat16())


def test_tiny_gradients_are_not_flushed() -> None:
    """dY scaled by 1, 1e-4, 1e-7, 1e-20: the relative errors of DGrad and WGrad stay the same within 2 %."""
    x, w, dy = problem(7)
    errors = []
    for factor in (1.0, 1e-4, 1e-7, 1e-20):
        small = (dy.float() * factor).bfloat16()
        _, dx, dw = run(x, w, small, Fp8Recipe())
        errors.append([rel_error(dx, small.double() @ w.double()), rel_error(dw, small.double().T @ x.double())])
    for other in errors[1:]:
        assert other == pytest.approx(errors[0], rel=0.02)


def test_forward_is_the_same_with_and_without_gradients() -> None:
    """Training and no-grad forward give the same bits, alone or in a batch."""
    x, w, _ = problem(8)
    recipe = Fp8Recipe()
    weight = Fp8Weight.of(quantize_weight(w, recipe.format), whole(N))
    with torch.no_grad():
        expected = fp8_linear(x, w, weight, recipe)
    trained = fp8_linear(x.clone().requires_grad_(), torch.nn.Parameter(w.clone()), weight, recipe)
    assert torch.equal(trained.detach(), expected)
    assert torch.equal(fp8_linear(x[7:8], w, weight, recipe), expected[7:8])


# ------------------------------------------------------------------------------------------------ fused and cut weights
def qkv_rule(head_dim: int) -> Rule:
    dims = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": head_dim, "num_hidden_layers": 1}
    plan = ConversionPlan(ModelDims.from_hf({**DEFAULT_DIMS, **dims, "model_type": "llama"}))
    return plan.rule_for("decoder.layers.0.self_attention.linear_qkv.weight")


def fused(head_dim: int, tp: int, rank: int) -> tuple[Rule, list[Tensor], Tensor, list[GridSlice]]:
    """(rule, q/k/v tensors of very different magnitude, local fused weight, slices)."""
    rule = qkv_rule(head_dim)
    parts = [(spread(hf.shape, i, 1.0) * 0.03 * 8.0**i).bfloat16() for i, hf in enumerate(rule.hf)]
    slices = [GridSlice(s.local_rows, s.hf_start, s.hf_rows) for s in rule.local_segments(tp, rank)]
    return rule, parts, rule.to_megatron_shard(parts, tp, rank), slices


def unfold(prepared: PreparedWeight) -> Tensor:
    """Values of a transposed weight in the order of the local rows: [N, K] fp64."""
    values = prepared.wide * prepared.scale.double().unsqueeze(1)
    flat = values.reshape(-1, values.shape[-1])
    if prepared.order is None:
        return flat[: prepared.num_columns]
    out = torch.full((int((prepared.order >= 0).sum()), flat.shape[1]), float("nan"), dtype=torch.float64)
    used = prepared.order >= 0
    assert not flat[~used].any()
    out[prepared.order[used]] = flat[used]
    return out


@pytest.mark.parametrize(("head_dim", "tp", "rank"), [(128, 1, 0), (64, 1, 0), (64, 4, 3), (40, 2, 1)])
def test_the_transposed_weight_is_the_same_bytes(head_dim: int, tp: int, rank: int) -> None:
    """DGrad's W^T has exactly W's dequantized values, also for fused qkv and shards that cut blocks; one scale per slot
    group of 128."""
    _, _, w, slices = fused(head_dim, tp, rank)
    quantized = quantize_weight(w, Fp8Format(), slices)
    exact = quantized.data.double() * quantized.scale.double().repeat_interleave(128, 1)[:, : w.shape[1]]
    assert torch.equal(unfold(prepare_transposed(quantized, slices)), exact)


@pytest.mark.parametrize("head_dim", [128, 64, 40])
def test_fused_qkv_is_its_three_parts(head_dim: int) -> None:
    """FProp through the fused qkv weight gives, row for row, the bits of three separate q, k and v linears."""
    _, parts, w, slices = fused(head_dim, 1, 0)
    x, recipe = spread((9, w.shape[1]), 9, 1.0).bfloat16(), Fp8Recipe()
    y = fp8_linear(x, w, Fp8Weight.of(quantize_weight(w, recipe.format, slices), slices), recipe)
    for part, piece in zip(parts, slices, strict=True):
        alone = fp8_linear(x, part, Fp8Weight.of(quantize_weight(part, recipe.format), whole(len(part))), recipe)
        assert torch.equal(y[:, piece.rows], alone)


@pytest.mark.parametrize(("head_dim", "tp", "rank"), [(64, 1, 0), (64, 4, 1), (40, 2, 1)])
def test_dgrad_of_fused_qkv(head_dim: int, tp: int, rank: int) -> None:
    """dY's 1x128 groups of DGrad are the blocks of each Hugging Face tensor: fp64 oracle built part by part, block by
    block; agrees to 2^-8 (dX is rounded to bf16)."""
    _, _, w, slices = fused(head_dim, tp, rank)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(20, len(w), generator=generator).bfloat16()
    dy[:, slices[1].rows] *= 100  # a group that straddles q and k would lose q
    _, dx, _ = run(spread((20, w.shape[1]), 2, 1.0).bfloat16(), w, dy, Fp8Recipe(), slices)
    quantized = quantize_weight(w, Fp8Format(), slices).dequantize(torch.float64)
    expected = torch.zeros(20, w.shape[1], dtype=torch.float64)
    for piece in slices:
        blocks = torch.arange(piece.start, piece.start + len(piece.rows)) // 128
        for block in blocks.unique():
            rows = piece.rows[blocks == block]
            group = torch.from_numpy(fake_quantize(dy[:, rows].float().numpy()))
            expected += group @ quantized[rows]
    assert rel_error(dx, expected) < 2.0**-8


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_an_expert_without_tokens(granularity: Granularity) -> None:
    """No rows: an empty result, and gradients of zeros, in every granularity."""
    fmt = Fp8Format(granularity)
    master = torch.randn(256, 384).bfloat16().requires_grad_()
    weight = Fp8Weight.of(quantize_weight(master, fmt), whole(256))
    x = torch.empty(0, 384, dtype=torch.bfloat16, requires_grad=True)
    y = fp8_linear(x, master, weight, Fp8Recipe(fmt))
    y.sum().backward()
    assert y.shape == (0, 256)
    assert x.grad is not None
    assert x.grad.shape == (0, 384)
    assert master.grad is not None
    assert not master.grad.any()
