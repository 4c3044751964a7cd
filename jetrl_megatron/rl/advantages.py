"""Group-relative advantages (GRPO, arXiv:2402.03300 eq. 3; without std: Dr.GRPO, arXiv:2503.20783)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from jetrl_megatron.config.schema import AlgorithmConfig

STD_EPSILON = 1e-6


def _grpo(rewards: Sequence[float], cfg: AlgorithmConfig) -> list[float]:
    """Advantages of one group of finite rewards, in float64. The guard compares rewards, not the std against 0: the
    mean of equal floats has a residue, which dividing by a tiny std would blow up."""
    count = len(rewards)
    if count < 2 or min(rewards) == max(rewards):
        return [0.0] * count
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if not cfg.std_normalization:
        return centred
    divisor = count if cfg.std_kind == "population" else count - 1
    std = math.sqrt(math.fsum(value * value for value in centred) / divisor)
    return [value / (std + STD_EPSILON) for value in centred]


ADVANTAGES: dict[str, Callable[[Sequence[float], AlgorithmConfig], list[float]]] = {"grpo": _grpo}


def group_advantages(rewards: Sequence[float], groups: Sequence[int], cfg: AlgorithmConfig) -> list[float]:
    """Advantage of every response, in the order of `rewards`.

    rewards: one per response; NaN marks a response that is filtered out: it moves no baseline and gets exactly 0.
    groups: the group id (prompt index) of each response; groups may be uneven and interleaved.
    grpo: (r - mean) / (std + 1e-6) within the group, `cfg.std_kind` says which std, none without
    `cfg.std_normalization`. A group with equal rewards, or with one response left, gives exactly 0.0.
    Raises ValueError for unequal lengths or an infinite reward.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"rewards: {len(rewards)} values for {len(groups)} group ids; rule: one group id per reward")
    members: dict[int, list[int]] = defaultdict(list)
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if math.isinf(reward):
            raise ValueError(f"rewards[{i}]: {reward}; rule: rewards are finite (NaN: filtered out); fix: the reward")
        if not math.isnan(reward):
            members[group].append(i)
    if cfg.name not in ADVANTAGES:
        raise ValueError(f"algorithm.name: {cfg.name!r}; rule: one of {sorted(ADVANTAGES)}; fix: choose one")
    estimator = ADVANTAGES[cfg.name]
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        for i, value in zip(indices, estimator([rewards[i] for i in indices], cfg), strict=True):
            advantages[i] = value
    return advantages
