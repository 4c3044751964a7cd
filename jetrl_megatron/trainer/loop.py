"""The RL loop. One step: rollout, reward, log-probs (and the exactness check), update, sync; then save and evaluate."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.megatron.checkpoint import TrainerState, save_checkpoint
from jetrl_megatron.megatron.step import MicroBatch, compute_logprobs
from jetrl_megatron.rl.advantages import group_advantages
from jetrl_megatron.rl.correction import correction_weights
from jetrl_megatron.rl.data import response_text
from jetrl_megatron.rl.losses import BatchNorm, policy_loss
from jetrl_megatron.rl.mismatch import MismatchStats, require_exact
from jetrl_megatron.rollout.engine import Request, Sampling
from jetrl_megatron.samples import Prompt, Sample
from jetrl_megatron.trainer import files
from jetrl_megatron.trainer.batches import UpdateBatch, make_updates
from jetrl_megatron.trainer.memory import peak_rss_bytes, run_pss_bytes
from jetrl_megatron.trainer.phases import Phases
from jetrl_megatron.trainer.session import Session

StepCallback = Callable[[int, dict[str, Any]], None]


def train(session: Session, on_step: StepCallback) -> None:
    """Run all remaining steps. Raises MismatchError, SyncError, FloatingPointError, EngineDiedError."""
    cfg = session.cfg
    session.sync.publish(session.policy.precision.version.value)
    for step in range(session.first_step, cfg.trainer.num_steps + 1):
        phases = Phases(session.run_dir if session.ranks.is_main else None, step)
        with phases("rollout"):
            samples = rollout(session, step)
        with phases("reward"):
            score(session, samples)
            samples = share(samples)
        with phases("logprob"):
            updates = make_batches(session, samples)
            mismatch = attach_logprobs(session, updates)
        with phases("train"):
            metrics = update_policy(session, updates, mismatch)
        with phases("sync"):
            report = session.sync.publish(session.policy.precision.version.value)
        if cfg.checkpoint.every_steps and step % cfg.checkpoint.every_steps == 0:
            with phases("save"):
                save(session, step)
        if cfg.eval.every_steps and step % cfg.eval.every_steps == 0:
            with phases("eval"):
                metrics.update(evaluate(session))
        metrics |= mismatch_metrics(mismatch) | sample_metrics(samples) | phases.times()
        metrics |= {"weights/version": report.version, "sync/num_bytes": report.num_bytes}
        metrics |= {"time/quantize_s": report.quantize_s, "time/sync_s": report.transfer_s}
        metrics |= rates(samples, updates, phases.times())
        finish_step(session, step, metrics, samples, on_step)


def rollout(session: Session, step: int) -> list[Sample]:
    """On rank 0: the step's prompts, each completed `samples_per_prompt` times."""
    if session.engines is None or session.prompts is None:
        return []
    prompts = session.prompts.prompts_for_step(step - 1, session.cfg.trainer.prompts_per_step)
    rollout_cfg = session.cfg.rollout
    sampling = Sampling(
        rollout_cfg.temperature,
        rollout_cfg.top_p,
        rollout_cfg.top_k,
        rollout_cfg.max_new_tokens,
        session.stop_token_ids,
    )
    return complete(session, prompts, rollout_cfg.samples_per_prompt, sampling, f"train/{step}")


def complete(session: Session, prompts: Sequence[Prompt], count: int, sampling: Sampling, stream: str) -> list[Sample]:
    """Every draw is seeded by (run seed, stream, prompt, sample): a repeated step draws the same tokens."""
    assert session.engines is not None
    pairs = [(prompt, i) for prompt in prompts for i in range(count)]
    requests = [
        Request(p.token_ids, sampling, draw_seed(session.cfg.trainer.seed, stream, p.index, i)) for p, i in pairs
    ]
    version = session.policy.precision.version.value
    return [
        Sample(
            prompt=prompt,
            sample_index=i,
            response_ids=done.token_ids,
            logprobs=done.logprobs,
            finish_reason=done.finish_reason,
            weight_version=version,
            text=response_text(session.tokenizer, done.token_ids, session.stop_token_ids),
        )
        for (prompt, i), done in zip(pairs, session.engines.generate(requests), strict=True)
    ]


def draw_seed(seed: int, stream: str, prompt: int, sample: int) -> int:
    """63-bit seed of one request."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def score(session: Session, samples: list[Sample]) -> None:
    """Rewards and group advantages, on rank 0."""
    if session.scorer is None:
        return
    session.scorer.score(samples)
    groups = [s.prompt.index for s in samples]
    advantages = group_advantages([s.reward for s in samples], groups, session.cfg.algorithm)
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = advantage


def share(samples: list[Sample]) -> list[Sample]:
    """Rank 0's samples on every rank."""
    box = [samples]
    dist.broadcast_object_list(box, src=0)
    return box[0]


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
    old = compute_logprobs(session.policy, batches) if session.cfg.algorithm.recompute_old_logprobs else []
    for batch in batches if not old else []:
        batch.loss_inputs["logp_old"] = batch.loss_inputs["logp_rollout"]
    for batch, logprobs in zip(batches, old, strict=False):
        batch.loss_inputs["logp_old"] = logprobs
        compare(stats, logprobs, batch)
    if session.reference is not None:
        for batch, logprobs in zip(batches, compute_logprobs(session.reference, batches), strict=False):
            batch.loss_inputs["logp_reference"] = logprobs
    if session.cfg.algorithm.recompute_old_logprobs:
        stats = gather_stats(session, stats)
        check_exact(session, stats)
    return stats


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


def make_loss(session: Session, norm: BatchNorm, compare_with: MismatchStats | None) -> Any:
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


def save(session: Session, step: int) -> None:
    state = TrainerState(step, session.policy.precision.version.value)
    save_checkpoint(session.run_dir / files.CHECKPOINTS, session.trainable, state, session.cfg.checkpoint.keep)


def evaluate(session: Session) -> dict[str, Any]:
    """Mean reward on held-out prompts, on rank 0."""
    if session.prompts is None or session.scorer is None:
        return {}
    cfg = session.cfg
    sampling = Sampling(cfg.eval.temperature, 1.0, -1, cfg.rollout.max_new_tokens, session.stop_token_ids)
    prompts = session.prompts.eval_prompts(cfg.eval.num_prompts)
    samples = complete(session, prompts, cfg.eval.samples_per_prompt, sampling, "eval")
    session.scorer.score(samples)
    return {"eval/reward_mean": statistics.fmean(s.reward for s in samples), "eval/num_samples": len(samples)}


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
        **_weight_metrics(samples),
    }


def _weight_metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    live = sum(1 for s in samples if s.advantage != 0.0)
    return {"advantage/live_fraction": live / max(len(samples), 1)}


def rates(samples: Sequence[Sample], updates: Sequence[UpdateBatch], times: dict[str, float]) -> dict[str, Any]:
    generated = sum(len(s.response_ids) for s in samples)
    trained = sum(s.num_tokens for s in samples)
    return {
        "tokens/rollout_per_s": generated / max(times["time/rollout_s"], 1e-9),
        "tokens/train_per_s": trained / max(times["time/train_s"] + times["time/logprob_s"], 1e-9),
        "memory/peak_rss_bytes": peak_rss_bytes(),
    }


def finish_step(
    session: Session, step: int, metrics: dict[str, Any], samples: Sequence[Sample], on_step: StepCallback
) -> None:
    if session.metrics is None or session.engines is None:
        return
    metrics |= {"memory/total_pss_bytes": run_pss_bytes(), "rollout/num_engine_restarts": session.engines.num_restarts}
    session.metrics.write_samples(step, samples)
    session.metrics.write(step, metrics)
    on_step(step, metrics)
