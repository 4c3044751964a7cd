"""Policy loss over packed tokens, aggregated over the GLOBAL batch of one optimizer update.

Shapes: T = packed tokens of one micro-batch (any mix of sequences). All arithmetic is fp32.

Every term of the loss is divided by counts of the whole update (`BatchNorm`), never by counts of the micro-batch or
rank. So the SUM of the returned losses over all micro-batches and all data-parallel ranks is the loss, and the sum of
their gradients its gradient, whatever the split. A data-parallel wrapper that AVERAGES gradients needs the loss
multiplied by the data-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_megatron.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, so that no ratio, and no gradient of a clipped one, overflows."""


@dataclass(frozen=True)
class BatchNorm:
    """Counts over the global batch of one update (all micro-batches, all data-parallel ranks).

    num_tokens: response tokens (mask 1), incl. those of groups whose rewards are all equal.
    num_sequences: responses, incl. empty ones.
    sequence_tokens: response tokens of each sequence, indexed by the `seq_ids_T` of the caller (ids may be local to
    the rank as long as both agree).
    """

    num_tokens: int
    num_sequences: int
    sequence_tokens: tuple[int, ...]


@dataclass(frozen=True)
class LossOutput:
    """Contribution of one micro-batch. All are 0-d fp32 tensors and add up over micro-batches and ranks, except
    `ratio_max`, which takes the maximum. Only `loss` carries a gradient.

    loss = policy + kl_coef * kl. policy: clipped surrogate, with rollout-correction weights. kl: KL(pi || ref),
    aggregated like the loss, without its coefficient. clip_fraction: share of all response tokens whose clip is
    active (gradient 0). approx_kl: mean k3 of KL(pi_old || pi), over all response tokens. ratio_max: largest pi/pi_old.
    """

    loss: Tensor
    policy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor
    ratio_max: Tensor


def _k1(log_ratio_T: Tensor) -> Tensor:
    return -log_ratio_T


def _k2(log_ratio_T: Tensor) -> Tensor:
    return 0.5 * log_ratio_T.square()


def _k3(log_ratio_T: Tensor) -> Tensor:
    return torch.expm1(log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_ratio_T


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Estimators of KL(p || q) from x ~ p, as functions of log q(x) - log p(x) (Schulman, 2020)."""


def _token_mean(seq_ids_T: Tensor, norm: BatchNorm) -> Tensor:
    return torch.full(seq_ids_T.shape, 1.0 / max(norm.num_tokens, 1), device=seq_ids_T.device)


def _seq_mean_token_mean(seq_ids_T: Tensor, norm: BatchNorm) -> Tensor:
    counts = torch.tensor(norm.sequence_tokens, dtype=torch.float32, device=seq_ids_T.device).clamp(min=1.0)
    return 1.0 / (max(norm.num_sequences, 1) * counts[seq_ids_T])


def _seq_mean_token_sum(seq_ids_T: Tensor, norm: BatchNorm) -> Tensor:
    return torch.full(seq_ids_T.shape, 1.0 / max(norm.num_sequences, 1), device=seq_ids_T.device)


AGGREGATIONS: dict[str, Callable[[Tensor, BatchNorm], Tensor]] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
}
"""Coefficient of every token in the global loss, fp32 (T,)."""


def kl_estimate(logp_T: Tensor, ref_logp_T: Tensor, estimator: str) -> Tensor:
    """Per-token KL(pi || ref), fp32 (T,), for tokens sampled from pi. estimator: k1 | k2 | k3."""
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"algorithm.kl_estimator: {estimator!r}; rule: one of {sorted(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](ref_logp_T.float() - logp_T.float())


def clipped_surrogate(log_ratio_T: Tensor, advantages_T: Tensor, cfg: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), whether the clip is active), per token, r = exp(log_ratio)
    (PPO, arXiv:1707.06347 eq. 7)."""
    ratio_T = log_ratio_T.exp()
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    return torch.maximum(unclipped_T, clipped_T), clipped_T > unclipped_T


def _check(cfg: AlgorithmConfig, logp_T: Tensor, ref_logp_T: Tensor | None, **others: Tensor | None) -> None:
    if logp_T.dim() != 1:
        raise ValueError(f"logp_T: shape {tuple(logp_T.shape)}; rule: one dimension of packed tokens")
    for name, tensor in {"ref_logp_T": ref_logp_T, **others}.items():
        if tensor is not None and tensor.shape != logp_T.shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}; rule: one value per packed token, shape "
                f"{tuple(logp_T.shape)}, nothing is broadcast; fix: expand per-sequence values by seq_ids_T"
            )
    if cfg.kl_coef > 0 and ref_logp_T is None:
        raise ValueError(f"algorithm.kl_coef: {cfg.kl_coef} without reference log-probs; fix: pass ref_logp_T")
    if cfg.aggregation not in AGGREGATIONS:
        raise ValueError(f"algorithm.aggregation: {cfg.aggregation!r}; rule: one of {sorted(AGGREGATIONS)}")


def policy_loss(
    logp_T: Tensor,
    logp_old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    seq_ids_T: Tensor,
    weights_T: Tensor | None,
    ref_logp_T: Tensor | None,
    cfg: AlgorithmConfig,
    norm: BatchNorm,
) -> LossOutput:
    """Clipped PPO surrogate plus KL to the reference, for one micro-batch.

    logp_T: log pi of the sampled token, with gradient. logp_old_T: log pi_old. advantages_T: per token. mask_T: bool or
    0/1, 1 on response tokens; what is masked is never read, so it may hold anything. seq_ids_T: int64, indexes
    `norm.sequence_tokens`. weights_T: rollout-correction weights (`rl.correction`) or None; they multiply the surrogate
    only. ref_logp_T: log pi_ref, needed when cfg.kl_coef > 0; without a coefficient its KL is still reported.
    Raises ValueError for unequal shapes or a missing reference.
    """
    _check(
        cfg,
        logp_T,
        ref_logp_T,
        logp_old_T=logp_old_T,
        advantages_T=advantages_T,
        mask_T=mask_T,
        seq_ids_T=seq_ids_T,
        weights_T=weights_T,
    )
    live_T = mask_T.bool()

    def live(values_T: Tensor) -> Tensor:
        """fp32 with exact zeros where masked, so that a NaN there reaches neither value nor gradient."""
        return torch.where(live_T, values_T.float(), 0.0)

    new_T = live(logp_T)
    log_ratio_T = (new_T - live(logp_old_T.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    surrogate_T, active_T = clipped_surrogate(log_ratio_T, live(advantages_T.detach()), cfg)
    if weights_T is not None:
        surrogate_T = surrogate_T * live(weights_T.detach())
    coefficient_T = live(AGGREGATIONS[cfg.aggregation](seq_ids_T, norm))
    policy = (coefficient_T * surrogate_T).sum()
    kl = torch.zeros((), device=logp_T.device)
    if ref_logp_T is not None:
        kl = (coefficient_T * kl_estimate(new_T, live(ref_logp_T.detach()), cfg.kl_estimator)).sum()
    loss = policy + cfg.kl_coef * kl if cfg.kl_coef > 0 else policy
    return LossOutput(loss, policy.detach(), kl.detach(), *_diagnostics(log_ratio_T.detach(), active_T, live_T, norm))


def _diagnostics(
    log_ratio_T: Tensor, active_T: Tensor, live_T: Tensor, norm: BatchNorm
) -> tuple[Tensor, Tensor, Tensor]:
    """(clip_fraction, approx_kl, ratio_max) of `LossOutput`. A masked token has log-ratio 0: no clip, no KL."""
    share = 1.0 / max(norm.num_tokens, 1)
    ratio_T = torch.where(live_T, log_ratio_T.exp(), 0.0)
    ratio_max = ratio_T.amax() if ratio_T.numel() else torch.zeros((), device=ratio_T.device)
    return active_T.float().sum() * share, _k3(log_ratio_T).sum() * share, ratio_max
