"""Operators of a mixture of experts: ties, order, independence of the batch, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import E4M3, Fp8Experts, Fp8Format, Fp8Recipe, Fp8Tensor, Fp8Weight, quantize_weight, whole
from tests.support.oracles import rel_error

T, H, E, K = 2000, 256, 8, 4


def gauss(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def chosen(seed: int, experts: int = E, top_k: int = K) -> Tensor:
    """Distinct expert ids [T, k] in random order."""
    return gauss((T, experts), seed).argsort(-1)[:, :top_k]


# ------------------------------------------------------------------------------------------------ router
def test_router_logits_are_rounded_once() -> None:
    """fp32 logits within half an fp32 ulp of fp64, plus the 20-bit grids of the bf16 rows; never rounded to bf16."""
    x, w = gauss((T, H), 0).bfloat16(), gauss((E, H), 1, 0.08).bfloat16()
    logits = ops.router(x, w, ops.ExactWeight.of(w))
    exact = x.double() @ w.double().t()
    assert logits.dtype == torch.float32
    assert rel_error(logits, exact) < 2e-6
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_is_softmax_top_k(renormalize: bool) -> None:
    """Ids in descending logit; weights within 1e-6 of fp64 softmax over the chosen or over all experts."""
    logits = gauss((T, E), 2, 3.0)
    experts, weights = ops.route(logits, K, renormalize)
    top, expected = logits.double().topk(K)
    assert torch.equal(experts, expected)
    probabilities = torch.softmax(logits.double(), -1).gather(1, experts)
    exact = torch.softmax(top, -1) if renormalize else probabilities
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0)


def test_ties_go_to_the_lower_expert() -> None:
    """Equal logits, zeros of either sign included, are taken in ascending expert id, wherever the row is."""
    row = torch.tensor([1.0, 3.0, -0.0, 3.0, 0.0, 3.0, 1.0, 0.0])
    experts, weights = ops.route(row.repeat(50, 1), 6, True)
    assert experts.tolist() == [[1, 3, 5, 0, 6, 2]] * 50
    assert bool((weights == weights[0]).all())
    assert ops.route(torch.zeros(3, 64), 4, True)[0].tolist() == [[0, 1, 2, 3]] * 3


def test_near_ties_are_decided_by_the_fp32_logits() -> None:
    """Logits one fp32 ulp apart, whose exponentials are equal, are ordered by the logit and not by the id."""
    low = torch.tensor(-0.01)
    row = torch.stack([low, torch.nextafter(low, torch.tensor(0.0)), torch.tensor(0.0)])[None]
    experts, weights = ops.route(row, 3, True)
    assert experts.tolist() == [[2, 1, 0]]
    assert weights[0, 1] == weights[0, 2]


def test_routing_is_independent_of_the_batch() -> None:
    """A token has the same logits, experts and weights alone and among others."""
    x, w = gauss((300, H), 3).bfloat16(), gauss((E, H), 4, 0.08).bfloat16()
    prepared = ops.ExactWeight.of(w)
    logits = ops.router(x, w, prepared)
    experts, weights = ops.route(logits, K, True)
    for first, count in ((0, 1), (5, 3), (100, 17), (7, 200)):
        part = ops.router(x[first : first + count], w, prepared)
        some, theirs = ops.route(part, K, True)
        assert torch.equal(part, logits[first : first + count])
        assert torch.equal(some, experts[first : first + count])
        assert torch.equal(theirs, weights[first : first + count])


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_gradients(renormalize: bool) -> None:
    """Gradients of weights with respect to x and the router within 1 % (bf16 edges) of fp64 autograd."""
    x, w = gauss((64, H), 5).bfloat16().requires_grad_(), gauss((E, H), 6, 0.08).bfloat16().requires_grad_()
    experts, weights = ops.route(ops.router(x, w, ops.ExactWeight.of(w)), K, renormalize)
    target = gauss((64, K), 7)
    (weights * target).sum().backward()
    wide_x, wide_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    logits = wide_x @ wide_w.t()
    exact = logits.gather(1, experts).softmax(-1) if renormalize else logits.softmax(-1).gather(1, experts)
    (exact * target.double()).sum().backward()
    for ours, reference in ((x, wide_x), (w, wide_w)):
        assert ours.grad is not None
        assert reference.grad is not None
        assert rel_error(ours.grad, reference.grad) < 0.01


# ------------------------------------------------------------------------------------------------ combine
def combined(outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Oracle: for every token, fp32 products added in ascending expert id, rounded once to bf16."""
    rows = []
    for y, w, ids in zip(outputs, weights, experts.tolist(), strict=True):
        slots = sorted(range(len(ids)), key=lambda j: ids[j])
        total = y[slots[0]].float() * w[slots[0]]
        for j in slots[1:]:
            total = total + y[j].float() * w[j]
        rows.append(total.bfloat16())
    return torch.stack(rows)


def test_combine_is_in_ascending_expert_id() -> None:
    """Equal to the oracle bit for bit, for slots in any order; the reverse order and a stock sum differ somewhere."""
    outputs, weights, experts = gauss((T, K, H), 0).bfloat16(), torch.rand(T, K) / K, chosen(1)
    y = ops.moe_combine(outputs, weights, experts)
    assert torch.equal(y, combined(outputs, weights, experts))
    order = gauss((T, K), 2).argsort(-1)
    shuffled = outputs.gather(1, order.unsqueeze(-1).expand_as(outputs))
    assert torch.equal(y, ops.moe_combine(shuffled, weights.gather(1, order), experts.gather(1, order)))
    assert not torch.equal(y, combined(outputs, weights, E - experts))
    assert not torch.equal(y, torch.einsum("tkh,tk->th", outputs.float(), weights).bfloat16())


def test_two_experts_cannot_show_the_order() -> None:
    """Addition commutes: with top-2 the reversed combine has the same bits, hence the tests' top-4."""
    outputs, weights, experts = gauss((T, 2, H), 3).bfloat16(), torch.rand(T, 2), chosen(4, top_k=2)
    assert torch.equal(ops.moe_combine(outputs, weights, experts), combined(outputs, weights, E - experts))


def test_combine_gradients() -> None:
    """Gradients of outputs and weights within bf16 rounding of fp64 autograd, in the caller's slot order."""
    outputs, experts = gauss((64, K, H), 5).bfloat16().requires_grad_(), chosen(6)[:64]
    weights, target = torch.rand(64, K).requires_grad_(), gauss((64, H), 7).bfloat16()
    (ops.moe_combine(outputs, weights, experts) * target).sum().backward()
    assert outputs.grad is not None
    assert weights.grad is not None
    exact = weights.detach().double().unsqueeze(-1) * target.double().unsqueeze(1)
    assert rel_error(outputs.grad, exact) < 0.004
    assert rel_error(weights.grad, (outputs.detach().double() * target.double().unsqueeze(1)).sum(-1)) < 1e-6


# ------------------------------------------------------------------------------------------------ grouped linears
OFFSETS = torch.tensor([0, 5, 5, 135, 136])


@pytest.mark.parametrize("fp8", [True, False])
def test_grouped_linear_is_one_linear_per_expert(fp8: bool) -> None:
    """Values and gradients of the grouped form are bitwise those of one linear after the other; empty groups too. So
    are the values of an engine's form, where rows of no expert give zeros."""
    num_rows, recipe = [5, 0, 130, 1], Fp8Recipe()
    x = gauss((sum(num_rows), H), 8).bfloat16()
    masters = [gauss((384, H), 10 + i, 0.05).bfloat16() for i in range(len(num_rows))]
    dy = gauss((sum(num_rows), 384), 9).bfloat16()
    if fp8:
        quantized = [Fp8Weight.of(quantize_weight(w, Fp8Format()), whole(384)) for w in masters]
    else:
        exact = [ops.ExactWeight.of(w) for w in masters]

    def run(grouped: bool) -> list[Tensor]:
        rows, leaves = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in masters]
        if grouped and fp8:
            y = ops.fp8_grouped_linear(rows, num_rows, leaves, quantized, recipe, 2)
        elif grouped:
            y = ops.grouped_linear(rows, num_rows, leaves, exact)
        elif fp8:
            parts = zip(rows.split(num_rows), leaves, quantized, strict=True)
            y = torch.cat([ops.fp8_linear(*part, recipe, 2) for part in parts])
        else:
            y = torch.cat([ops.linear(*part) for part in zip(rows.split(num_rows), leaves, exact, strict=True)])
        y.backward(dy)
        grads = [leaf.grad for leaf in (rows, *leaves)]
        return [y.detach(), *(g for g in grads if g is not None)]

    grouped, single = run(True), run(False)
    if fp8:
        codes = torch.stack([w.quantized.data.view(torch.uint8) for w in quantized]).view(E4M3)
        scale = torch.stack([w.quantized.scale for w in quantized])
        experts = Fp8Experts(Fp8Tensor(codes, scale, Fp8Format()), whole(384))
        routed = ops.fp8_routed_linear(torch.cat([x, x[:2]]), OFFSETS, experts, 2)
    else:
        routed = ops.routed_linear(
            torch.cat([x, x[:2]]), OFFSETS, torch.stack(masters), ops.ExactExperts.of(torch.stack(masters))
        )
    assert torch.equal(routed, torch.cat([single[0], torch.zeros(2, 384).bfloat16()]))
    assert len(grouped) == len(single) == 2 + len(masters)
    assert all(torch.equal(a, b) for a, b in zip(grouped, single, strict=True))
