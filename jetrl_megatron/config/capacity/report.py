"""One plan: memory, alignment, tokens, times, what does not fit and the nearest layout that does."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from jetrl_megatron.config.capacity.activations import layer_bytes_per_token
from jetrl_megatron.config.capacity.hardware import GIB, H100, Hardware
from jetrl_megatron.config.capacity.layout import Layout, resolve_layout
from jetrl_megatron.config.capacity.memory import Memory, least_mem_fraction, memory_of, worst
from jetrl_megatron.config.capacity.steptime import Lengths, StepTime, step_time
from jetrl_megatron.config.capacity.weights import bundle_bytes
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.errors import ConfigError, Violation
from jetrl_megatron.config.plan import TP_CANDIDATES, check_model, working_tp
from jetrl_megatron.config.schema import RunConfig

MAX_GPUS = 1024
HEADROOM = 0.95  # share of a GPU's memory that may be used: the allocator fragments


@dataclass(frozen=True)
class CapacityPlan:
    """violations: rules of the model's dims that are broken; memories: one per kind of GPU; overrides: the nearest
    layout that fits, as `key=value`, with its number of GPUs, or None."""

    layout: Layout
    memories: list[Memory]
    limit_bytes: int
    violations: list[Violation]
    time: StepTime
    lengths: Lengths
    working_tp: dict[str, list[int]]
    bundle_bytes: int
    saved_bytes_per_token: dict[str, dict[str, float]]
    nearest: tuple[int, tuple[str, ...]] | None

    @property
    def worst(self) -> Memory:
        return worst(self.memories)

    @property
    def fits(self) -> bool:
        return not self.violations and self.worst.total_bytes <= self.limit_bytes

    def as_dict(self) -> dict[str, Any]:
        """What `jetrl plan --json` prints; bytes and seconds."""
        return {
            "fits": self.fits,
            "limit_bytes": self.limit_bytes,
            "layout": {
                **asdict(self.layout),
                "training_ranks": self.layout.training_ranks,
                "shared": self.layout.shared,
            },
            "memory": [
                {"role": m.role, "total_bytes": m.total_bytes, "resident_bytes": m.resident, "peak_bytes": m.peaks}
                for m in self.memories
            ],
            "violations": [str(v) for v in self.violations],
            "working_tp": self.working_tp,
            "step_tokens": self.time.step_tokens,
            "decode_batch": self.time.decode_batch,
            "decode_rounds": self.time.decode_rounds,
            "assumed_tokens": {"prompt": self.lengths.prompt, "response": self.lengths.response},
            "estimated_seconds": {**self.time.phases_s, "total": self.time.total_s},
            "sync_bundle_bytes": self.bundle_bytes,
            "saved_bytes_per_token_and_layer": self.saved_bytes_per_token,
            "nearest": None if self.nearest is None else {"gpus": self.nearest[0], "overrides": list(self.nearest[1])},
        }


def make_plan(
    cfg: RunConfig,
    dims: ModelDims,
    gpus: int | None = None,
    gpu_memory_gib: float = 80.0,
    lengths: Lengths | None = None,
    hardware: Hardware = H100,
    search: bool = True,
) -> CapacityPlan:
    """lengths: mean tokens, by default the longest ones. Raises ConfigError for sizes that are no layout."""
    emulated = cfg.precision.backend == "emulated"
    violations = check_model(cfg, dims, emulated=emulated)
    shape_faults = [v for v in violations if v.key.startswith(("parallel.", "rollout.tensor", "rollout.expert"))]
    layout = resolve_layout(cfg, gpus, hardware.gpus_per_node)
    memories, limit_bytes = memory_of(cfg, dims, layout, hardware), int(HEADROOM * gpu_memory_gib * GIB)
    if not shape_faults and worst(memories).total_bytes <= limit_bytes:
        violations = [*violations, *_mem_fraction(cfg, memories, gpu_memory_gib)]
    lengths = lengths or Lengths(cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens)
    invariant = emulated if cfg.parallel.tp_invariant is None else cfg.parallel.tp_invariant
    plan = CapacityPlan(
        layout=layout,
        memories=memories,
        limit_bytes=limit_bytes,
        violations=violations,
        time=step_time(cfg, dims, layout, hardware, lengths),
        lengths=lengths,
        working_tp={
            "train": working_tp(cfg, dims, "train", invariant),
            "engine": working_tp(cfg, dims, "engine", invariant),
        },
        bundle_bytes=bundle_bytes(dims, cfg.precision.rollout == "fp8"),
        saved_bytes_per_token=_saved(cfg, dims, layout),
        nearest=None,
    )
    if plan.fits or not search:
        return plan
    return replace(plan, nearest=nearest_layout(cfg, dims, layout, gpu_memory_gib, lengths, hardware))


def _saved(cfg: RunConfig, dims: ModelDims, layout: Layout) -> dict[str, dict[str, float]]:
    """Saved activations with the run's precision and, for comparison, all in bf16."""
    bf16 = cfg.precision.model_copy(update={"train": "bf16"})
    return {
        "run": layer_bytes_per_token(dims, layout, cfg.precision),
        "bf16": layer_bytes_per_token(dims, layout, bf16),
    }


def _mem_fraction(cfg: RunConfig, memories: list[Memory], gpu_memory_gib: float) -> list[Violation]:
    least = least_mem_fraction(memories, int(gpu_memory_gib * GIB))
    given = cfg.rollout.mem_fraction_static
    if least <= given:
        return []
    rule = f"weights and KV cache of an engine rank need {least:.3f} of the memory that is free when an engine starts"
    fix = f"rollout.mem_fraction_static={math.ceil(100 * least) / 100}, or a smaller rollout.max_total_tokens"
    return [Violation("rollout.mem_fraction_static", str(given), rule, fix)]


def nearest_layout(
    cfg: RunConfig, dims: ModelDims, layout: Layout, gpu_memory_gib: float, lengths: Lengths, hardware: Hardware
) -> tuple[int, tuple[str, ...]] | None:
    """The layout on the fewest GPUs, from `layout.gpus` on in doublings, that breaks no rule and fits; of those the one
    with the fewest changed keys, then the least estimated time."""
    gpus = layout.gpus
    while gpus <= MAX_GPUS:
        found = []
        for changes in _candidates(cfg, dims, gpus):
            changed = _changed(cfg, changes)
            if changed is None:
                continue
            try:
                plan = make_plan(changed, dims, gpus, gpu_memory_gib, lengths, hardware, search=False)
            except ConfigError:
                continue
            if plan.fits:
                overrides = tuple(f"{key}={_text(v)}" for key, v in changes.items() if v != _get(cfg, key))
                found.append((len(overrides), plan.time.total_s, overrides))
        if found:
            return gpus, min(found)[2]
        gpus *= 2
    return None


def _candidates(cfg: RunConfig, dims: ModelDims, gpus: int) -> list[dict[str, Any]]:
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    tokens = sorted({longest, max(cfg.trainer.micro_batch_tokens, longest)}, reverse=True)
    caches = sorted({cfg.rollout.max_total_tokens, max(cfg.rollout.max_total_tokens // 2, longest)}, reverse=True)
    experts = [1] if dims.moe is None else [e for e in (1, 2, 4, 8, 16, 32, 64) if e <= gpus]
    pipelines = [p for p in (1, 2, 4, 8) if dims.num_layers % p == 0]
    out = []
    for t, p, e in itertools.product(TP_CANDIDATES[:4], pipelines, experts):
        if t * p > gpus or gpus % (t * p) or (gpus // p) % e:
            continue
        for batch, cache, recompute in itertools.product(tokens, caches, sorted({cfg.trainer.recompute, True})):
            engine_expert = t if dims.moe is not None and cfg.rollout.expert_parallel > 1 else 1
            out.append(
                {
                    "parallel.tensor": t,
                    "parallel.pipeline": p,
                    "parallel.virtual_pipeline": 1,
                    "parallel.expert": e,
                    "parallel.sequence": t > 1 and (cfg.parallel.sequence or dims.moe is not None),
                    "parallel.data": None if cfg.parallel.data is None else gpus // (t * p),
                    "rollout.tensor_parallel": t if cfg.require_exact else cfg.rollout.tensor_parallel,
                    "rollout.expert_parallel": engine_expert if cfg.require_exact else cfg.rollout.expert_parallel,
                    "rollout.num_engines": max(gpus // (t if cfg.require_exact else cfg.rollout.tensor_parallel), 1),
                    "rollout.max_total_tokens": cache,
                    "trainer.micro_batch_tokens": batch,
                    "trainer.recompute": recompute,
                }
            )
    return out


def _get(cfg: RunConfig, key: str) -> Any:
    section, _, leaf = key.partition(".")
    return getattr(getattr(cfg, section), leaf)


def _changed(cfg: RunConfig, changes: dict[str, Any]) -> RunConfig | None:
    """`cfg` with `changes`, validated; None where they contradict each other."""
    data = cfg.model_dump()
    for key, value in changes.items():
        section, _, leaf = key.partition(".")
        data[section][leaf] = value
    try:
        return RunConfig.model_validate(data)
    except ValueError:
        return None


def _text(value: Any) -> str:
    """As YAML writes it."""
    return "null" if value is None else str(value).lower()
