"""Parallel sizes of a Megatron layout, and the configuration that a converted folder carries along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_megatron.config.checkpoint_files import HF_FOLDER
from jetrl_megatron.weights.convert.source import QUANT_CONFIG
from jetrl_megatron.weights.families.common import EMBEDDING
from jetrl_megatron.weights.io import CONFIG, carry_files, read_json, write_config
from jetrl_megatron.weights.plan import ConversionPlan, layer_of
from jetrl_megatron.weights.rules import Rule


@dataclass(frozen=True)
class Layout:
    """Sizes of tensor, pipeline and expert parallelism."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def check(self, plan: ConversionPlan) -> None:
        """Raises ValueError, with the sizes that work, if the model cannot be split like this."""
        plan.check_tensor_parallel(self.tensor)
        num_layers, moe = plan.dims.num_layers, plan.dims.moe
        _require_divides("pp", self.pipeline, "num_hidden_layers", num_layers)
        _require_divides("ep", self.expert, "num_experts", 1 if moe is None else moe.num_experts)

    def stage_rules(self, plan: ConversionPlan, stage: int, experts: range | None = None) -> list[Rule]:
        """Rules of one pipeline stage; `experts`: of these experts only."""
        count = plan.dims.num_layers // self.pipeline
        last = stage == self.pipeline - 1
        return plan.stage_rules(stage * count, count, stage == 0, last, experts)

    def stage_of(self, plan: ConversionPlan, rule: Rule) -> int:
        """The stage that exports a parameter."""
        layer = layer_of(rule)
        if layer is None:
            return 0 if rule.megatron_name == EMBEDDING else self.pipeline - 1
        return layer // (plan.dims.num_layers // self.pipeline)

    def experts(self, plan: ConversionPlan, rank: int) -> range:
        """Global indices of the experts of one expert-parallel rank; empty for a dense model."""
        count = 0 if plan.dims.moe is None else plan.dims.moe.num_experts // self.expert
        return range(rank * count, (rank + 1) * count)


def _require_divides(key: str, size: int, unit: str, number: int) -> None:
    if size < 1 or number % size:
        works = [n for n in range(1, number + 1) if number % n == 0]
        raise ValueError(f"{key}: {size}; rule: divides {unit} ({number}); fix: use one of {works}")


def carry_model_files(source: Path, config: dict[str, Any], folder: Path) -> None:
    """Put config.json (without quantization), generation config and tokenizer into `folder`/hf."""
    target = folder / HF_FOLDER
    target.mkdir(exist_ok=True)
    write_config(target, {key: value for key, value in config.items() if key != QUANT_CONFIG})
    carry_files(source, target)


def model_files(folder: Path, given: Path | None) -> tuple[Path, dict[str, Any]]:
    """The folder with config.json of a converted checkpoint, and its content. Raises ValueError if there is none."""
    found = folder / HF_FOLDER if given is None else given
    if not (found / CONFIG).is_file():
        raise ValueError(f"{found / CONFIG}: missing; rule: the model's config.json; fix: pass --hf-config DIR")
    return found, read_json(found / CONFIG)
