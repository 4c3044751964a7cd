"""Opens a checkpoint of any of our formats for `verify` and `inspect`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.config.checkpoint_files import is_torch_dist
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.fp8 import E4M3, compact_weight_scale
from jetrl_megatron.megatron.torch_dist import MegatronCheckpoint
from jetrl_megatron.weights.convert.compare import HfTensorsOf, Stored, Tensors
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.convert.ranks import LAYOUT_FILE, Shards
from jetrl_megatron.weights.convert.source import DTYPE_NAMES
from jetrl_megatron.weights.plan import ConversionPlan
from jetrl_megatron.weights.rules import Rule


@dataclass(frozen=True)
class Opened:
    """kind: the format in words. dtypes: of the HF tensors, scales left out. num_bytes: of their data."""

    kind: str
    config: dict[str, Any]
    tensors: Tensors
    dtypes: list[str]
    num_bytes: int

    @property
    def dims(self) -> ModelDims:
        return ModelDims.from_hf(self.config)


class ByParameter:
    """HF tensors of a Megatron-side checkpoint; those of the parameter at hand are kept."""

    def __init__(self, plan: ConversionPlan, load: Callable[[Rule], list[Stored]]) -> None:
        self._rules = {hf.name: rule for rule in plan.rules for hf in rule.hf}
        self._load = load
        self._held: dict[str, Stored] = {}

    def names(self) -> list[str]:
        return list(self._rules)

    def stored(self, name: str) -> Stored:
        if name not in self._held:
            rule = self._rules[name]
            self._held = dict(zip((hf.name for hf in rule.hf), self._load(rule), strict=True))
        return self._held[name]


def open_checkpoint(path: Path, hf_config: Path | None = None) -> Opened:
    """A Hugging Face folder, a torch_dist checkpoint or a folder of FP8 shards. ValueError if it is not whole."""
    if (path / LAYOUT_FILE).is_file():
        return _shards(Shards(path, hf_config))
    if is_torch_dist(path):
        return _distributed(MegatronCheckpoint(path, hf_config))
    tensors = HfTensorsOf(path)
    spans = [weight.span for weight in tensors.source.weights.values()]
    kind = f"Hugging Face, {'block FP8' if tensors.source.is_fp8 else 'unquantized'}"
    dtypes = [DTYPE_NAMES[span.dtype] for span in spans]
    return Opened(kind, tensors.source.config, tensors, dtypes, sum(span.num_bytes for span in spans))


def _shards(shards: Shards) -> Opened:
    def load(rule: Rule) -> list[Stored]:
        parameter = shards.parameter(rule)
        if not rule.quantized:
            return [Stored(tensor) for tensor in parameter.dense()]
        return [Stored(codes.view(E4M3), compact_weight_scale(scale)) for codes, scale in parameter.fp8(Memory())]

    layout = shards.layout
    kind = f"FP8 shards, TP {layout.tensor}, PP {layout.pipeline}, EP {layout.expert}"
    dtypes = {rule: E4M3 if rule.quantized else shards.parameter(rule).dtype for rule in shards.plan.rules}
    return _opened(kind, shards.config, shards.plan, load, dtypes)


def _distributed(checkpoint: MegatronCheckpoint) -> Opened:
    def load(rule: Rule) -> list[Stored]:
        return [Stored(tensor) for tensor in rule.to_hf([checkpoint.parameter(rule)])]

    dtypes = {rule: checkpoint.dtype(rule) for rule in checkpoint.plan.rules}
    return _opened("Megatron torch_dist, any layout", checkpoint.config, checkpoint.plan, load, dtypes)


def _opened(
    kind: str,
    config: dict[str, Any],
    plan: ConversionPlan,
    load: Callable[[Rule], list[Stored]],
    dtypes: dict[Rule, torch.dtype],
) -> Opened:
    tensors = [(hf, dtype) for rule, dtype in dtypes.items() for hf in rule.hf]
    num_bytes = sum(torch.Size(hf.shape).numel() * dtype.itemsize for hf, dtype in tensors)
    return Opened(kind, config, ByParameter(plan, load), [DTYPE_NAMES[dtype] for _, dtype in tensors], num_bytes)
