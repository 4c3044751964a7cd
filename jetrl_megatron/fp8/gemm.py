"""The exact FP8 GEMM (emulated backend): DeepGEMM's accumulation order, bit for bit independent of shape and threads.

D[M, N] = A[M, K] @ B[N, K].T. Per 128-wide K block the partial sum of 128 products is exact in fp64 (E4M3 values are
integers times 2^-9, so 43 bits suffice) and rounded once to fp32; then
    acc = fma(RN(scale_a * scale_b), partial, acc)   in fp32, K blocks ascending (docs/numerics.md, section 2).
With `num_segments` = S > 1 the K blocks are cut into S equal segments, each with its own chain, added by a fixed
binary tree: the row-parallel sum that is the same at every tensor-parallel size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, Fp8Format, Fp8Tensor, num_blocks
from jetrl_megatron.fp8.quantize import GridSlice, quantize_rows
from jetrl_megatron.native import tensors as compiled

# Elements of the [G, M, N] partial-sum buffer up to which one batched matmul beats a loop over K blocks.
_BATCHED_LIMIT = 1 << 18


# Rows of A from which matrix tiles, which work on 16 rows at once and read 3 bytes per weight, beat vectors.
_MIN_TILE_ROWS = 6


@dataclass(frozen=True)
class PreparedWeight:
    """B [N, K] as operand of the emulated GEMM: codes, scale [G, N] fp32, and the forms that kernels read, each made on
    first use and kept for the weight version.

    num_columns: length of the contraction. order: where its slots come from, [G*128] indices into the columns that the
    caller has (-1: zero padding); None: they are those columns. on_grid: whether rows 0, 128, ... of B begin the blocks
    that share a scale, whatever the scales are.
    """

    codes: Tensor
    scale: Tensor
    format: Fp8Format
    num_columns: int
    order: Tensor | None = None
    on_grid: bool = False

    @property
    def num_rows(self) -> int:
        return self.scale.shape[1]

    @functools.cached_property
    def grid(self) -> Tensor | None:
        """Scales on a grid of 128 rows of B [ceil(N/128), G], DeepGEMM's form; None where B is not on it (a fused
        weight whose parts do not end at multiples of 128)."""
        return self.scale.t()[::BLOCK].contiguous() if self.on_grid else None

    @functools.cached_property
    def wide(self) -> Tensor:
        """fp64 [G, 128, N] of the torch form, 8 bytes per weight."""
        return _wide_blocks(self.codes).permute(1, 2, 0).contiguous()

    @functools.cached_property
    def panels(self) -> Tensor:
        """uint16 panels of the compiled kernel, 2 bytes per weight."""
        return compiled.pack_fp8(self.codes)

    @functools.cached_property
    def tiles(self) -> Tensor | None:
        """int8 digits for matrix tiles, 3 bytes per weight; None with NaN codes, which digits cannot hold."""
        if bool(((self.codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            return None
        return compiled.pack_digits(self.codes)

    def tiles_for(self, num_rows: int) -> Tensor | None:
        """`tiles` if A of `num_rows` rows is to meet this weight on matrix tiles."""
        return self.tiles if num_rows >= _MIN_TILE_ROWS and compiled.has_tiles() else None

    def refresh(self, weight: Fp8Tensor) -> None:
        """Follow new codes and scales of `weight`, whose codes are these. What GPU kernels read stays where it is, for
        captured graphs hold its addresses; the forms of CPU kernels are made again on first use."""
        assert weight.data.data_ptr() == self.codes.data_ptr()
        self.scale.copy_(weight.scale.t())
        for form in ("wide", "panels", "tiles"):
            self.__dict__.pop(form, None)
        if self.__dict__.get("grid") is not None:
            self.__dict__["grid"].copy_(self.scale.t()[::BLOCK])


@dataclass(frozen=True)
class Fp8Experts:
    """One version of the FP8 weights of E experts, stacked: quantized holds codes [E, N, K] and scales [E, N, G];
    slices: where the rows of each lie on the grids of its Hugging Face tensors."""

    quantized: Fp8Tensor
    slices: Sequence[GridSlice]

    def _parts(self) -> list[Fp8Tensor]:
        pairs = zip(self.quantized.data, self.quantized.scale, strict=True)
        return [replace(self.quantized, data=data, scale=scale) for data, scale in pairs]

    @functools.cached_property
    def each(self) -> list[PreparedWeight]:
        """Expert by expert, for backends that do not take them stacked; made on first use."""
        return [prepare_weight(part, self.slices) for part in self._parts()]

    @functools.cached_property
    def grid(self) -> Tensor | None:
        """As `PreparedWeight.grid`, stacked [E, ceil(N/128), G]."""
        on_grid = self.quantized.format.granularity == "block" and _on_grid(self.slices)
        return self.quantized.scale[:, ::BLOCK].contiguous() if on_grid else None

    def refresh(self) -> None:
        """Follow what was written into the memory of `quantized`; see `PreparedWeight.refresh`."""
        if self.__dict__.get("grid") is not None:
            self.__dict__["grid"].copy_(self.quantized.scale[:, ::BLOCK])
        if "each" in self.__dict__:
            for prepared, part in zip(self.each, self._parts(), strict=True):
                prepared.refresh(part)


def _wide_blocks(codes: Tensor) -> Tensor:
    """E4M3 [M, K] -> fp64 [M, G, 128], zero padded."""
    m, k = codes.shape
    wide = codes.to(torch.float64)
    if k % BLOCK:
        wide = torch.nn.functional.pad(wide, (0, -k % BLOCK))
    return wide.view(m, num_blocks(k), BLOCK)


def prepare_weight(weight: Fp8Tensor, slices: Sequence[GridSlice] | None = None) -> PreparedWeight:
    """W [N, K] as operand B of FProp. slices: where its rows lie on the grids of its Hugging Face tensors; None: it is
    no weight, every row has scales of its own."""
    on_grid = slices is not None and weight.format.granularity == "block" and _on_grid(slices)
    scale = weight.scale.t().contiguous()
    return PreparedWeight(weight.data, scale, weight.format, weight.shape[1], on_grid=on_grid)


def _on_grid(slices: Sequence[GridSlice]) -> bool:
    """Whether each run of 128 local rows lies in one block of one Hugging Face tensor."""
    num_rows, first = sum(len(part.rows) for part in slices), 0
    block = torch.empty(num_rows, dtype=torch.int64, device=slices[0].rows.device)
    for part in slices:
        places = torch.arange(part.start, part.start + len(part.rows), device=block.device)
        block[part.rows] = first + places // BLOCK
        first += num_blocks(part.total)
    return torch.equal(block, block[::BLOCK].repeat_interleave(BLOCK)[:num_rows])


def prepare_transposed(weight: Fp8Tensor, slices: Sequence[GridSlice]) -> PreparedWeight:
    """W^T [K, N] as operand B of DGrad, which contracts W's rows.

    Granularity `block`: the same bytes and scales, grouped by the blocks of the Hugging Face grid that `slices` name
    (a fused or cut weight gives shorter groups, padded with zeros). Otherwise W^T is quantized again along N.
    """
    if weight.format.granularity != "block":
        return prepare_weight(quantize_rows(weight.dequantize().t().contiguous(), weight.format))
    order = contraction_order(slices)
    if torch.equal(order, torch.arange(len(weight.data), device=order.device)):
        row_scale = weight.scale[::BLOCK].repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]].contiguous()
        return PreparedWeight(weight.data.t().contiguous(), row_scale, weight.format, len(order), on_grid=True)
    order = order.to(weight.data.device)
    picked = order.clamp_min(0)
    codes = weight.data.view(torch.uint8)[picked]
    codes[order < 0] = 0
    row_scale = weight.scale[picked[::BLOCK]].repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    transposed = codes.t().contiguous().view(E4M3)
    return PreparedWeight(transposed, row_scale.contiguous(), weight.format, len(order), order, on_grid=True)


def contraction_order(slices: Sequence[GridSlice]) -> Tensor:
    """Local rows in groups of 128 slots, one group per block of the grid; unused slots are -1."""
    groups = []
    for part in slices:
        first = 0
        while first < len(part.rows):
            count = min(BLOCK - (part.start + first) % BLOCK, len(part.rows) - first)
            rows = part.rows[first : first + count]
            groups.append(torch.nn.functional.pad(rows, (0, BLOCK - count), value=-1))
            first += count
    return torch.cat(groups)


def whole(num_rows: int) -> list[GridSlice]:
    """The grid of a weight that is one whole Hugging Face tensor."""
    return [GridSlice(torch.arange(num_rows), 0, num_rows)]


@functools.cache
def addcmul_is_fused() -> bool:
    """Whether fp32 `torch.addcmul` on this CPU is a true fused multiply-add (one rounding), for all vector lengths."""
    # Witness: 1 + p*s needs one rounding to give 1 + 2^-23; rounding the product, or the fp64 sum, first gives 1.
    p, s = 8392705 * 2.0**-35, 8384513 * 2.0**-35
    for length in (*range(1, 68), 1000):
        acc, partial, scale = (torch.full((length,), value, dtype=torch.float32) for value in (1.0, p, s))
        if not bool((torch.addcmul(acc, partial, scale) == 1.0 + 2.0**-23).all()):
            return False
    return True


def fma32(acc: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """fp32 a * b + acc with ONE rounding, in place in `acc` where the CPU's addcmul is fused."""
    if acc.device.type == "cpu" and addcmul_is_fused():
        return acc.addcmul_(a, b)
    return fma32_by_round_to_odd(acc, a, b)


def fma32_by_round_to_odd(acc: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The same bits without a hardware fma: the product is exact in fp64, the fp64 sum is rounded to odd (TwoSum gives
    the rounding error), and the second rounding to fp32 is then correct (Boldo and Melquiond, 2008)."""
    x, y = acc.double(), a.double() * b.double()
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    toward_error = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & even & torch.isfinite(total)
    return torch.where(inexact, bits + toward_error, bits).view(torch.float64).float()


def tree_add(parts: Sequence[Tensor]) -> Tensor:
    """Pairwise sum of a power-of-two number of tensors: ((p0+p1)+(p2+p3))."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def ordered_add(parts: Sequence[Tensor], tree: bool) -> Tensor:
    """Sum of the ranks' partial sums in a written order: the binary tree, or left to right."""
    if tree:
        return tree_add(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def num_segments_for(num_k_blocks: int, wanted: int = 4) -> int:
    """Segments of a row-parallel sum over `num_k_blocks` global K blocks: 4, or 2 or 1 where they do not divide."""
    while num_k_blocks % wanted:
        wanted //= 2
    return wanted


def quantized_matmul(
    x: Tensor, b: PreparedWeight, num_segments: int, dtype: torch.dtype, quantized: Fp8Tensor | None = None
) -> tuple[Tensor, Fp8Tensor]:
    """x [M, K] quantized along K (here, unless it comes quantized), times B: [M, N], rounded once to `dtype`, and the
    quantized x."""
    fused = x.dtype == dtype == torch.bfloat16 and b.format.granularity == "block" and compiled.usable(x, b.codes)
    if fused and x.shape[1] == b.num_columns > 0 and b.tiles_for(x.shape[0]) is None:
        pow2 = b.format.scale_format == "pow2"
        if quantized is not None:
            return compiled.fp8_linear(quantized.data, quantized.scale, b.panels, b.scale, num_segments), quantized
        out, codes, scale = compiled.quantized_fp8_linear(x, pow2, b.panels, b.scale, num_segments)
        return out, Fp8Tensor(codes, scale, b.format)
    if quantized is None:
        quantized = quantize_rows(x, b.format)
    return gemm_nt(quantized, b, num_segments).to(dtype), quantized


def gemm_nt(a: Fp8Tensor, b: PreparedWeight, num_segments: int = 1) -> Tensor:
    """fp32 accumulator [M, N] of A [M, K] and B [N, K], rows and columns independent of each other.

    Raises ValueError when K or the scale formats differ (mixed formats would silently mis-scale).
    """
    if a.shape[1] != b.num_columns:
        raise ValueError(f"K: {a.shape[1]} and {b.num_columns}; rule: operands contract the same K; fix: check shapes")
    if a.format.scale_format != b.format.scale_format:
        raise ValueError(
            f"scale_format: {a.format.scale_format} and {b.format.scale_format}; rule: one scale format per GEMM; "
            "fix: quantize both operands with the same format"
        )
    if a.shape[1] == 0:
        return torch.zeros(a.shape[0], b.num_rows, dtype=torch.float32, device=a.data.device)
    if compiled.usable(a.data, b.codes):
        tiles = b.tiles_for(a.shape[0])
        if tiles is not None:
            return compiled.fp8_gemm_digits(a.data, a.scale, tiles, b.scale, num_segments)
        return compiled.fp8_gemm(a.data, a.scale, b.panels, b.scale, num_segments)
    m, num_k = a.scale.shape
    blocks = _wide_blocks(a.data).transpose(0, 1)
    partials: Sequence[Tensor] | Tensor
    if num_k * m * b.num_rows <= _BATCHED_LIMIT:
        partials = torch.bmm(blocks, b.wide).float()
    else:
        partials = _LazyPartials(blocks, b.wide)
    scale_a = a.scale.t().unsqueeze(-1)
    per_segment = num_k // num_segments
    segments = []
    for first in range(0, num_k, per_segment):
        acc = torch.zeros(m, b.num_rows, dtype=torch.float32, device=a.data.device)
        for k in range(first, first + per_segment):
            acc = fma32(acc, partials[k], scale_a[k] * b.scale[k])
        segments.append(acc)
    return tree_add(segments)


class _LazyPartials(Sequence[Tensor]):
    """Partial sums of one K block at a time, so that the [G, M, N] buffer never exists."""

    def __init__(self, a_GM128: Tensor, b_G128N: Tensor):
        self._a, self._b = a_GM128, b_G128N

    def __len__(self) -> int:
        return len(self._a)

    def __getitem__(self, k):  # type: ignore[no-untyped-def, override]
        return torch.mm(self._a[k], self._b[k]).float()
