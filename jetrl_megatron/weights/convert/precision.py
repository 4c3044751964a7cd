"""BF16 -> FP8 and FP8 -> BF16 of Hugging Face checkpoints, in row chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jetrl_megatron.fp8 import E4M3, Fp8Format
from jetrl_megatron.fp8.format import ScaleFormat, num_blocks
from jetrl_megatron.weights.bundle import SCALE_SUFFIX
from jetrl_megatron.weights.convert.hf_files import (
    finish_hf,
    fp8_config,
    hf_parts,
    modules_not_quantized,
    unquantized_config,
    write_safetensors,
)
from jetrl_megatron.weights.convert.job import Job, Output
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.convert.source import Source, Weight, row_chunks


@dataclass(frozen=True)
class Copy:
    """A tensor in its own precision; an FP8 one becomes BF16."""

    weight: Weight

    def outputs(self) -> Sequence[Output]:
        return (Output(self.weight.name, self.weight.dense_dtype, self.weight.shape),)

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        for first, last in row_chunks(self.weight.shape, self.weight.span.row_bytes):
            yield 0, self.weight.rows(first, last)


@dataclass(frozen=True)
class Quantize:
    """A weight as E4M3 and its block scales."""

    weight: Weight
    format: Fp8Format

    def outputs(self) -> Sequence[Output]:
        return fp8_outputs(self.weight.name, self.weight.shape)

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        scales = []
        for codes, scale in self.weight.fp8_chunks(self.format):
            yield 0, codes
            scales.append(scale)
        yield 0, torch.cat(scales)


def fp8_outputs(name: str, shape: tuple[int, ...]) -> tuple[Output, Output]:
    """The two tensors of an FP8 weight [N, K] in the block layout of Hugging Face."""
    grid = (num_blocks(shape[0]), num_blocks(shape[1]))
    return Output(name, E4M3, shape), Output(name + SCALE_SUFFIX, torch.float32, grid)


def bf16_to_fp8(hf: Path, out: Path, scale_format: ScaleFormat = "fp32", workers: int = 1) -> Job:
    """The linears of every layer in FP8, everything else as it is. Raises ValueError for a bad checkpoint, also for one
    that is FP8 already."""
    source = Source(hf)
    if source.is_fp8:
        raise ValueError(f"{hf}: is FP8 already; rule: a BF16, FP16 or FP32 checkpoint; fix: use fp8_to_bf16 first")
    fmt = Fp8Format("block", scale_format)
    quantized = set(source.plan.quantized_hf_names())
    steps = [Quantize(w, fmt) if name in quantized else Copy(w) for name, w in source.weights.items()]
    parts = hf_parts(steps, workers)
    config = fp8_config(source.config, modules_not_quantized(source.weights))
    key = {"tool": "bf16_to_fp8", "scales": scale_format, "parts": len(parts), "files": source.fingerprint()}
    return Job(out, parts, write_safetensors, finish_hf(parts, config, source.path), key)


def fp8_to_bf16(hf: Path, out: Path, workers: int = 1) -> Job:
    """FP8 weights dequantized (the product in fp32, one rounding), the rest as it is. Raises ValueError for a bad
    checkpoint, also for one without FP8 weights."""
    source = Source(hf)
    if not source.is_fp8:
        raise ValueError(f"{hf}: has no FP8 weights; rule: a block-FP8 checkpoint; fix: nothing to convert")
    parts = hf_parts([Copy(weight) for weight in source.weights.values()], workers)
    key = {"tool": "fp8_to_bf16", "parts": len(parts), "files": source.fingerprint()}
    return Job(out, parts, write_safetensors, finish_hf(parts, unquantized_config(source.config), source.path), key)
