"""Rollout, rewards and evaluation, on global rank 0, and the samples handed to all ranks."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from jetrl_megatron.rl.advantages import group_advantages
from jetrl_megatron.rl.data import response_text
from jetrl_megatron.rollout.engine import Request, Sampling
from jetrl_megatron.samples import Prompt, Sample
from jetrl_megatron.trainer.session import Session


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
