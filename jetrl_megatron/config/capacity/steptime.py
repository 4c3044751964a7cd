"""Expected time of a step by phase: a roofline over FLOPs, memory and links. An estimate, never a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jetrl_megatron.config.capacity.hardware import Hardware
from jetrl_megatron.config.capacity.layout import Layout
from jetrl_megatron.config.capacity.memory import MAIN_GRAD_BYTES
from jetrl_megatron.config.capacity.weights import (
    active_parameters,
    bundle_bytes,
    engine_weights,
    fp8_bytes,
    kv_bytes_per_token,
    num_parameters,
    stage_weights,
)
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.schema import RunConfig


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and responses that the estimate assumes."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class StepTime:
    """Seconds by phase, and what they rest on. decode_batch: sequences decoded together by one engine."""

    phases_s: dict[str, float]
    step_tokens: int
    decode_batch: int
    decode_rounds: int

    @property
    def total_s(self) -> float:
        return sum(self.phases_s.values())


def step_time(cfg: RunConfig, dims: ModelDims, layout: Layout, hardware: Hardware, lengths: Lengths) -> StepTime:
    sequences = cfg.trainer.prompts_per_step * cfg.rollout.samples_per_prompt
    batch, rounds = decode_batch(cfg, layout, lengths)
    phases = {
        "rollout prefill": _prefill_s(cfg, dims, layout, hardware, lengths),
        "rollout decode": rounds * lengths.response * _decode_token_s(cfg, dims, layout, hardware, lengths, batch),
    }
    forward = _forward_s(cfg, dims, layout, hardware, lengths, sequences, cfg.precision.train)
    bubble = _bubble(cfg, layout, lengths, sequences)
    if cfg.algorithm.recompute_old_logprobs:
        phases["log-probs"] = forward * bubble
    if cfg.algorithm.kl_coef > 0:
        phases["reference log-probs"] = forward * bubble
    backward = sum(
        _forward_s(cfg, dims, layout, hardware, lengths, sequences, p if cfg.precision.train == "fp8" else "bf16")
        for p in (cfg.precision.dgrad, cfg.precision.wgrad)
    )
    phases["train forward"] = forward * bubble * (2 if cfg.trainer.recompute else 1)
    phases["train backward"] = backward * bubble
    phases["gradient all-reduce"] = _all_reduce_s(dims, layout, hardware) * cfg.algorithm.updates_per_step
    phases |= _sync_s(cfg, dims, layout, hardware)
    return StepTime(phases, sequences * lengths.total, batch, rounds)


def decode_batch(cfg: RunConfig, layout: Layout, lengths: Lengths) -> tuple[int, int]:
    """(sequences decoded together by an engine, rounds until its share is done)."""
    sequences = cfg.trainer.prompts_per_step * cfg.rollout.samples_per_prompt
    share = -(-sequences // layout.num_engines)
    by_cache = max(cfg.rollout.max_total_tokens // lengths.total, 1)
    batch = min(cfg.rollout.max_running_requests, by_cache, share)
    return batch, -(-share // batch)


def _decode_token_s(
    cfg: RunConfig, dims: ModelDims, layout: Layout, hw: Hardware, lengths: Lengths, batch: int
) -> float:
    """One decode step of `batch` sequences: weights and KV cache read once, or the FLOPs; then two all-reduces per
    layer."""
    weights = engine_weights(dims, layout)
    fp8 = cfg.precision.rollout == "fp8"
    touched = 1.0
    if dims.moe is not None:  # share of the experts that at least one of the sequences chooses, if evenly
        touched = 1 - (1 - dims.moe.experts_per_token / dims.moe.num_experts) ** batch
    read = 0.0
    for w in weights:
        if w.name != "embedding" or dims.tied_embeddings:
            read += (w.numel if fp8 and w.quantized else 2 * w.numel) * (touched if w.expert else 1.0)
    context = lengths.prompt + lengths.response / 2
    read += batch * context * kv_bytes_per_token(dims, layout)
    linears, head = active_parameters(dims)
    t = layout.engine_tensor
    flops_s = 2 * batch * linears / t / hw.gemm_rate(cfg.precision.rollout) + 2 * batch * head / t / hw.gemm_rate(
        "bf16"
    )
    links = 2 * dims.num_layers * hw.collective_latency_s if t > 1 else 0.0
    return max(read / (hw.hbm_bytes_s * hw.hbm_efficiency), flops_s) + links


def _prefill_s(cfg: RunConfig, dims: ModelDims, layout: Layout, hw: Hardware, lengths: Lengths) -> float:
    """Every prompt once: the samples of a prompt share its prefix in the engine's cache."""
    prompts = -(-cfg.trainer.prompts_per_step // layout.num_engines)
    linears, _ = active_parameters(dims)
    flops = 2 * prompts * lengths.prompt * linears
    return flops / layout.engine_tensor / hw.gemm_rate(cfg.precision.rollout)


def _forward_s(
    cfg: RunConfig, dims: ModelDims, layout: Layout, hw: Hardware, lengths: Lengths, sequences: int, precision: str
) -> float:
    """FLOPs of one pass over all tokens of the step (2 per weight and token, causal attention 2 S^2 per head dim and
    layer, lm_head in bf16 on response tokens), shared by all training ranks."""
    linears, head = active_parameters(dims)
    tokens = sequences * lengths.total
    attention = 2 * sequences * lengths.total**2 * dims.q_size * dims.num_layers
    seconds = 2 * tokens * linears / hw.gemm_rate(precision)
    seconds += attention / (hw.bf16_flops * hw.attention_efficiency)
    seconds += 2 * sequences * lengths.response * head / hw.gemm_rate("bf16")
    return seconds / layout.training_ranks + _tensor_links_s(dims, layout, hw, tokens)


def _tensor_links_s(dims: ModelDims, layout: Layout, hw: Hardware, tokens: int) -> float:
    """Two all-reduces of [tokens, H] per layer over the tensor-parallel group; fp32 partial sums in row-parallel
    linears (megatron/linear.py)."""
    t = layout.tensor
    if t == 1:
        return 0.0
    link = hw.nvlink_bytes_s if t <= hw.gpus_per_node else hw.network_bytes_s
    volume = 2 * 2 * (t - 1) / t * 4 * dims.hidden_size * tokens / layout.data * dims.num_layers / layout.pipeline
    return volume / (link * hw.link_efficiency)


def _bubble(cfg: RunConfig, layout: Layout, lengths: Lengths, sequences: int) -> float:
    """1 + (P - 1) / (m v) for m micro-batches per update (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    if layout.pipeline == 1:
        return 1.0
    per_update = sequences / cfg.algorithm.updates_per_step / layout.data
    per_batch = max(cfg.trainer.micro_batch_tokens // lengths.total, 1)
    batches = max(math.ceil(per_update / per_batch), 1)
    return 1 + (layout.pipeline - 1) / (batches * layout.virtual_pipeline)


def _all_reduce_s(dims: ModelDims, layout: Layout, hw: Hardware) -> float:
    """Ring all-reduce of fp32 main grads over data-parallel ranks, not overlapped (overlap_grad_reduce is off)."""
    if layout.data == 1:
        return 0.0
    link = hw.nvlink_bytes_s if layout.training_ranks <= hw.gpus_per_node else hw.network_bytes_s
    size = MAIN_GRAD_BYTES * num_parameters(stage_weights(dims, layout, 0))
    return 2 * (layout.data - 1) / layout.data * size / (link * hw.link_efficiency)


def _sync_s(cfg: RunConfig, dims: ModelDims, layout: Layout, hw: Hardware) -> dict[str, float]:
    """Quantize on every rank; then one bundle through rank 0's host memory: copied out, checksummed, and read,
    checksummed and copied in by all engines at once (weights/bundle.py)."""
    phases = {}
    if cfg.precision.rollout == "fp8":
        linears = [w for w in stage_weights(dims, layout, 0) if w.quantized]
        moved = 2 * num_parameters(linears) + fp8_bytes(linears, cfg.precision.dgrad == "fp8")
        phases["sync quantize"] = moved / (hw.hbm_bytes_s * hw.hbm_efficiency)
    size = bundle_bytes(dims, cfg.precision.rollout == "fp8")
    phases["sync transfer"] = size * 2 / (hw.pcie_bytes_s * hw.link_efficiency)
    phases["sync checksums"] = size * 2 / hw.checksum_bytes_s
    return phases
