"""Closed forms of the group advantages."""

from __future__ import annotations

import math
import statistics
from typing import Literal

import pytest

from jetrl_megatron.config.schema import AlgorithmConfig
from jetrl_megatron.rl.advantages import group_advantages

GRPO = AlgorithmConfig()


def test_hand_computed_group() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, population std 1/2, so +-1 up to the 1e-6 in the denominator."""
    assert group_advantages([1, 0, 0, 1], [7, 7, 7, 7], GRPO) == pytest.approx([1, -1, -1, 1], rel=3e-6)


def test_sample_std_and_no_std() -> None:
    """Sample std of 1, 0, 0, 1 is sqrt(1/3); Dr.GRPO only centres, exactly."""
    sample = group_advantages([1, 0, 0, 1], [0] * 4, AlgorithmConfig(std_kind="sample"))
    assert sample == pytest.approx([0.5 / math.sqrt(1 / 3) * s for s in (1, -1, -1, 1)], rel=3e-6)
    centred = group_advantages([1, 0, 0, 1], [0] * 4, AlgorithmConfig(std_normalization=False))
    assert centred == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("reward", [0.1, 0.2 + 0.1, 1 / 3, 1e-30, 1e30])
@pytest.mark.parametrize("count", [3, 6, 7, 8])
@pytest.mark.parametrize("cfg", [GRPO, AlgorithmConfig(std_kind="sample"), AlgorithmConfig(std_normalization=False)])
def test_equal_rewards_give_exact_zero(reward: float, count: int, cfg: AlgorithmConfig) -> None:
    """A group of equal rewards gives exactly 0, although sum(r)/n is not r for 0.1 * 3 and the like."""
    assert group_advantages([reward] * count, [0] * count, cfg) == [0.0] * count


def test_uneven_interleaved_groups() -> None:
    """Each group has its own baseline: uneven groups equal what each gives alone (field bug 34)."""
    rewards, groups = [1.0, 5.0, 0.0, 7.0, 9.0, 3.0], [0, 1, 0, 1, 1, 2]
    got = group_advantages(rewards, groups, GRPO)
    mean, std = statistics.fmean([5, 7, 9]), statistics.pstdev([5, 7, 9])
    assert [got[i] for i in (1, 3, 4)] == pytest.approx([(r - mean) / std for r in (5, 7, 9)], rel=1e-5)
    assert [got[0], got[2]] == pytest.approx([1, -1], rel=3e-6)
    assert got[5] == 0.0


@pytest.mark.parametrize("std_kind", ["population", "sample"])
def test_one_valid_reward_left(std_kind: Literal["population", "sample"]) -> None:
    """NaN marks a filtered response: it moves no baseline, and a group with one valid reward is 0, not NaN (bug 36)."""
    cfg = AlgorithmConfig(std_kind=std_kind)
    assert group_advantages([1.0, math.nan, math.nan], [0, 0, 0], cfg) == [0.0, 0.0, 0.0]
    assert group_advantages([1.0], [0], cfg) == [0.0]
    filtered = group_advantages([1.0, math.nan, 0.0], [0, 0, 0], cfg)
    kept = group_advantages([1.0, 0.0], [0, 0], cfg)
    assert filtered == [kept[0], 0.0, kept[1]]


def test_bad_input_is_refused() -> None:
    """Infinite rewards and unequal lengths are errors."""
    with pytest.raises(ValueError, match="finite"):
        group_advantages([math.inf, 0.0], [0, 0], GRPO)
    with pytest.raises(ValueError, match="one group id per reward"):
        group_advantages([1.0, 0.0], [0], GRPO)
