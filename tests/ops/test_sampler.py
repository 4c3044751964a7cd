"""The sampler: right distribution, right support, and a draw that does not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl_megatron import ops

OFF = 1 << 30


def draw(logits: Tensor, uniforms: Tensor, top_p: float = 1.0, top_k: int = OFF) -> Tensor:
    n = len(uniforms)
    return ops.sample(logits.expand(n, -1), uniforms, torch.full((n,), top_p), torch.full((n,), top_k))


def regular(n: int) -> Tensor:
    """n equally spaced uniforms, 0 and the largest double below 1 included."""
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    u[0], u[-1] = 0.0, 1 - 2.0**-53
    return u


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, OFF), (0.9, OFF), (1.0, 5), (0.8, 6)])
def test_distribution(top_p: float, top_k: int) -> None:
    """Chi-square of 200,000 random draws over a vocabulary of 12 against fp64 probabilities, renormalised over the
    kept tokens; the 99.9 % quantile of 11 degrees of freedom is 31.3."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    uniforms = torch.rand(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = support_by_hand(logits, top_p, top_k)
    p = torch.softmax(logits.double(), -1) * kept
    expected = p / p.sum() * len(uniforms)
    counts = torch.bincount(draw(logits, uniforms, top_p, top_k), minlength=12).double()
    assert not counts[~kept].any()
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 31.3


def support_by_hand(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Tokens kept: the k largest, then the fewest of them whose share of that mass reaches top_p."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[:top_k]
    p = torch.softmax(logits.double()[ranked], -1).tolist()
    kept, mass = torch.zeros(len(logits), dtype=torch.bool), 0.0
    for token, share in zip(ranked, p, strict=True):
        if mass >= top_p:
            break
        kept[token] = True
        mass += share
    return kept


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, OFF), (0.5, OFF), (0.95, OFF), (1.0, 1), (1.0, 3), (0.7, 4), (1e-9, OFF)]
)
def test_support(top_p: float, top_k: int) -> None:
    """Over a regular sweep of uniforms exactly the tokens kept by the definition are drawn, each in proportion."""
    for seed in range(5):
        logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
        kept = support_by_hand(logits, top_p, top_k)
        counts = torch.bincount(draw(logits, regular(50_000), top_p, top_k), minlength=40)
        p = torch.softmax(logits.double(), -1) * kept
        assert ((counts - p / p.sum() * 50_000).abs() <= 2).all()
        if top_k == 1:
            assert counts.argmax() == logits.argmax()


def test_ties_go_to_the_lower_id() -> None:
    """Equal logits: top-k keeps the lower ids."""
    assert draw(torch.zeros(6), regular(100), 1.0, 2).unique().tolist() == [0, 1]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """Every request draws the same token alone and in a batch whose other requests use other top-p and top-k; a batch
    neighbour that samples greedily (top_k 1) changes nothing."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, 500, generator=generator) * 3
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5]).repeat(16)
    top_k = torch.tensor([OFF, OFF, 1, 20]).repeat(16)
    together = ops.sample(logits, uniforms, top_p, top_k)
    alone = torch.cat(
        [ops.sample(logits[i : i + 1], uniforms[i : i + 1], top_p[i : i + 1], top_k[i : i + 1]) for i in range(64)]
    )
    assert torch.equal(together, alone)
    plain = top_k == OFF
    assert torch.equal(ops.sample(logits[plain], uniforms[plain], top_p[plain], top_k[plain]), together[plain])


def test_hopeless_tokens_are_never_drawn() -> None:
    """A token below 2^-31 of the top one has weight 0, at both ends of the uniform range."""
    logits = torch.tensor([-30.0, 0.0, 0.0, -30.0])
    assert set(draw(logits, regular(10_000)).tolist()) == {1, 2}
