"""Mismatch statistics: closed forms, merging, and that nothing non-finite passes as equal."""

from __future__ import annotations

import math

import pytest
import torch

from jetrl_megatron.rl.mismatch import MismatchError, MismatchStats, require_exact


def measured(train: list[float], rollout: list[float], seq_ids: list[int] | None = None) -> MismatchStats:
    stats = MismatchStats()
    ids = None if seq_ids is None else torch.tensor(seq_ids)
    stats.update(torch.tensor(train), torch.tensor(rollout), None, ids)
    return stats


def test_closed_forms() -> None:
    """d = +1/2, -1/4, 0 over sequences (0, 0, 1): all exact in binary."""
    got = measured([-0.5, -1.25, -3.0], [-1.0, -1.0, -3.0], [0, 0, 1]).metrics()
    k3 = (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 3
    ratios = [math.exp(0.25), 1.0]
    assert got == pytest.approx(
        {
            "max_abs_dlogp": 0.5,
            "mean_abs_dlogp": 0.25,
            "max_abs_dprob": math.exp(-0.5) - math.exp(-1.0),
            "kl_k1": -0.25 / 3,
            "kl_k3": k3,
            "token_mult_prob_error": (math.exp(0.5) + math.exp(0.25) + 1) / 3,
            "max_abs_seq_dlogp": 0.25,
            "seq_ess": sum(ratios) ** 2 / (2 * sum(r * r for r in ratios)),
            "num_tokens": 3,
            "num_nonzero": 2,
            "num_nonfinite": 0,
        },
        rel=1e-12,
    )


def test_equal_is_exactly_zero_and_passes() -> None:
    """Equal tensors give 0.0 everywhere, multiplicative error 1, and require_exact passes."""
    values = [-0.1, -33.3, -1e-38, 0.0]
    stats = measured(values, values)
    require_exact(stats)
    metrics = stats.metrics()
    assert metrics["max_abs_dlogp"] == metrics["kl_k3"] == 0.0
    assert metrics["token_mult_prob_error"] == 1.0


def test_one_ulp_is_seen() -> None:
    """One unit in the last place of one token of a thousand fails, and the error names maximum and count."""
    train = torch.full((1000,), -1.0)
    rollout = train.clone()
    rollout[500] = torch.nextafter(rollout[500], torch.tensor(0.0))
    stats = MismatchStats()
    stats.update(train, rollout)
    assert stats.max_abs_dlogp == 2.0**-24
    with pytest.raises(MismatchError, match=r"5\.96046448e-08.*1 of 1000 tokens"):
        require_exact(stats)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["train", "rollout", "both"])
@pytest.mark.parametrize("merged_first", [True, False])
def test_nonfinite_never_passes(bad: float, side: str, merged_first: bool) -> None:
    """NaN or infinity on one or both sides makes the maximum NaN, whatever is merged before or after it."""
    train = [-1.0, bad if side != "rollout" else -1.0]
    rollout = [-1.0, bad if side != "train" else -1.0]
    total, clean = measured(train, rollout), measured([-1.0], [-1.0])
    if merged_first:
        clean.merge(total)
        total = clean
    else:
        total.merge(clean)
    assert math.isnan(total.max_abs_dlogp)
    assert math.isnan(total.metrics()["mean_abs_dlogp"])
    assert total.num_nonfinite == 1
    assert total.num_nonzero == 1
    with pytest.raises(MismatchError, match="not finite"):
        require_exact(total)


def test_states_of_ranks_equal_the_whole() -> None:
    """Statistics gathered as plain dicts from three ranks equal those of one rank that saw all."""
    g = torch.Generator().manual_seed(0)
    train, rollout = -torch.rand(30, generator=g), -torch.rand(30, generator=g)
    seq_ids, mask = torch.arange(30) // 5, torch.arange(30) % 4 != 0
    whole = MismatchStats()
    whole.update(train, rollout, mask, seq_ids)
    states = []
    for rank in range(3):
        mine = torch.arange(30) // 10 == rank
        part = MismatchStats()
        part.update(train[mine], rollout[mine], mask[mine], seq_ids[mine])
        states.append(part.state())
    assert MismatchStats.from_states(states).metrics() == pytest.approx(whole.metrics(), rel=1e-12)
    assert MismatchStats.from_states([MismatchStats().state(), *states]).max_abs_dlogp == whole.max_abs_dlogp


def test_masked_tokens_do_not_count_and_none_is_no_pass() -> None:
    """A masked NaN is not read; a step that compared no token is not called exact."""
    stats = MismatchStats()
    stats.update(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, 0.0]), torch.tensor([True, False]))
    require_exact(stats)
    assert stats.num_tokens == 1
    with pytest.raises(MismatchError, match="no token"):
        require_exact(MismatchStats())


def test_low_precision_and_shapes_are_refused() -> None:
    """bf16 log-probs (field bug 29) and unequal lengths are errors."""
    with pytest.raises(ValueError, match="fp32"):
        MismatchStats().update(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2))
    with pytest.raises(ValueError, match="shape"):
        MismatchStats().update(torch.zeros(2), torch.zeros(1))
