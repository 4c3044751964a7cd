"""Formats of FP8 data. `scale` always multiplies: value = data * scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jetrl_megatron.native import tensors as compiled

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
QUANTIZER = "amax448-rne"  # the contract of docs/numerics.md, section 1
BLOCK = 128  # elements of one scale group along the contraction dimension, and rows of one weight block

Granularity = Literal["block", "tensor", "channel"]
ScaleFormat = Literal["fp32", "pow2"]
Precision = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class Fp8Format:
    """How scales are shared and rounded.

    granularity `block`: 1x128 groups of activations and gradients, 128x128 blocks of weights (DeepGEMM, DeepSeek-V3);
    `channel`: one scale per row; `tensor`: one scale per Hugging Face tensor or activation call.
    scale_format `fp32`: amax / 448; `pow2`: the smallest power of two not below it (UE8M0).
    """

    granularity: Granularity = "block"
    scale_format: ScaleFormat = "fp32"


@dataclass(frozen=True)
class Fp8Recipe:
    """What the three GEMMs of a linear and its saved activation use."""

    format: Fp8Format = Fp8Format()
    dgrad: Precision = "fp8"
    wgrad: Precision = "fp8"
    saved_activation: Literal["rowwise", "columnwise", "bf16"] = "rowwise"


@dataclass(frozen=True)
class Fp8Tensor:
    """A quantized matrix whose rows are contracted along the last dimension.

    data: [M, K] E4M3. scale: [M, ceil(K/128)] fp32, one per row and 128-wide group: the emulated backend keeps every
    granularity in this row-expanded form (`compact_weight_scale` gives a weight's [ceil(M/128), ceil(K/128)] grid).
    quantizer: the contract by which data and scale were made.
    """

    data: Tensor
    scale: Tensor
    format: Fp8Format
    quantizer: str = QUANTIZER

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def split(self, num_rows: Sequence[int]) -> list[Fp8Tensor]:
        """Runs of rows, without a copy."""
        parts = zip(self.data.split(list(num_rows)), self.scale.split(list(num_rows)), strict=True)
        return [Fp8Tensor(data, scale, self.format, self.quantizer) for data, scale in parts]

    @classmethod
    def joined(cls, parts: Sequence[Fp8Tensor]) -> Fp8Tensor:
        """Rows one after the other."""
        data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(E4M3)
        return cls(data, torch.cat([part.scale for part in parts]), parts[0].format, parts[0].quantizer)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """data * scale as [M, K], the product in fp32, one rounding."""
        return dequantize(self.data, self.scale, 1, dtype)


def dequantize(data: Tensor, scale: Tensor, rows_per_scale: int, dtype: torch.dtype) -> Tensor:
    """E4M3 data [M, K] times scale [ceil(M/rows_per_scale), ceil(K/128)] as [M, K]: the product in fp32, one
    rounding."""
    if dtype in (torch.bfloat16, torch.float32) and compiled.usable(data):
        return compiled.dequantize(data, scale, rows_per_scale, dtype)
    m, k = data.shape
    wide = scale.repeat_interleave(rows_per_scale, dim=0)[:m].repeat_interleave(BLOCK, dim=1)[:, :k]
    return (data.float() * wide).to(dtype)


def num_blocks(length: int) -> int:
    """ceil(length / 128)."""
    return -(-length // BLOCK)
