"""One training scenario on our Megatron model, at any layout: log-probs, gradients, export, one update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.schema import OptimizerConfig, ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe
from jetrl_megatron.megatron.gather import export_bf16, export_fp8, load_hf
from jetrl_megatron.megatron.groups import Ranks, initialize
from jetrl_megatron.megatron.linear import LinearPrecision
from jetrl_megatron.megatron.model import Policy, build_policy
from jetrl_megatron.megatron.optimizer import Trainable, make_trainable
from jetrl_megatron.megatron.step import MicroBatch, compute_logprobs, pack
from jetrl_megatron.weights.io import HfCheckpoint
from tests.support.models import hf_model, perturb

Sequences = list[tuple[list[int], int]]  # (token ids, prompt length)
LEARNING_RATE = 1e-3
LENGTHS = (40, 33, 70, 12, 20, 64)


@dataclass(frozen=True)
class Job:
    """One run of the scenario. num_batches: micro-batches over all sequences (per data-parallel rank); pad_to: least
    length of a micro-batch."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    sequence: bool = False
    fp8: bool = True
    tp_invariant: bool = True
    num_batches: int = 2
    pad_to: int = 0
    recompute: bool = False
    backward: str = "fp8"
    expert: int = 1
    grouped_experts: bool = True


def calm_model(out: Path, family: str, seed: int, **dims: Any) -> Path:
    """A tiny random bf16 model whose log-probs are those of a young model (-2 to -12), tied or not."""
    model = hf_model(family, **dims)
    perturb(model, seed)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1 if model.config.tie_word_embeddings else 1.0)
    model.save_pretrained(str(out))
    return out


def sequences(vocab_size: int) -> Sequences:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(3, vocab_size, (n,), generator=generator).tolist(), 5) for n in LENGTHS]


def load_policy(
    path: Path | str, ranks: Ranks, parallel: ParallelConfig, precision: LinearPrecision, recompute: bool = False
) -> Policy:
    checkpoint = HfCheckpoint(path)
    policy = build_policy(ModelDims.from_hf(checkpoint.config), parallel, ranks, precision, recompute)
    load_hf(policy, checkpoint)
    return policy


def micro_batches(
    seqs: Sequences, num_batches: int, temperature: float, pad_multiple: int, equal: bool, pad_to: int = 0
) -> list[MicroBatch]:
    """Consecutive sequences in `num_batches` packs; equal: all padded to one length (pipeline parallelism). The loss
    weight of a response token is a fixed function of its sequence and position."""
    per_batch = len(seqs) // num_batches
    groups = [seqs[i : i + per_batch] for i in range(0, len(seqs), per_batch)]
    if equal:
        pad_to = max(pad_to, *(sum(len(ids) for ids, _ in group) for group in groups))
    pad_to = -(-pad_to // pad_multiple) * pad_multiple
    batches = []
    for group in groups:
        batch = pack(group, temperature, pad_multiple, pad_to)
        batch.loss_inputs["weight"] = torch.cat([token_weights(*seq) for seq in group])
        batches.append(batch)
    return batches


def token_weights(ids: list[int], prompt_length: int) -> Tensor:
    """Like advantages: one sign and size per sequence, modulated along the response."""
    n = len(ids) - prompt_length
    return torch.linspace(0.5, 1.5, n) * (1.0 if sum(ids) % 2 else -0.7)


def weighted_loss(num_tokens: int) -> Any:
    """-sum(weight * logp) / num_tokens of the global batch."""

    def loss(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        value = -(batch.loss_inputs["weight"] * logprobs).sum() / num_tokens
        return value, {"loss": float(value.detach())}

    return loss


def gradients(trainable: Trainable, batches: Sequence[MicroBatch], num_tokens: int) -> dict[str, Tensor]:
    """fp32 gradient of every local parameter, reduced over ranks and ready for `apply`; global layer indices."""
    trainable.accumulate(batches, weighted_loss(num_tokens))
    return {rule.megatron_name: p.main_grad.clone() for rule, p, _ in trainable.policy.named_rules()}


def snapshot(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies: an export may yield views of parameters that an update changes in place."""
    return {name: tensor.clone() for name, tensor in tensors}


def run_job(job: Job, path: Path | str) -> dict[str, Any]:
    """The scenario on this rank. Keys: coordinates, logprobs (last stage), fp8 and bf16 exports (rank 0), gradients
    (local), grad_norm, updated (bf16 export after one update), logprobs_updated."""
    parallel = ParallelConfig(
        tensor=job.tensor,
        pipeline=job.pipeline,
        virtual_pipeline=job.virtual_pipeline,
        sequence=job.sequence,
        expert=job.expert,
        grouped_experts=job.grouped_experts,
    )
    parallel_state.destroy_model_parallel()  # another test of this process may have left its groups
    ranks = initialize(parallel, seed=0)
    try:
        recipe = Fp8Recipe(dgrad=job.backward, wgrad=job.backward)  # type: ignore[arg-type]
        policy = load_policy(path, ranks, parallel, LinearPrecision(job.fp8, recipe, job.tp_invariant), job.recompute)
        seqs = sequences(policy.dims.vocab_size)
        num_tokens = sum(len(ids) - prompt for ids, prompt in seqs)
        share = len(seqs) // ranks.data_size
        mine = seqs[ranks.data * share : (ranks.data + 1) * share]
        pad = job.tensor if job.sequence else 1
        num_batches = min(job.num_batches, share)
        batches = micro_batches(mine, num_batches, 0.8, pad, job.pipeline > 1, job.pad_to)
        result: dict[str, Any] = {"coordinates": (ranks.tensor, ranks.pipeline, ranks.data)}
        result["logprobs"] = compute_logprobs(policy, batches)
        result["bf16"] = snapshot(export_bf16(policy))
        result["fp8"] = snapshot(export_fp8(policy))
        trainable = make_trainable(policy, OptimizerConfig(lr=LEARNING_RATE), 10)
        result["gradients"] = gradients(trainable, batches, num_tokens)
        result["grad_norm"] = trainable.apply()
        result["updated"] = snapshot(export_bf16(policy))
        result["logprobs_updated"] = compute_logprobs(policy, batches)
        return result
    finally:
        parallel_state.destroy_model_parallel()
