"""FP8 shards: the quantized weights of every rank of a Megatron layout as safetensors (docs/conversion.md).

Weights are quantized on the 128x128 grid of the unsharded Hugging Face tensor and then cut, so the bytes of a shard do
not depend on the layout, and resharding never quantizes again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.config.checkpoint_files import read_header
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.fp8 import BLOCK, E4M3, Fp8Format, compact_weight_scale, expand_weight_scale
from jetrl_megatron.fp8.format import ScaleFormat
from jetrl_megatron.weights.convert.hf_files import (
    finish_hf,
    fp8_config,
    hf_parts,
    modules_not_quantized,
    write_safetensors,
)
from jetrl_megatron.weights.convert.job import Job, Output, Part, Step, fingerprint
from jetrl_megatron.weights.convert.layout import Layout, carry_model_files, model_files
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.convert.precision import fp8_outputs
from jetrl_megatron.weights.convert.source import DTYPES, Source, Span, Weight
from jetrl_megatron.weights.families.common import EMBEDDING, OUTPUT
from jetrl_megatron.weights.io import read_json
from jetrl_megatron.weights.plan import ConversionPlan, expert_of
from jetrl_megatron.weights.rules import Rule

LAYOUT_FILE = "layout.json"
FORMAT = "jetrl-fp8-shards"
SCALE = "_scale"  # `X.weight_scale`: fp32, one row per row of the shard, one column per block that it touches


def dense_file(tensor: int, stage: int) -> str:
    """Everything but experts, of one tensor- and one pipeline-parallel rank."""
    return f"dense_tp{tensor}_pp{stage}.safetensors"


def expert_file(expert: int, stage: int) -> str:
    """The experts of one expert- and one pipeline-parallel rank."""
    return f"experts_ep{expert}_pp{stage}.safetensors"


@dataclass(frozen=True)
class HfParameter:
    """The tensors of one Megatron parameter in a Hugging Face checkpoint. format: of those that are not FP8 yet."""

    weights: tuple[Weight, ...]
    format: Fp8Format

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dense_dtype

    def dense(self) -> list[Tensor]:
        return [weight.dense() for weight in self.weights]

    def fp8(self, memory: Memory) -> list[tuple[Tensor, Tensor]]:
        """Codes [N, K] as bytes and row-expanded scales of every HF tensor."""
        made = (weight.fp8(self.format, memory) for weight in self.weights)
        return [(codes.view(torch.uint8), expand_weight_scale(scale, len(codes))) for codes, scale in made]


@dataclass(frozen=True)
class ShardedParameter:
    """The shards of one Megatron parameter in a folder of FP8 shards, by tensor-parallel rank."""

    rule: Rule
    shards: tuple[Span, ...]
    scales: tuple[Span, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].dtype

    def dense(self) -> list[Tensor]:
        return self.rule.to_hf([shard.whole() for shard in self.shards])

    def fp8(self, _memory: Memory) -> list[tuple[Tensor, Tensor]]:
        codes = self.rule.to_hf([shard.whole().view(torch.uint8) for shard in self.shards])
        return list(zip(codes, self.rule.to_hf([scale.whole() for scale in self.scales]), strict=True))


@dataclass(frozen=True)
class ToShards:
    """One Megatron parameter, cut for `tensor` ranks: slot = rank."""

    rule: Rule
    source: HfParameter | ShardedParameter
    tensor: int

    def outputs(self) -> Sequence[Output]:
        name, shape, found = self.rule.megatron_name, self.rule.megatron_shape(self.tensor), []
        for rank in range(self.tensor):
            found.append(Output(name, E4M3 if self.rule.quantized else self.source.dtype, shape, rank))
            if self.rule.quantized:
                found.append(Output(name + SCALE, torch.float32, self.rule.scale_shape(self.tensor, rank), rank))
        return found

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        parts = zip(*self.source.fp8(memory), strict=True) if self.rule.quantized else [self.source.dense()]
        kinds = [list(tensors) for tensors in parts]  # codes and scales, or the values
        for rank in range(self.tensor):
            for tensors in kinds:
                yield from ((rank, rows) for rows in self.rule.to_megatron_rows(tensors, self.tensor, rank))


@dataclass(frozen=True)
class ToHf:
    """The HF tensors of one Megatron parameter, FP8 ones in Hugging Face's block layout."""

    rule: Rule
    source: ShardedParameter

    def outputs(self) -> Sequence[Output]:
        if not self.rule.quantized:
            return [Output(hf.name, self.source.dtype, hf.shape) for hf in self.rule.hf]
        return [output for hf in self.rule.hf for output in fp8_outputs(hf.name, hf.shape)]

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        if not self.rule.quantized:
            yield from ((0, tensor) for tensor in self.source.dense())
            return
        for codes, scale in self.source.fp8(memory):
            yield 0, codes
            yield 0, compact_weight_scale(scale)


class Shards:
    """A folder of FP8 shards, opened. Raises ValueError for a missing, truncated or unfitting file."""

    def __init__(self, path: Path, hf_config: Path | None = None) -> None:
        self.path = path
        self.model_dir, self.config = model_files(path, hf_config)
        self.plan = ConversionPlan(ModelDims.from_hf(self.config))
        meta = read_json(path / LAYOUT_FILE)
        if meta.get("format") != FORMAT:
            raise ValueError(f"{path / LAYOUT_FILE}: format {meta.get('format')!r}; rule: {FORMAT}; fix: convert again")
        self.layout = Layout(*(int(meta[key]) for key in ("tensor", "pipeline", "expert")))
        self.layout.check(self.plan)

    @cached_property
    def _spans(self) -> dict[str, dict[str, Span]]:
        """File -> tensor name -> span."""
        found = {}
        for part in _parts(self.plan, self.layout, {}):
            for name in part.files:
                if not (self.path / name).is_file():
                    raise ValueError(f"{self.path / name}: missing; rule: every file of the layout; fix: convert again")
                try:
                    infos = read_header(self.path / name)
                except ValueError as error:
                    raise ValueError(f"{self.path / name}: {error}; rule: complete files; fix: get it again") from error
                found[name] = {
                    info.name: Span(info.name, str(self.path / name), info.start, DTYPES[info.dtype], info.shape)
                    for info in infos
                }
        return found

    def parameter(self, rule: Rule) -> ShardedParameter:
        """Raises ValueError for a missing tensor or one of another shape."""
        expert = expert_of(rule)
        stage = self.layout.stage_of(self.plan, rule)
        if expert is not None:
            files, tensor = [expert_file(expert // len(self.layout.experts(self.plan, 0)), stage)], 1
        else:
            files = [dense_file(rank, stage) for rank in range(self.layout.tensor)]
            tensor = self.layout.tensor
        shape, name = rule.megatron_shape(tensor), rule.megatron_name
        shards = tuple(self._span(file, name, shape) for file in files)
        if not rule.quantized:
            return ShardedParameter(rule, shards, ())
        scales = (self._span(file, name + SCALE, rule.scale_shape(tensor, rank)) for rank, file in enumerate(files))
        return ShardedParameter(rule, shards, tuple(scales))

    def _span(self, file: str, name: str, shape: tuple[int, ...]) -> Span:
        span = self._spans[file].get(name)
        if span is None or span.shape != shape:
            value = "missing" if span is None else f"shape {list(span.shape)}"
            raise ValueError(f"{name}: {value} in {file}; rule: {list(shape)}; fix: convert again")
        return span

    def fingerprint(self) -> list[Any]:
        """Changes when a file does: names, sizes and times."""
        return fingerprint(self.path, self._spans)


def _parts(plan: ConversionPlan, layout: Layout, sources: dict[str, HfParameter | ShardedParameter]) -> list[Part]:
    """The files of a layout: per stage, all tensor-parallel ranks together, then each expert-parallel rank."""

    def steps(rules: list[Rule], tensor: int) -> tuple[Step, ...]:
        return tuple(ToShards(rule, sources[rule.megatron_name], tensor) for rule in rules) if sources else ()

    parts = []
    for stage in range(layout.pipeline):
        names = tuple(dense_file(rank, stage) for rank in range(layout.tensor))
        parts.append(Part(names, steps(layout.stage_rules(plan, stage, range(0)), layout.tensor)))
        for rank in range(layout.expert if plan.dims.moe is not None else 0):
            rules = layout.stage_rules(plan, stage, layout.experts(plan, rank))
            experts = [rule for rule in rules if expert_of(rule) is not None]
            parts.append(Part((expert_file(rank, stage),), steps(experts, 1)))
    return parts


def _job(
    out: Path,
    plan: ConversionPlan,
    layout: Layout,
    sources: dict[str, HfParameter | ShardedParameter],
    model: tuple[Path, dict[str, Any]],
    key: dict[str, Any],
) -> Job:
    layout.check(plan)
    if plan.dims.tied_embeddings:  # the last stage's copy
        sources = {**sources, OUTPUT: sources[EMBEDDING]}
    parts = _parts(plan, layout, sources)

    def finish(folder: Path, _results: list[Any]) -> None:
        meta = {"format": FORMAT, "version": 1, **asdict(layout), "block": [BLOCK, BLOCK]}
        (folder / LAYOUT_FILE).write_text(json.dumps({**meta, "tensors": placements(plan, layout)}, indent=1) + "\n")
        carry_model_files(*model, folder)

    return Job(out, parts, write_safetensors, finish, {**key, "layout": asdict(layout)})


def hf_to_shards(hf: Path, out: Path, layout: Layout, scale_format: ScaleFormat = "fp32") -> Job:
    """FP8 shards of an HF checkpoint; FP8 codes and scales are taken over, anything else is quantized."""
    source, fmt = Source(hf), Fp8Format("block", scale_format)
    sources: dict[str, HfParameter | ShardedParameter] = {
        rule.megatron_name: HfParameter(tuple(source.weights[part.name] for part in rule.hf), fmt)
        for rule in source.plan.rules
    }
    key = {"tool": "hf_to_shards", "files": source.fingerprint(), "scales": scale_format}
    return _job(out, source.plan, layout, sources, (source.path, source.config), key)


def reshard_shards(path: Path, out: Path, layout: Layout, hf_config: Path | None = None) -> Job:
    """FP8 shards of another layout: the same codes and scales, cut elsewhere."""
    shards = Shards(path, hf_config)
    sources: dict[str, HfParameter | ShardedParameter] = {
        rule.megatron_name: shards.parameter(rule) for rule in shards.plan.rules
    }
    key = {"tool": "reshard_shards", "files": shards.fingerprint()}
    return _job(out, shards.plan, layout, sources, (shards.model_dir, shards.config), key)


def shards_to_hf(path: Path, out: Path, hf_config: Path | None = None, workers: int = 1) -> Job:
    """FP8 shards as an FP8 HF checkpoint."""
    shards = Shards(path, hf_config)
    parts = hf_parts([ToHf(rule, shards.parameter(rule)) for rule in shards.plan.rules], workers)
    config = fp8_config(shards.config, modules_not_quantized(shards.plan.hf_names()))
    key = {"tool": "shards_to_hf", "files": shards.fingerprint(), "parts": len(parts)}
    return Job(out, parts, write_safetensors, finish_hf(parts, config, shards.model_dir), key)


def placements(plan: ConversionPlan, layout: Layout) -> dict[str, list[list[dict[str, Any]]]]:
    """Quantized Megatron parameter -> per tensor-parallel rank -> where its rows lie on the HF tensors' grids.

    hf: name; rows, columns: [first, last) on it; block_rows, block_columns: [first, last) of the blocks touched;
    cut: another rank holds a part of a block of this one. An expert has one rank.
    """
    found = {}
    for rule in plan.rules:
        if rule.quantized:
            tensor = 1 if rule.tp_dim is None else layout.tensor
            found[rule.megatron_name] = [_placement(rule, tensor, rank) for rank in range(tensor)]
    return found


def _placement(rule: Rule, tensor: int, rank: int) -> list[dict[str, Any]]:
    num_columns = rule.megatron_shape(tensor)[1]
    found = []
    for part in rule.local_segments(tensor, rank):
        rows = [part.hf_start, part.hf_start + len(part.local_rows)]
        columns = [part.hf_col_start, part.hf_col_start + num_columns]
        ends = ((rows, part.hf_rows), (columns, part.hf_cols))
        found.append(
            {
                "hf": part.hf_name,
                "rows": rows,
                "columns": columns,
                "block_rows": [rows[0] // BLOCK, -(-rows[1] // BLOCK)],
                "block_columns": [columns[0] // BLOCK, -(-columns[1] // BLOCK)],
                "cut": any(at % BLOCK and at != end for span, end in ends for at in span),
            }
        )
    return found
