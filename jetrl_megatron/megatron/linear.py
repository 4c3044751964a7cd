"""Column- and row-parallel linears of Megatron-Core that compute with our operators, in FP8 or exact BF16.

Initialisation, sharding and checkpoints stay Megatron's; only the arithmetic is ours. The quantized weight is made once
per weight version and is the very tensor that weight sync sends to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import (
    BLOCK,
    Fp8Format,
    Fp8Recipe,
    Fp8Weight,
    GridSlice,
    num_segments_for,
    quantize_weight,
    whole,
)
from jetrl_megatron.fp8.linear import UNSHARED, SharedInput
from jetrl_megatron.megatron.collectives import ordered_sum, share_amax
from jetrl_megatron.megatron.overlap import ColumnParallelInput


@dataclass
class WeightVersion:
    """Counter shared by all modules of a model; it changes whenever the weights do."""

    value: int = 0


@dataclass(frozen=True)
class LinearPrecision:
    """How the linears of one model compute. fp8: FProp in FP8, else exact BF16; shard_local: a tensor-parallel shard of
    K that cuts a 1x128 group has a grid of its own, from its first column on (never tp_invariant)."""

    fp8: bool
    recipe: Fp8Recipe
    tp_invariant: bool = True
    shard_local: bool = False
    version: WeightVersion = field(default_factory=WeightVersion)

    @property
    def carried_format(self) -> Fp8Format | None:
        """In which an operator in front of a linear leaves its result quantized too. Not where bf16 activations are
        saved: their memory would keep the codes until backward."""
        return self.recipe.format if self.fp8 and self.recipe.saved_activation != "bf16" else None

    @property
    def rows_travel(self) -> bool:
        """Whether sequence-parallel ranks quantize and keep their own rows of an input: not where codes or saved groups
        of tokens depend on other ranks' rows."""
        return not self.fp8 or (
            self.recipe.saved_activation != "columnwise" and self.recipe.format.granularity != "tensor"
        )


class _PreciseLinear:
    """What both linears share. `configure` must be called once after construction."""

    weight: Tensor
    tp_group: dist.ProcessGroup
    precision: LinearPrecision
    slices: Sequence[GridSlice]
    splits_k = False

    def configure(self, precision: LinearPrecision, slices: Sequence[GridSlice] | None) -> None:
        if precision.fp8 and self.cuts_groups and (precision.tp_invariant or not precision.shard_local):
            raise ValueError(
                f"parallel.tensor: {self.tp_group.size()}; rule: K per rank ({self.weight.shape[1]}) is a multiple of "
                f"{BLOCK}; fix: a smaller size, or precision.misaligned=shard_local with parallel.tp_invariant=false"
            )
        self.precision = precision
        self.slices = whole(self.weight.shape[0]) if slices is None else slices
        self._cached: tuple[int, Any] | None = None
        self._fp8_cached: tuple[int, Fp8Weight] | None = None

    @property
    def cuts_groups(self) -> bool:
        """Whether this rank's K ends inside a 1x128 group: its FP8 weight then is no part of a global one."""
        return self.splits_k and self.tp_group.size() > 1 and self.weight.shape[1] % BLOCK != 0

    def fp8_weight(self) -> Fp8Weight:
        """The FP8 weight of the current version (a collective call where shards cut blocks)."""
        version = self.precision.version.value
        if self._fp8_cached is None or self._fp8_cached[0] != version:
            shared = partial(share_amax, group=self.tp_group) if self._cuts_blocks() else None
            quantized = quantize_weight(self.weight, self.precision.recipe.format, self.slices, shared)
            self._fp8_cached = (version, Fp8Weight.of(quantized, self.slices))
        return self._fp8_cached[1]

    def num_segments(self) -> int:
        """Segments of this rank's K that are summed apart."""
        return 1

    def _cuts_blocks(self) -> bool:
        """Whether any rank's rows start inside a block of the Hugging Face grid; the same answer on every rank."""
        return any(part.total != len(part.rows) and len(part.rows) % BLOCK for part in self.slices)

    def exact_weight(self) -> ops.ExactWeight:
        version = self.precision.version.value
        if self._cached is None or self._cached[0] != version:
            self._cached = (version, self._prepare_exact())
        weight: ops.ExactWeight = self._cached[1]
        return weight

    def _prepare_exact(self) -> ops.ExactWeight:
        return ops.ExactWeight.of(self.weight)


class PreciseColumnParallelLinear(_PreciseLinear, ColumnParallelLinear):
    """Columns of the output are split over ranks: every rank contracts all of K, so splitting is exact as it is."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **_unused: Any,
    ) -> Tensor:
        if sequence_parallel and not self.precision.rows_travel:
            input, sequence_parallel = gather_from_sequence_parallel_region(input, group=tp_group), False
        shared: SharedInput = UNSHARED
        if tp_group is not None and tp_group.size() > 1 and (allreduce_dgrad or sequence_parallel):
            shared = ColumnParallelInput(tp_group, sequence_parallel)
        if self.precision.fp8:
            y = ops.fp8_linear(input, weight, self.fp8_weight(), self.precision.recipe, shared=shared)
        else:
            y = ops.linear(input, weight, self.exact_weight(), shared)
        return y if bias is None else ops.bias_add(y, bias)


class PreciseRowParallelLinear(_PreciseLinear, RowParallelLinear):
    """K is split over ranks. FP8: fp32 partial sums meet in a fixed tree (docs/numerics.md, section 5); BF16: exact
    fp64 partial sums meet in any order. One rounding to bf16 either way."""

    splits_k = True

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.input_is_parallel
        assert self.bias is None
        y = self._fp8(input_) if self.precision.fp8 else self._bf16(input_)
        if self.sequence_parallel:
            y = scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return y, None

    def num_segments(self) -> int:
        """Segments of this rank's K that are summed apart."""
        size = self.tp_group.size()
        if not self.precision.tp_invariant:
            return 1
        segments = num_segments_for(-(-self.input_size // BLOCK))
        if segments % size:
            raise ValueError(
                f"tensor parallel size: {size}; rule: divides the {segments} segments of K={self.input_size}; "
                "fix: a smaller parallel.tensor or parallel.tp_invariant=false"
            )
        return segments // size

    def _fp8(self, x: Tensor) -> Tensor:
        tree = self.precision.tp_invariant
        reduce = partial(ordered_sum, group=self.tp_group, tree=tree) if self.tp_group.size() > 1 else None
        return ops.fp8_linear(x, self.weight, self.fp8_weight(), self.precision.recipe, self.num_segments(), reduce)

    def _bf16(self, x: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return ops.linear(x, self.weight, self.exact_weight())
        return ops.row_parallel_linear(x, self.weight, self.exact_weight(), self._maximum, self._sum)

    def _prepare_exact(self) -> ops.ExactWeight:
        return ops.ExactWeight.of(self.weight, self._maximum if self.tp_group.size() > 1 else None)

    def _maximum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.tp_group)
        return x

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.tp_group)
        return x


def grouped_linear(
    x: Tensor, num_rows: Sequence[int], linears: Sequence[PreciseColumnParallelLinear | PreciseRowParallelLinear]
) -> Tensor:
    """x [R, K], sorted by group with num_rows each, through one linear per group -> [R, N]. The linears are alike and
    not split over ranks."""
    first = linears[0]
    assert first.tp_group.size() == 1
    masters = [linear.weight for linear in linears]
    if not first.precision.fp8:
        return ops.grouped_linear(x, num_rows, masters, [linear.exact_weight() for linear in linears])
    weights = [linear.fp8_weight() for linear in linears]
    return ops.fp8_grouped_linear(x, num_rows, masters, weights, first.precision.recipe, first.num_segments())
