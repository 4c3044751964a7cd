"""The numbers of one step that come from its samples and times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from jetrl_megatron.rl.mismatch import MismatchStats
from jetrl_megatron.samples import Sample
from jetrl_megatron.trainer.memory import peak_rss_bytes


def mismatch_metrics(stats: MismatchStats) -> dict[str, Any]:
    return {f"mismatch/{name}": value for name, value in stats.metrics().items()}


def sample_metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    rewards = [s.reward for s in samples]
    parts: dict[str, list[float]] = {}
    for s in samples:
        for name, value in s.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/num_errors": sum(s.reward_error is not None for s in samples),
        "response/mean_tokens": statistics.fmean(len(s.response_ids) for s in samples),
        "response/truncated_fraction": statistics.fmean(float(s.truncated) for s in samples),
        **{f"reward/part_{name}": statistics.fmean(values) for name, values in parts.items()},
        "advantage/live_fraction": statistics.fmean(float(s.advantage != 0.0) for s in samples),
    }


def rates(samples: Sequence[Sample], times: dict[str, float]) -> dict[str, Any]:
    generated = sum(len(s.response_ids) for s in samples)
    trained = sum(s.num_tokens for s in samples)
    return {
        "tokens/rollout_per_s": generated / max(times["time/rollout_s"], 1e-9),
        "tokens/train_per_s": trained / max(times["time/train_s"] + times["time/logprob_s"], 1e-9),
        "memory/peak_rss_bytes": peak_rss_bytes(),
    }
