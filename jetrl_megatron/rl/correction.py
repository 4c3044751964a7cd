"""Rollout correction: importance weights between the policy that trained and the policy that sampled.

w = pi_old / pi_rollout, never with the current policy. TIS truncates from above (Yao et al., "Your efficient RL
framework secretly brings you off-policy training", 2025). Shapes: T = packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_megatron.config.schema import MismatchConfig

MAX_LOG_RATIO = 20.0


def importance_ratios(logp_old_T: Tensor, logp_rollout_T: Tensor) -> Tensor:
    """exp(clamp(logp_old - logp_rollout, +-20)), fp32 (T,), detached. Raises ValueError for unequal shapes."""
    if logp_old_T.shape != logp_rollout_T.shape:
        raise ValueError(
            f"logp_rollout_T: shape {tuple(logp_rollout_T.shape)}; rule: that of logp_old_T, {tuple(logp_old_T.shape)}"
        )
    log_ratio_T = logp_old_T.detach().float() - logp_rollout_T.detach().float()
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _none(ratios_T: Tensor, cfg: MismatchConfig) -> Tensor | None:
    return None


def _tis(ratios_T: Tensor, cfg: MismatchConfig) -> Tensor | None:
    return ratios_T.clamp(max=cfg.tis_clip)


CORRECTIONS: dict[str, Callable[[Tensor, MismatchConfig], Tensor | None]] = {"none": _none, "tis": _tis}


def correction_weights(logp_old_T: Tensor, logp_rollout_T: Tensor, cfg: MismatchConfig) -> Tensor | None:
    """Detached fp32 weights (T,) for `losses.policy_loss`, or None for `mismatch.correction: none`.

    logp_old_T: training log-probs before the first update of the step (not of the current policy).
    tis: min(w, tis_clip).
    """
    if cfg.correction not in CORRECTIONS:
        raise ValueError(f"mismatch.correction: {cfg.correction!r}; rule: one of {sorted(CORRECTIONS)}")
    return CORRECTIONS[cfg.correction](importance_ratios(logp_old_T, logp_rollout_T), cfg)


@dataclass
class WeightStats:
    """Statistics of the untruncated ratios w over micro-batches and ranks; `merge` adds another rank's.

    Reported whether or not a correction is applied: mean in [0.5, 2] and ESS > 0.3 are the field's health rules.
    """

    num_tokens: int = 0
    num_clipped: int = 0
    total: float = 0.0
    total_squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def update(self, logp_old_T: Tensor, logp_rollout_T: Tensor, mask_T: Tensor | None, cfg: MismatchConfig) -> None:
        """Adds the masked tokens of one micro-batch."""
        ratios = importance_ratios(logp_old_T, logp_rollout_T)
        ratios = (ratios if mask_T is None else ratios[mask_T.bool()]).double()
        if not ratios.numel():
            return
        self.merge(
            WeightStats(
                num_tokens=ratios.numel(),
                num_clipped=int((ratios > cfg.tis_clip).sum()),
                total=float(ratios.sum()),
                total_squares=float(ratios.square().sum()),
                minimum=float(ratios.amin()),
                maximum=float(ratios.amax()),
            )
        )

    def merge(self, other: WeightStats) -> None:
        self.num_tokens += other.num_tokens
        self.num_clipped += other.num_clipped
        self.total += other.total
        self.total_squares += other.total_squares
        bounds = (self.minimum, self.maximum, other.minimum, other.maximum)
        nan = any(math.isnan(bound) for bound in bounds)
        self.minimum = math.nan if nan else min(self.minimum, other.minimum)
        self.maximum = math.nan if nan else max(self.maximum, other.maximum)

    def metrics(self) -> dict[str, float]:
        """mean, std (population), min, max, ess (share of tokens, 1 = all count), clip_fraction. Empty: no keys."""
        if not self.num_tokens:
            return {}
        mean = self.total / self.num_tokens
        variance = self.total_squares / self.num_tokens - mean * mean
        return {
            "mean": mean,
            "std": math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0)),
            "min": self.minimum,
            "max": self.maximum,
            "ess": self.total * self.total / (self.num_tokens * self.total_squares),
            "clip_fraction": self.num_clipped / self.num_tokens,
        }


def stats_of(logp_old_T: Tensor, logp_rollout_T: Tensor, cfg: MismatchConfig) -> WeightStats:
    """WeightStats of one packed tensor, all tokens counted."""
    stats = WeightStats()
    with torch.no_grad():
        stats.update(logp_old_T, logp_rollout_T, None, cfg)
    return stats
