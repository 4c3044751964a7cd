"""Memory per GPU by part: what stays (weights, gradients, states, KV cache) and the larger of two peaks."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl_megatron.config.capacity.activations import layers_bytes, logits_bytes
from jetrl_megatron.config.capacity.hardware import Hardware
from jetrl_megatron.config.capacity.layout import Layout
from jetrl_megatron.config.capacity.weights import (
    engine_weights,
    fp8_bytes,
    kv_bytes_per_token,
    num_parameters,
    stage_weights,
)
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.schema import RunConfig

# Bytes per parameter on every data-parallel rank: megatron/optimizer.py shards nothing over data-parallel ranks.
WEIGHT_BYTES, MAIN_GRAD_BYTES, MASTER_BYTES, MOMENTS_BYTES = 2, 4, 4, 8
UPDATE_BYTES = 4  # torch's AdamW, for all parameters at once: the root of the second moment (0 with a fused Adam)


@dataclass(frozen=True)
class Memory:
    """One kind of GPU. resident: bytes by part that stay through a step; peaks: bytes by part that are never alive
    together with those of another phase, by phase."""

    role: str
    resident: dict[str, int]
    peaks: dict[str, dict[str, int]]

    @property
    def peak_phase(self) -> str:
        return max(self.peaks, key=lambda phase: sum(self.peaks[phase].values())) if self.peaks else ""

    @property
    def total_bytes(self) -> int:
        peak = sum(self.peaks[self.peak_phase].values()) if self.peaks else 0
        return sum(self.resident.values()) + peak


def memory_of(cfg: RunConfig, dims: ModelDims, layout: Layout, hardware: Hardware) -> list[Memory]:
    """The kinds of GPUs of a layout: first and last pipeline stage (one of them without pipeline), and engines where
    they have GPUs of their own."""
    stages = sorted({0, layout.pipeline - 1})
    out = [_training(cfg, dims, layout, hardware, stage) for stage in stages]
    if not layout.shared:
        parts = {"runtime": hardware.runtime_bytes, **_engine(cfg, dims, layout)}
        out.append(Memory("engine", parts, {"rollout": _engine_workspace(cfg, dims)}))
    return out


def worst(memories: list[Memory]) -> Memory:
    return max(memories, key=lambda m: m.total_bytes)


def _training(cfg: RunConfig, dims: ModelDims, layout: Layout, hardware: Hardware, stage: int) -> Memory:
    weights = stage_weights(dims, layout, stage)
    count, fp8 = num_parameters(weights), cfg.precision.train == "fp8"
    resident = training_state(cfg, dims, layout, stage)
    if cfg.algorithm.kl_coef > 0:
        resident["reference model"] = WEIGHT_BYTES * count + (fp8_bytes(weights, dgrad=False) if fp8 else 0)
    resident["runtime"] = hardware.runtime_bytes
    tokens, recompute = cfg.trainer.micro_batch_tokens, cfg.trainer.recompute
    train: dict[str, int] = {}
    if stage == 0 or layout.pipeline == 1:
        train["activations"] = layers_bytes(dims, layout, cfg.precision, tokens, recompute)
    else:  # the last stage holds one micro-batch under 1F1B, v chunks of it interleaved
        train["activations"] = layers_bytes(dims, layout, cfg.precision, tokens, recompute) // layout.pipeline
    if stage == layout.pipeline - 1:
        train["logits"] = logits_bytes(dims, layout, tokens)
    sync = {"sync buckets": cfg.sync.bucket_bytes + _largest_gather(dims, cfg.precision.rollout == "fp8")}
    peaks = {"train": train, "update": {"optimizer temporaries": UPDATE_BYTES * count}, "sync": sync}
    role = "first stage" if stage == 0 and layout.pipeline > 1 else "last stage" if layout.pipeline > 1 else "training"
    if layout.shared:
        resident |= _engine(cfg, dims, layout)
        peaks["rollout"] = _engine_workspace(cfg, dims)
        role += " + engine"
    return Memory(role, resident, peaks)


def least_mem_fraction(memories: list[Memory], device_bytes: int) -> float:
    """The smallest rollout.mem_fraction_static with which every engine starts, and starts again after a death.

    SGLang measures the free memory F before it loads weights. Later, (1 - fraction) F has to stay free beside weights
    and KV cache. A training rank on the same GPU holds its weights by then and takes the rest of its states meanwhile;
    during a step its allocator also keeps the peak.
    """
    shares = []
    for memory in memories:
        if "KV cache" not in memory.resident:
            continue
        engine = memory.resident["engine weights"] + memory.resident["KV cache"]
        states = sum(memory.resident.values()) - engine
        at_start = memory.resident["runtime"] + memory.resident.get("weights bf16", 0)
        peak = max((sum(parts.values()) for phase, parts in memory.peaks.items() if phase != "rollout"), default=0)
        shares.append((engine + states - at_start) / (device_bytes - at_start))
        shares.append(engine / (device_bytes - states - peak))
    return max(shares)


def training_state(cfg: RunConfig, dims: ModelDims, layout: Layout, stage: int) -> dict[str, int]:
    """Bytes of the policy and its optimizer on a rank of `stage`; tests compare them with Megatron's own tensors."""
    weights = stage_weights(dims, layout, stage)
    count, precision = num_parameters(weights), cfg.precision
    fp8 = precision.train == "fp8"
    return {
        "weights bf16": WEIGHT_BYTES * count,
        "weights fp8": fp8_bytes(weights, precision.dgrad == "fp8") if fp8 else 0,
        "main grads fp32": MAIN_GRAD_BYTES * count,
        "masters fp32": MASTER_BYTES * count,
        "Adam moments fp32": MOMENTS_BYTES * count,
    }


def _engine(cfg: RunConfig, dims: ModelDims, layout: Layout) -> dict[str, int]:
    """Weights and KV cache of one engine rank."""
    weights = engine_weights(dims, layout)
    size = WEIGHT_BYTES * num_parameters(weights)
    if cfg.precision.rollout == "fp8":
        size -= sum(WEIGHT_BYTES * w.numel for w in weights if w.quantized)
        size += fp8_bytes(weights, dgrad=False)
    return {"engine weights": size, "KV cache": cfg.rollout.max_total_tokens * kv_bytes_per_token(dims, layout)}


def _engine_workspace(cfg: RunConfig, dims: ModelDims) -> dict[str, int]:
    """fp32 logits of the decode batch, thrice (logits, tempered, log-softmax)."""
    return {"engine logits": 3 * 4 * cfg.rollout.max_running_requests * dims.vocab_size}


def _largest_gather(dims: ModelDims, fp8: bool) -> int:
    """The largest tensor that rank 0 gathers: its shards and the whole."""
    mlp = 2 * dims.intermediate_size * dims.hidden_size * (1 if fp8 else 2) if dims.moe is None else 0
    return 2 * max(2 * dims.vocab_size * dims.hidden_size, mlp)
