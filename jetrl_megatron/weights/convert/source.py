"""Where the tensors of a checkpoint lie, checked before anything is written, and their rows.

Rows are mapped from the file, not read: what is written unchanged is then copied once. A mapping lives as long as its
tensor, so that resident memory stays small.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.config.checkpoint_files import TensorInfo, read_header
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.stacked_experts import split_experts
from jetrl_megatron.fp8 import BLOCK, E4M3, Fp8Format, compact_weight_scale, dequantize, quantize_weight
from jetrl_megatron.weights.bundle import SCALE_SUFFIX
from jetrl_megatron.weights.convert.job import fingerprint
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.io import CONFIG, HfCheckpoint, require_finite
from jetrl_megatron.weights.plan import IGNORED_SUFFIXES, ConversionPlan

CHUNK_BYTES = 4 << 20  # stays in the cache between the steps of a conversion
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python has no name for
DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": E4M3,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
QUANT_CONFIG = "quantization_config"


@dataclass(frozen=True)
class Span:
    """A tensor as consecutive bytes of a file. start: its first byte."""

    name: str
    file: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last) in the stored dtype, mapped from the file. Raises ValueError if the file ends early."""
        start, num_bytes = self.start + first * self.row_bytes, (last - first) * self.row_bytes
        offset = start % mmap.ALLOCATIONGRANULARITY
        with open(self.file, "rb") as handle:
            if os.fstat(handle.fileno()).st_size < start + num_bytes:
                raise ValueError(f"{self.file}: ends inside {self.name}; rule: complete files; fix: get it again")
            mapped = mmap.mmap(handle.fileno(), offset + num_bytes, access=mmap.ACCESS_COPY, offset=start - offset)
        with contextlib.suppress(OSError):  # an older kernel maps page by page
            mapped.madvise(_POPULATE_READ)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset).view(self.dtype).view(-1, *self.shape[1:])

    def whole(self) -> Tensor:
        return self.rows(0, self.shape[0])


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def row_chunks(shape: tuple[int, ...], row_bytes: int) -> Iterator[tuple[int, int]]:
    """[first, last) in whole blocks of 128 rows and about CHUNK_BYTES."""
    step = max(CHUNK_BYTES // max(row_bytes, 1) // BLOCK, 1) * BLOCK
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


@dataclass(frozen=True)
class Weight:
    """One HF tensor of a checkpoint. scale: the span of its block scales [ceil(N/128), ceil(K/128)] if it is FP8."""

    span: Span
    scale: Span | None = None

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.span.shape

    @property
    def dense_dtype(self) -> torch.dtype:
        """What `rows` gives: the stored dtype, bf16 for FP8."""
        return self.span.dtype if self.scale is None else torch.bfloat16

    def block_scale(self) -> Tensor:
        """fp32 [ceil(N/128), ceil(K/128)]."""
        assert self.scale is not None
        return self.scale.whole().float()

    def rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last), dequantized if FP8; `first` on a block boundary then. Raises ValueError for NaN, Inf."""
        stored = self.span.rows(first, last)
        if self.scale is None:
            return stored
        blocks = self.scale.rows(first // BLOCK, -(-last // BLOCK)).float()
        return dequantize(stored, blocks, BLOCK, torch.bfloat16)

    def dense(self) -> Tensor:
        """The whole tensor, dequantized if FP8."""
        if self.scale is None:
            return self.span.whole()
        out = torch.empty(self.shape, dtype=torch.bfloat16)
        for first, last in row_chunks(self.shape, self.span.row_bytes):
            out[first:last] = self.rows(first, last)
        return out

    def fp8_chunks(self, fmt: Fp8Format) -> Iterator[tuple[Tensor, Tensor]]:
        """(codes [n, K], block scales [ceil(n/128), ceil(K/128)]) of consecutive rows: as stored, or quantized on the
        grid of this tensor. Raises ValueError for a NaN or Inf."""
        for first, last in row_chunks(self.shape, self.span.row_bytes):
            stored = self.span.rows(first, last)
            if self.scale is not None:
                yield stored, self.scale.rows(first // BLOCK, -(-last // BLOCK)).float()
                continue
            quantized = quantize_weight(stored, fmt)
            scale = compact_weight_scale(quantized.scale)
            if not bool(torch.isfinite(scale).all()):  # the quantizer gives such a block the scale NaN
                require_finite(self.name, stored)
            yield quantized.data, scale

    def fp8(self, fmt: Fp8Format, memory: Memory) -> tuple[Tensor, Tensor]:
        """Whole codes [N, K], in `memory` under the tensor's own last names, and block scales; as `fp8_chunks`."""
        codes = memory.empty(self.name.rsplit(".", 2)[-2], self.shape, E4M3)
        scales, row = [], 0
        for data, scale in self.fp8_chunks(fmt):
            codes[row : row + len(data)] = data
            scales.append(scale)
            row += len(data)
        return codes, torch.cat(scales)


class Source:
    """An HF checkpoint to convert: every tensor of its family is there with the right shape and dtype, none is left
    over, FP8 weights have scales of the right shape that are finite and positive.

    weights: by HF name, in plan order. is_fp8: some weights are FP8. Raises ValueError that names what is wrong.
    """

    def __init__(self, path: Path | str) -> None:
        self.checkpoint = HfCheckpoint(path)
        self.path = self.checkpoint.path
        self.config: dict[str, Any] = self.checkpoint.config
        self.plan = ConversionPlan(ModelDims.from_hf(self.config))
        spans = self._spans()
        scales = {name for name in spans if name.endswith(SCALE_SUFFIX)}
        self.plan.check_names(name for name in spans if name not in scales)
        self.checkpoint.verify_tied(self.plan)
        self.is_fp8 = any(span.dtype == E4M3 for span in spans.values())
        _check_quant_config(self.path, self.config, self.is_fp8)
        shapes = {hf.name: hf.shape for rule in self.plan.rules for hf in rule.hf}
        self.weights = {name: _weight(self.path, spans, name, shape) for name, shape in shapes.items()}
        used = {weight.scale.name for weight in self.weights.values() if weight.scale is not None}
        if scales - used:
            extra = sorted(scales - used)
            raise ValueError(
                f"{extra[0]}: scale of a tensor that is not FP8 ({len(extra)} such); rule: one scale per FP8 weight; "
                f"fix: remove it, or get the checkpoint again"
            )

    def fingerprint(self) -> list[Any]:
        """Changes when a file of the checkpoint does: names, sizes and times."""
        return fingerprint(
            self.path, {CONFIG, *(str(Path(w.span.file).relative_to(self.path)) for w in self.weights.values())}
        )

    def _spans(self) -> dict[str, Span]:
        spans: dict[str, Span] = {}
        for file_name in self.checkpoint.file_names():
            for info in read_header(self.path / file_name):
                if not info.name.endswith(IGNORED_SUFFIXES):
                    spans.update(_expert_spans(self.path, info))
        return spans


def _expert_spans(folder: Path, info: TensorInfo) -> dict[str, Span]:
    """The span of a tensor, or of the tensors of the single experts that it stacks."""
    if info.dtype not in DTYPES:
        raise ValueError(
            f"{info.name}: dtype {info.dtype} in {info.file}; rule: one of {', '.join(DTYPES)}; fix: use a BF16, FP16, "
            f"FP32 or block-FP8 checkpoint"
        )
    whole = Span(info.name, str(folder / info.file), info.start, DTYPES[info.dtype], info.shape)
    out = {}
    for name, (expert, first, last) in split_experts(info.name, info.shape).items():
        row_bytes = info.shape[2] * whole.dtype.itemsize
        start = info.start + (expert * info.shape[1] + first) * row_bytes
        out[name] = Span(name, whole.file, start, whole.dtype, (last - first, info.shape[2]))
    return out or {info.name: whole}


def _check_quant_config(path: Path, config: dict[str, Any], is_fp8: bool) -> None:
    """quantization_config and the stored dtypes agree, and the layout is the one that we know."""
    quant = config.get(QUANT_CONFIG)
    if quant is None:
        if is_fp8:
            raise ValueError(
                f"{QUANT_CONFIG}: missing in {path / CONFIG} although weights are FP8; rule: FP8 checkpoints say how; "
                f"fix: add it, or get config.json again"
            )
        return
    found = {key: quant.get(key) for key in ("quant_method", "weight_block_size")}
    if found != {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]} or not is_fp8:
        raise ValueError(
            f"{QUANT_CONFIG}: {found}{'' if is_fp8 else ' without FP8 weights'}; rule: quant_method fp8, "
            f"weight_block_size [128, 128] and FP8 weights; fix: use a BF16 or a block-FP8 checkpoint"
        )


def _weight(path: Path, spans: dict[str, Span], name: str, shape: tuple[int, ...]) -> Weight:
    span = spans[name]
    if span.shape != shape:
        raise ValueError(
            f"{name}: shape {list(span.shape)}; rule: expected {list(shape)}; fix: check that the weights and "
            f"{path / CONFIG} belong together"
        )
    if span.dtype in FLOATS:
        return Weight(span)
    scale = spans.get(name + SCALE_SUFFIX)
    if span.dtype != E4M3 or len(shape) != 2:
        raise ValueError(
            f"{name}: dtype {DTYPE_NAMES[span.dtype]}; rule: BF16, F16, F32, or F8_E4M3 for matrices; fix: get the "
            f"checkpoint again"
        )
    grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    if scale is None:
        raise ValueError(f"{name}{SCALE_SUFFIX}: missing; rule: every FP8 weight has its scales; fix: get it again")
    if scale.shape != grid or scale.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{scale.name}: {DTYPE_NAMES[scale.dtype]} {list(scale.shape)}; rule: F32, BF16 or F8_E8M0 {list(grid)} "
            f"for a weight of {list(shape)}; fix: get the checkpoint again"
        )
    values = scale.whole().float()
    bad = int((~(torch.isfinite(values) & (values > 0))).sum())
    if bad:
        raise ValueError(
            f"{scale.name}: {bad} of {values.numel()} scales are NaN, infinite or not positive; rule: finite and "
            f"positive; fix: quantize again from the BF16 checkpoint"
        )
    return Weight(span, scale)
