"""Device functions that kernels over tiles of a matrix share: where a tile lies, and its rows quantized 1x128."""

from __future__ import annotations

import triton
import triton.language as tl

from jetrl_megatron.fp8.gpu.rounding import magnitude_bits, scale_of, to_e4m3

TILES_TOGETHER = 8  # of a GEMM's tiles of M, which run side by side, so that they share B's tiles in the L2 cache


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
