"""Rules between Hugging Face tensors and Megatron parameters: pure algebra on tensors, no process groups.

A `Rule` says how one Megatron parameter is laid out as rows of its Hugging Face (HF) tensors. Each kind of layout is
one small function that lists, for one tensor-parallel (TP) rank, the runs of HF rows that make up the local shard from
top to bottom. Sharding, the inverse, the local shapes and the positions of local rows on the HF tensor's block grid
all follow from those runs, so they cannot disagree.

Shape legend: N rows and K columns of an HF tensor, n and k rows and columns of a local Megatron shard, c columns of
the grid at hand (K for weights and FP8 codes, ceil(K / 128) for row-expanded scales, 1-D for biases and norms).

Layouts as in Megatron-Core: `SelfAttention.get_query_key_value_tensors` (qkv), `MLP` with a gated linear unit (fc1),
`VocabParallelEmbedding` (vocab), `ColumnParallelLinear` and `RowParallelLinear` (plain).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a weight block; blocks are counted on the unsharded HF tensor
PADDING = -1  # `Run.part` of rows that exist only in Megatron


class Units(NamedTuple):
    """What a tensor-parallel cut must not split: `number` equal units, named after the field of config.json."""

    name: str
    number: int


@dataclass(frozen=True)
class HfTensor:
    """Name and unsharded shape of a Hugging Face tensor: (N, K) for weights, (N,) for biases and norms."""

    name: str
    shape: tuple[int, ...]


class Run(NamedTuple):
    """`length` consecutive rows from row `start` of HF tensor number `part` (PADDING: zero rows of no HF tensor)."""

    part: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Segment:
    """Where the rows of one local Megatron shard lie on one HF tensor.

    local_rows: int64 [rows], rows of the local shard in HF order: local row `local_rows[i]` is HF row `hf_start + i`.
    hf_start: first of those rows on the unsharded HF tensor; hf_rows: N, all its rows.
    hf_col_start, hf_cols: first local column on the HF tensor and K, all its columns (0 and 1 for 1-D tensors).
    """

    hf_name: str
    local_rows: Tensor
    hf_start: int
    hf_rows: int
    hf_col_start: int
    hf_cols: int


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF tensors that it is made of, in the order of the layout.

    megatron_name: with the GLOBAL layer index, e.g. `decoder.layers.3.self_attention.linear_qkv.weight`.
    kind: a key of KINDS. tp_dim: the dimension that TP shards (0 rows, 1 columns), None if every rank holds all.
    tp_units: the TP size must divide their number (kv heads, intermediate size); None where any TP size works.
    quantized: the linear runs in FP8.
    export: False for a copy that is loaded from HF but never written back (tied embedding on the last stage).
    """

    megatron_name: str
    hf: tuple[HfTensor, ...]
    kind: str = "plain"
    tp_dim: int | None = None
    tp_units: Units | None = None
    quantized: bool = False
    export: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.megatron_name}: kind {self.kind!r}; rule: one of {sorted(KINDS)}; fix: use one")
        num_parts = KINDS[self.kind].num_parts
        assert len(self.hf) == num_parts, f"{self.megatron_name}: kind {self.kind} takes {num_parts} HF tensors"
        assert self.tp_dim in ((None, 0, 1) if self.kind == "plain" else (None, 0)), f"{self.megatron_name}: tp_dim"

    # ---------------------------------------------------------------- sizes
    def check_tensor_parallel(self, tp: int) -> None:
        """Raises ValueError, naming the tensors and the TP sizes that work, if this parameter cannot be cut tp ways."""
        if tp < 1:
            raise ValueError(f"tensor_parallel: {tp}; rule: at least 1; fix: use 1 or more")
        if self.tp_units is not None and self.tp_units.number % tp:
            unit, number = self.tp_units
            works = [size for size in range(1, number + 1) if number % size == 0]
            shown = ", ".join(map(str, works[:8])) + (", ..." if len(works) > 8 else "")
            names = ", ".join(f"{h.name} {list(h.shape)}" for h in self.hf)
            raise ValueError(
                f"tensor_parallel: {tp}; rule: must divide {unit} ({number}) to cut {names}; "
                f"fix: use a tensor-parallel size in {{{shown}}}"
            )

    def megatron_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the local shard, (n, k) or (n,), the same on every TP rank."""
        num_rows = sum(run.length for run in self.runs(tp, 0))
        if len(self.hf[0].shape) == 1:
            return (num_rows,)
        num_cols = self.hf[0].shape[1]
        return (num_rows, num_cols // tp if self.tp_dim == 1 else num_cols)

    def scale_shape(self, tp: int, rank: int) -> tuple[int, int]:
        """Shape of the row-expanded scales of one shard: a row per local row, a column per block that it touches."""
        rows, cols = self.megatron_shape(tp)
        if self.tp_dim != 1:
            return rows, -(-cols // BLOCK)
        start, stop = self._column_span(BLOCK, tp, rank)
        return rows, stop - start

    def runs(self, tp: int, rank: int) -> list[Run]:
        """Runs of HF rows of the local shard of TP rank `rank`, top to bottom. Raises ValueError for a bad tp."""
        self.check_tensor_parallel(tp)
        assert 0 <= rank < tp, (rank, tp)
        if self.tp_dim is None:
            tp, rank = 1, 0
        return [run for run in KINDS[self.kind].runs(self, tp, rank) if run.length]

    # ---------------------------------------------------------------- HF -> Megatron
    def to_megatron(self, parts: Sequence[Tensor], tp: int) -> list[Tensor]:
        """Cut full HF tensors into the tp local Megatron shards (index = TP rank), bit for bit.

        parts: one tensor per entry of `hf`, [N, c] with c = K or ceil(K / 128), or [N]; one dtype, any dtype.
        Returns tensors [n, c_local] (or [n]), views of `parts` where possible. Where a column shard cuts a block of
        the coarse grid, both neighbours get that block's column. Raises ValueError for a wrong shape, dtype or tp.
        """
        self.check_tensor_parallel(tp)
        return [self.to_megatron_shard(parts, tp, rank) for rank in range(tp)]

    def to_megatron_shard(self, parts: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        """The local Megatron shard of TP rank `rank` alone; as `to_megatron`."""
        pieces = self.to_megatron_rows(parts, tp, rank)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 0)

    def to_megatron_rows(self, parts: Sequence[Tensor], tp: int, rank: int) -> list[Tensor]:
        """As `to_megatron_shard`, as consecutive rows in pieces, which are views except for padding."""
        runs = self.runs(tp, rank)
        grid = self._check_parts(parts)
        pieces = [self._rows(parts, run) for run in runs]
        if self.tp_dim == 1 and grid:
            start, stop = self._column_span(grid, tp, rank)
            pieces = [piece.narrow(1, start, stop - start) for piece in pieces]
        return pieces

    # ---------------------------------------------------------------- Megatron -> HF
    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of `to_megatron`: the local shards of all TP ranks, in rank order, to the full HF tensors.

        Padding rows are cut. A replicated parameter is taken from rank 0. Returns views where possible. Raises
        ValueError for a wrong shape, dtype or number of shards, or if two shards disagree on a block that both hold.
        """
        tp = len(shards)
        grid = self._check_shards(shards)
        if self.tp_dim is None:
            shards = shards[:1]
        elif self.tp_dim == 1:
            shards, tp = [self._join_columns(shards, grid)], 1
        pieces: list[list[tuple[int, Tensor]]] = [[] for _ in self.hf]
        for rank, shard in enumerate(shards):
            row = 0
            for run in self.runs(tp, rank):
                if run.part != PADDING:
                    pieces[run.part].append((run.start, shard.narrow(0, row, run.length)))
                row += run.length
        ordered = [[piece for _, piece in sorted(found, key=lambda item: item[0])] for found in pieces]
        return [found[0] if len(found) == 1 else torch.cat(found, 0) for found in ordered]

    def local_segments(self, tp: int, rank: int) -> list[Segment]:
        """For every HF tensor, which local rows of TP rank `rank` lie where on it (the global 128x128 grid).

        One segment per HF tensor that has rows on this rank; padding rows are in none. Raises ValueError for a bad tp.
        """
        starts: list[list[tuple[int, int, int]]] = [[] for _ in self.hf]  # (HF row, local row, length)
        row = 0
        for run in self.runs(tp, rank):
            if run.part != PADDING:
                starts[run.part].append((run.start, row, run.length))
            row += run.length
        segments = []
        for hf, found in zip(self.hf, starts, strict=True):
            if not found:
                continue
            found.sort()
            local_rows = torch.cat([torch.arange(local, local + length) for _, local, length in found])
            hf_start, last = found[0][0], found[-1][0] + found[-1][2]
            assert last - hf_start == len(local_rows), f"{self.megatron_name}: rows of {hf.name} are not contiguous"
            num_cols = hf.shape[1] if len(hf.shape) == 2 else 1
            col_start = rank * (num_cols // tp) if self.tp_dim == 1 else 0
            segments.append(Segment(hf.name, local_rows, hf_start, hf.shape[0], col_start, num_cols))
        return segments

    # ---------------------------------------------------------------- helpers
    def _rows(self, parts: Sequence[Tensor], run: Run) -> Tensor:
        if run.part == PADDING:
            return parts[0].new_zeros((run.length, *parts[0].shape[1:]))
        return parts[run.part].narrow(0, run.start, run.length)

    def _column_span(self, grid: int, tp: int, rank: int) -> tuple[int, int]:
        """Grid columns [start, stop) that hold the local columns of `rank`; grid: columns per grid column, 1 or 128."""
        num_cols = self.hf[0].shape[1]
        local = num_cols // tp
        return (rank * local) // grid, -(-((rank + 1) * local) // grid)

    def _join_columns(self, shards: Sequence[Tensor], grid: int) -> Tensor:
        tp, joined_to = len(shards), 0
        pieces: list[Tensor] = []
        for rank, shard in enumerate(shards):
            start, stop = self._column_span(grid, tp, rank)
            shared = joined_to - start  # 1 if the previous shard already holds this shard's first block, else 0
            if shared and not _same_bits(pieces[-1].narrow(1, pieces[-1].shape[1] - 1, 1), shard.narrow(1, 0, 1)):
                raise ValueError(
                    f"{self.hf[0].name}: TP ranks {rank - 1} and {rank} disagree on block column {start}, which their "
                    f"boundary cuts; rule: one value per block; fix: quantize with the amax shared across ranks"
                )
            if stop > joined_to:
                pieces.append(shard.narrow(1, shared, stop - joined_to))
                joined_to = stop
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def _check_parts(self, parts: Sequence[Tensor]) -> int:
        """Columns per grid column of `parts` (1, 128, or 0 for 1-D); ValueError if they do not fit the rule."""
        if len(parts) != len(self.hf):
            raise ValueError(
                f"{self.megatron_name}: {len(parts)} tensors given; rule: {[h.name for h in self.hf]}; fix: pass these"
            )
        grids = []
        for hf, part in zip(self.hf, parts, strict=True):
            grids.append(_grid_of(hf.name, part, hf.shape, (hf.shape[0], *_coarse(hf.shape))))
        self._check_alike(parts, grids)
        return grids[0]

    def _check_shards(self, shards: Sequence[Tensor]) -> int:
        fine = self.megatron_shape(len(shards))
        grids = []
        for rank, shard in enumerate(shards):
            coarse = self.scale_shape(len(shards), rank) if len(fine) == 2 else fine
            grids.append(_grid_of(f"{self.megatron_name} (TP rank {rank})", shard, fine, coarse))
        self._check_alike(shards, grids)
        return grids[0]

    def _check_alike(self, tensors: Sequence[Tensor], grids: Sequence[int]) -> None:
        if len({t.dtype for t in tensors}) > 1 or len(set(grids)) > 1:
            raise ValueError(
                f"{self.megatron_name}: tensors of {[f'{t.dtype} {list(t.shape)}' for t in tensors]}; rule: one dtype "
                f"and one column grid; fix: convert {[h.name for h in self.hf]} alike"
            )


def _coarse(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-cols // BLOCK) for cols in shape[1:])


def _grid_of(name: str, tensor: Tensor, fine: tuple[int, ...], coarse: tuple[int, ...]) -> int:
    shape = tuple(tensor.shape)
    if shape == fine:
        return 1 if len(fine) == 2 else 0
    if shape == coarse:
        return BLOCK
    also = f" (or {list(coarse)} for scales)" if len(fine) == 2 else ""
    raise ValueError(
        f"{name}: shape {list(shape)}; rule: expected {list(fine)}{also}; fix: check that the weights and the model's "
        f"config.json belong together"
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---------------------------------------------------------------- layouts: runs of HF rows of one local shard
def _plain_runs(rule: Rule, tp: int, rank: int) -> list[Run]:
    num_rows = rule.hf[0].shape[0]
    return [Run(0, rank * (num_rows // tp), num_rows // tp) if rule.tp_dim == 0 else Run(0, 0, num_rows)]


def _qkv_runs(rule: Rule, tp: int, rank: int) -> list[Run]:
    """Per kv head: the q heads of its group, then its k head, then its v head; ranks hold whole groups."""
    assert rule.tp_units is not None, f"{rule.megatron_name}: tp_units must be the kv heads"
    num_groups = rule.tp_units.number
    local = num_groups // tp
    rows = [hf.shape[0] // num_groups for hf in rule.hf]
    groups = range(rank * local, (rank + 1) * local)
    return [Run(part, group * rows[part], rows[part]) for group in groups for part in range(3)]


def _gate_up_runs(rule: Rule, tp: int, rank: int) -> list[Run]:
    """The gate rows of this rank, then its up rows."""
    local = rule.hf[0].shape[0] // tp
    return [Run(part, rank * local, local) for part in range(2)]


def _vocab_runs(rule: Rule, tp: int, rank: int) -> list[Run]:
    """Vocabulary rows, padded at the end to a multiple of tp (`ModelDims.padded_vocab_size`)."""
    num_rows = rule.hf[0].shape[0]
    local = -(-num_rows // tp)
    real = min(max(num_rows - rank * local, 0), local)
    return [Run(0, rank * local, real), Run(PADDING, 0, local - real)]


class Kind(NamedTuple):
    """num_parts: HF tensors of one Megatron parameter. runs: the layout."""

    num_parts: int
    runs: Callable[[Rule, int, int], list[Run]]


KINDS: dict[str, Kind] = {
    "plain": Kind(1, _plain_runs),
    "qkv": Kind(3, _qkv_runs),
    "gate_up": Kind(2, _gate_up_runs),
    "vocab": Kind(1, _vocab_runs),
}
