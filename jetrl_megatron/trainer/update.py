"""Log-probs, the exactness check and the optimizer updates of one step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.megatron.model import Policy
from jetrl_megatron.megatron.step import LossFn, MicroBatch, compute_logprobs
from jetrl_megatron.rl.correction import correction_weights
from jetrl_megatron.rl.losses import BatchNorm, policy_loss
from jetrl_megatron.rl.mismatch import MismatchStats, require_exact
from jetrl_megatron.samples import Sample
from jetrl_megatron.trainer.batches import UpdateBatch, make_updates
from jetrl_megatron.trainer.session import Session


def make_batches(session: Session, samples: Sequence[Sample]) -> list[UpdateBatch]:
    cfg = session.cfg
    return make_updates(
        samples,
        cfg.algorithm.updates_per_step,
        session.ranks,
        cfg.trainer.micro_batch_tokens,
        cfg.rollout.temperature,
        cfg.parallel.sequence,
    )


def attach_logprobs(session: Session, updates: Sequence[UpdateBatch]) -> MismatchStats:
    """pi_old and the reference's log-probs for every micro-batch; the mismatch of pi_old against the engine.

    Without `recompute_old_logprobs` the engine's log-probs are pi_old, and the first update's own forward is compared.
    """
    batches = [batch for update in updates for batch in update.micro_batches]
    stats = MismatchStats()
    old = _logprobs(session.policy, updates) if session.cfg.algorithm.recompute_old_logprobs else []
    for batch in batches if not old else []:
        batch.loss_inputs["logp_old"] = batch.loss_inputs["logp_rollout"]
    for batch, logprobs in zip(batches, old, strict=False):
        batch.loss_inputs["logp_old"] = logprobs
        compare(stats, logprobs, batch)
    if session.reference is not None:
        for batch, logprobs in zip(batches, _logprobs(session.reference, updates), strict=False):
            batch.loss_inputs["logp_reference"] = logprobs
    if session.cfg.algorithm.recompute_old_logprobs:
        stats = gather_stats(session, stats)
        check_exact(session, stats)
    return stats


def _logprobs(policy: Policy, updates: Sequence[UpdateBatch]) -> list[Tensor]:
    """Per micro-batch of all updates; under pipeline parallelism their lengths are equal within an update only."""
    return [logprobs for update in updates for logprobs in compute_logprobs(policy, update.micro_batches)]


def compare(stats: MismatchStats, logprobs: Tensor, batch: MicroBatch) -> None:
    inputs = batch.loss_inputs
    stats.update(logprobs.detach(), inputs["logp_rollout"], inputs["mask"], inputs["seq_ids"])


def gather_stats(session: Session, stats: MismatchStats) -> MismatchStats:
    """The statistics of all data-parallel ranks, on every rank (one tensor-parallel rank of the last stage counts)."""
    counts = session.ranks.is_last_stage and session.ranks.tensor == 0
    states: list[dict[str, float] | None] = [None] * session.ranks.world_size
    dist.all_gather_object(states, stats.state() if counts else None)
    return MismatchStats.from_states(state for state in states if state is not None)


def check_exact(session: Session, stats: MismatchStats) -> None:
    if session.cfg.require_exact:
        require_exact(stats)


def update_policy(session: Session, updates: Sequence[UpdateBatch], mismatch: MismatchStats) -> dict[str, Any]:
    """All optimizer updates of the step. Loss metrics are sums over micro-batches and ranks, hence global."""
    totals: list[dict[str, float]] = []
    norms = []
    for i, update in enumerate(updates):
        first = i == 0 and not session.cfg.algorithm.recompute_old_logprobs
        seen = MismatchStats()
        loss_fn = make_loss(session, update.norm, seen if first else None)
        totals += session.trainable.accumulate(update.micro_batches, loss_fn)
        if first:
            mismatch.merge(gather_stats(session, seen))
            check_exact(session, mismatch)
        norms.append(session.trainable.apply())
    summed = sum_over_ranks(session, totals, len(updates))
    return {**summed, "grad/norm": statistics.fmean(norms), "optimizer/lr": session.trainable.lr}


def make_loss(session: Session, norm: BatchNorm, compare_with: MismatchStats | None) -> LossFn:
    """The loss function that the Megatron step calls per micro-batch, on the last pipeline stage."""
    algorithm, mismatch_cfg = session.cfg.algorithm, session.cfg.mismatch

    def loss_fn(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        inputs = batch.loss_inputs
        if compare_with is not None:
            compare(compare_with, logprobs, batch)
        out = policy_loss(
            logprobs,
            inputs["logp_old"],
            inputs["advantages"],
            inputs["mask"],
            inputs["seq_ids"],
            correction_weights(inputs["logp_old"], inputs["logp_rollout"], mismatch_cfg),
            inputs.get("logp_reference"),
            algorithm,
            norm,
        )
        names = ("policy", "kl", "clip_fraction", "approx_kl")
        return out.loss, {f"loss/{name}": float(getattr(out, name)) for name in names}

    return loss_fn


def sum_over_ranks(session: Session, rows: Sequence[dict[str, float]], num_updates: int) -> dict[str, float]:
    """Mean over the step's updates of the global sums."""
    counts = session.ranks.is_last_stage and session.ranks.tensor == 0
    everyone: list[list[dict[str, float]]] = [[] for _ in range(session.ranks.world_size)]
    dist.all_gather_object(everyone, list(rows) if counts else [])
    total: dict[str, float] = {}
    for row in (row for part in everyone for row in part):
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value / num_updates
    return total
