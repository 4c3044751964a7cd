"""Device functions that kernels over tiles of a matrix share: where a tile lies, and its rows quantized 1x128."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.fp8.gpu.rounding import magnitude_bits, scale_of, to_e4m3

TILES_TOGETHER = 8  # of a GEMM's tiles of M, which run side by side, so that they share B's tiles in the L2 cache


def num_group_tiles(num_rows: int, num_groups: int, tile_m: int) -> int:
    """How many tiles `num_rows` rows of that many groups take at most, however they are shared out."""
    return min(num_rows, (num_rows + num_groups * (tile_m - 1)) // tile_m)


def check_offsets(offsets: Tensor, num_groups: int) -> None:
    if offsets.shape != (num_groups + 1,) or offsets.is_floating_point() or not offsets.is_contiguous():
        raise ValueError(f"offsets: {offsets.dtype} {tuple(offsets.shape)}; rule: integers {(num_groups + 1,)}")


@triton.jit
def tile_at(
    row_block: tl.tensor,
    column_block: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(row indices as int64, column indices, mask of what is inside the matrix) of one tile."""
    rows = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns, (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@triton.jit
def store_quantized_rows(
    x: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    group: tl.tensor,
    inside: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    scale_stride_row: tl.tensor,
    scale_stride_group: tl.tensor,
    POW2: tl.constexpr,
) -> None:
    """Quantize fp32 x [ROWS, up to 128], zeros outside the matrix: one scale per row. Its columns lie in `group`."""
    scale = scale_of(tl.max(magnitude_bits(x), axis=1), POW2)
    scales = scale_ptr + rows * scale_stride_row + group.to(tl.int64) * scale_stride_group
    tl.store(scales, scale, mask=rows < num_rows)
    tl.store(code_ptr + rows[:, None] * num_columns + columns[None, :], to_e4m3(x, scale[:, None]), mask=inside)


@triton.jit
def tile_of_program(
    m: tl.tensor, n: tl.tensor, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TOGETHER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Row and column indices (int64) of the output tile of this program: TOGETHER tiles of M side by side."""
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    wave = tl.program_id(0) // (TOGETHER * tiles_n)
    height = tl.minimum(tiles_m - wave * TOGETHER, TOGETHER)
    inside_wave = tl.program_id(0) % (TOGETHER * tiles_n)
    rows = (wave * TOGETHER + inside_wave % height).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    return rows, (inside_wave // height).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)


@triton.jit
def tile_of_group(
    offset_ptr: tl.tensor, num_groups: tl.tensor, TILE_M: tl.constexpr, GROUPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(group, its first row in the tile of M number program_id(0), the group's end), of rows that are sorted by group.
    offset [num_groups + 1]: where the groups begin, and the end of the last. No tile has rows of two groups; an end of
    0 says that there is no such tile. GROUPS: num_groups rounded up."""
    index = tl.arange(0, GROUPS)
    start = tl.load(offset_ptr + index, mask=index < num_groups, other=0)
    end = tl.load(offset_ptr + index + 1, mask=index < num_groups, other=0)
    num_tiles = (end - start + TILE_M - 1) // TILE_M
    place = tl.program_id(0) - (tl.cumsum(num_tiles, 0) - num_tiles)
    mine = (place >= 0) & (place < num_tiles)
    group = tl.sum(tl.where(mine, index, 0), axis=0)
    first = tl.sum(tl.where(mine, start + place * TILE_M, 0), axis=0)
    return group, first, tl.sum(tl.where(mine, end, 0), axis=0)
