"""The quantizer: the only producer of FP8 data and scales in this project.

Contract per scale group, in fp32 (docs/numerics.md, section 1):
    a = max |x|; a non-finite group gets scale NaN and all codes 0x7F; a == 0 gives scale 1 and codes 0;
    scale = max(RN(a / 448), 2^-126), `pow2`: the smallest power of two >= that;
    code = E4M3_RNE(clamp(x * RN(1 / scale), -448, 448)).
This is DeepGEMM's `per_token_cast_to_fp8` / `per_block_cast_to_fp8` with IEEE division and without the amax floor.
Shape letters: M rows, K contracted dimension, G = ceil(K/128) groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, E4M3_MAX, Fp8Format, Fp8Tensor, ScaleFormat, num_blocks
from jetrl_megatron.native import tensors as compiled

_NAN_CODE = 0x7F
_MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class GridSlice:
    """Where consecutive rows of a local weight lie on the 128-row grid of their unsharded Hugging Face tensor.

    rows: indices of the local rows, in Hugging Face order. start: Hugging Face row of the first one. total: rows of the
    unsharded tensor.
    """

    rows: Tensor
    start: int
    total: int


def scale_from_amax(amax: Tensor, scale_format: ScaleFormat) -> Tensor:
    """fp32 amax (any shape) -> scale of the same shape; NaN where amax is not finite."""
    # A device tensor as divisor: CUDA turns division by a Python scalar into a multiplication by its reciprocal.
    scale = torch.div(amax, torch.full((), E4M3_MAX, dtype=torch.float32, device=amax.device)).clamp_min(_MIN_SCALE)
    if scale_format == "pow2":
        scale = ((scale.view(torch.int32) + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def _encode(groups: Tensor, scale: Tensor) -> Tensor:
    """[..., 128] fp32 groups and their [...] scales -> E4M3 codes."""
    scaled = groups * torch.reciprocal(scale).unsqueeze(-1)
    codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    poisoned = torch.isnan(scale)
    if bool(poisoned.any()):
        codes.view(torch.uint8)[poisoned] = _NAN_CODE
    return codes


def _groups(x: Tensor) -> Tensor:
    """[M, K] -> fp32 [M, G, 128], zero padded."""
    m, k = x.shape
    pad = -k % BLOCK
    wide = torch.nn.functional.pad(x, (0, pad)) if pad else x
    return wide.float().reshape(m, num_blocks(k), BLOCK)


def group_amax(x: Tensor) -> Tensor:
    """[M, K] -> max |x| of every 1x128 group, fp32 [M, G]; NaN propagates."""
    if compiled.usable(x):
        return compiled.group_amax(x)
    return _groups(x).abs().amax(-1)


def quantize_rows(x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
    """Quantize activations or gradients x [M, K] (bf16 or fp32) along K: 1x128 groups for granularity `block`."""
    if fmt.granularity == "block" and compiled.usable(x):
        data, scale = compiled.quantize(x, fmt.scale_format == "pow2")
        return Fp8Tensor(data, scale, fmt)
    groups = _groups(x)
    amax = groups.abs().amax(-1)
    if fmt.granularity != "block" and amax.numel():
        amax = (amax.amax(-1, keepdim=True) if fmt.granularity == "channel" else amax.amax()).expand_as(amax)
    scale = scale_from_amax(amax.contiguous(), fmt.scale_format)
    data = _encode(groups, scale).flatten(1)[:, : x.shape[1]]
    return Fp8Tensor(data.contiguous(), scale, fmt)


def quantize_columns(x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
    """x [T, K] -> FP8 x^T [K, T], groups along tokens: the operands of WGrad."""
    if fmt.granularity == "block" and compiled.usable(x):
        data, scale = compiled.quantize_columns(x, fmt.scale_format == "pow2")
        return Fp8Tensor(data, scale, fmt)
    return quantize_rows(x.t().contiguous(), fmt)


def quantize_weight(
    weight: Tensor,
    fmt: Fp8Format,
    slices: Sequence[GridSlice] | None = None,
    share_amax: Callable[[Tensor], Tensor] | None = None,
) -> Fp8Tensor:
    """The form of `fp8.quantize_weight` for any device."""
    if slices is None and share_amax is None and fmt.granularity == "block" and compiled.usable(weight):
        data, scale = compiled.quantize_blocks(weight, fmt.scale_format == "pow2")
        return Fp8Tensor(data, scale, fmt)
    row_amax = group_amax(weight)
    if slices is None:
        slices = [GridSlice(torch.arange(weight.shape[0], device=weight.device), 0, weight.shape[0])]
    scale = torch.empty_like(row_amax)
    for part in slices:
        scale[part.rows] = scale_from_amax(_shared_amax(row_amax[part.rows], part, fmt, share_amax), fmt.scale_format)
    if compiled.usable(weight):
        return Fp8Tensor(compiled.encode(weight, scale), scale, fmt)
    data = _encode(_groups(weight), scale).flatten(1)[:, : weight.shape[1]]
    return Fp8Tensor(data.contiguous(), scale, fmt)


def _shared_amax(
    row_amax: Tensor, part: GridSlice, fmt: Fp8Format, share_amax: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Per-row amax [n, G] of one Hugging Face tensor's rows -> amax of the scale group each row belongs to."""
    if fmt.granularity == "channel":
        return row_amax.amax(-1, keepdim=True).expand_as(row_amax).contiguous()
    if fmt.granularity == "tensor":
        return row_amax.amax().expand_as(row_amax).contiguous()
    block_of_row = torch.arange(part.start, part.start + len(row_amax), device=row_amax.device) // BLOCK
    grid = row_amax.new_zeros(num_blocks(part.total), row_amax.shape[1])
    index = block_of_row.unsqueeze(1).expand_as(row_amax)
    grid.scatter_reduce_(0, index, row_amax, "amax")
    if share_amax is not None:
        grid = share_amax(grid)
    return grid[block_of_row]


def compact_weight_scale(row_scale: Tensor) -> Tensor:
    """Row-expanded scale [N, G] of one whole Hugging Face tensor -> its block grid [ceil(N/128), G]."""
    return row_scale[::BLOCK].contiguous()


def expand_weight_scale(block_scale: Tensor, num_rows: int) -> Tensor:
    """Inverse of `compact_weight_scale`: [ceil(N/128), G] -> [N, G]."""
    return block_scale.repeat_interleave(BLOCK, dim=0)[:num_rows].contiguous()
