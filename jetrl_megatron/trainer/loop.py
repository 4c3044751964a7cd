"""The RL loop. One step: rollout, reward, log-probs (and the exactness check), update, sync; then save and evaluate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetrl_megatron.megatron.checkpoint import TrainerState, save_checkpoint
from jetrl_megatron.samples import Sample
from jetrl_megatron.trainer import files
from jetrl_megatron.trainer.generation import evaluate, rollout, score, share
from jetrl_megatron.trainer.memory import run_pss_bytes
from jetrl_megatron.trainer.phases import Phases
from jetrl_megatron.trainer.precision_flow import check_at_start
from jetrl_megatron.trainer.session import Session
from jetrl_megatron.trainer.step_metrics import mismatch_metrics, rates, sample_metrics
from jetrl_megatron.trainer.stop import mark_stopped, stop_requested
from jetrl_megatron.trainer.update import attach_logprobs, make_batches, update_policy

StepCallback = Callable[[int, dict[str, Any]], None]


def train(session: Session, on_step: StepCallback) -> bool:
    """Run all remaining steps; False: asked to stop before the last one, with a checkpoint of the last step done.

    Raises PrecisionFlowError, MismatchError, SyncError, FloatingPointError, EngineDiedError.
    """
    cfg = session.cfg
    session.sync.publish(session.policy.precision.version.value)
    check_at_start(session)
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
        saved = bool(cfg.checkpoint.every_steps) and step % cfg.checkpoint.every_steps == 0
        if saved:
            with phases("save"):
                save(session, step)
        if cfg.eval.every_steps and step % cfg.eval.every_steps == 0:
            with phases("eval"):
                metrics.update(evaluate(session))
        metrics |= mismatch_metrics(mismatch) | sample_metrics(samples) | phases.times()
        metrics |= {"weights/version": report.version, "sync/num_bytes": report.num_bytes}
        metrics |= {"time/quantize_s": report.quantize_s, "time/sync_s": report.transfer_s}
        metrics |= rates(samples, phases.times())
        finish_step(session, step, metrics, samples, on_step)
        if step < cfg.trainer.num_steps and stop_requested(session.run_dir, session.ranks.is_main):
            stop(session, step, saved)
            return False
    return True


def stop(session: Session, step: int, saved: bool) -> None:
    if not saved:
        save(session, step)
    if session.ranks.is_main:
        mark_stopped(session.run_dir, step)


def save(session: Session, step: int) -> None:
    state = TrainerState(step, session.policy.precision.version.value)
    save_checkpoint(session.run_dir / files.CHECKPOINTS, session.trainable, state, session.cfg.checkpoint.keep)


def finish_step(
    session: Session, step: int, metrics: dict[str, Any], samples: Sequence[Sample], on_step: StepCallback
) -> None:
    if session.metrics is None or session.engines is None:
        return
    metrics |= {"memory/total_pss_bytes": run_pss_bytes(), "rollout/num_engine_restarts": session.engines.num_restarts}
    session.metrics.write_samples(step, samples)
    session.metrics.write(step, metrics)
    on_step(step, metrics)
