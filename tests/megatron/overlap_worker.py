"""Two tensor-parallel ranks: a column-parallel linear that communicates beside its GEMMs against Megatron-Core's own
mappings (`copy_to_...`, `gather_from_...`) around the same linear. Argument: output directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe, Fp8Weight, quantize_weight, whole
from jetrl_megatron.fp8 import linear as fp8_linear_module
from jetrl_megatron.fp8.linear import UNSHARED, SharedInput
from jetrl_megatron.megatron.groups import initialize
from jetrl_megatron.megatron.overlap import ColumnParallelInput
from tests.support.launch import die_with_parent

T, K, N = 24, 256, 128


def stock(x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    if sequence_parallel:
        y: Tensor = mappings.gather_from_sequence_parallel_region(x, group=group)
        return y
    y = mappings.copy_to_tensor_model_parallel_region(x, group=group)
    return y


def kept_rows(y: Tensor) -> int:
    """Rows of the longest activation that the linear behind y [S, 1, N] keeps."""
    function: Any = y.grad_fn
    while not function.name().startswith(("_Fp8Linear", "_ExactLinear")):
        ((function, _),) = function.next_functions
    return max(len(tensor) for tensor in function.saved_tensors)


def gradients(
    saved: str | None, x: Tensor, w: Tensor, enter: Callable[[Tensor], Tensor], shared: SharedInput
) -> tuple[list[Tensor], int]:
    """Output, dX and dW of one linear, and the rows that it keeps; x [S, 1, K]. saved: as in Fp8Recipe; None: BF16."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    if saved is not None:
        recipe = Fp8Recipe(saved_activation=saved)  # type: ignore[arg-type]
        weight = Fp8Weight.of(quantize_weight(w, recipe.format), whole(N))
        y = ops.fp8_linear(enter(x), w, weight, recipe, shared=shared)
    else:
        y = ops.linear(enter(x), w, ops.ExactWeight.of(w), shared)
    kept = kept_rows(y)
    y.float().square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad], kept


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    ranks = initialize(ParallelConfig(tensor=2), seed=0)
    group = dist.group.WORLD
    assert group is not None
    events: list[str] = []
    watch(ColumnParallelInput, "_gather", events)
    watch(ColumnParallelInput, "add_up", events)
    watch(fp8_linear_module, "_dgrad", events)
    watch(fp8_linear_module, "_wgrad", events)
    result = []
    for saved, sequence_parallel in product(("rowwise", "bf16", None), (True, False)):
        torch.manual_seed(ranks.rank)
        w = torch.randn(N, K).bfloat16()
        if not sequence_parallel:
            torch.manual_seed(7)
        x = torch.randn(T // 2 if sequence_parallel else T, 1, K).bfloat16()
        expected, _ = gradients(saved, x, w, lambda x, sp=sequence_parallel: stock(x, group, sp), UNSHARED)  # type: ignore[misc]
        events.clear()
        found, kept = gradients(saved, x, w, lambda x: x, ColumnParallelInput(group, sequence_parallel))
        result.append((saved, sequence_parallel, expected, found, list(events), kept))
    torch.save(result, Path(sys.argv[1]) / f"overlap.{os.environ['RANK']}.pt")
    dist.destroy_process_group()


def watch(owner: object, name: str, events: list[str]) -> None:
    original = getattr(owner, name)

    def call(*args: object, **kwargs: object) -> object:
        events.append(name.strip("_"))
        return original(*args, **kwargs)

    setattr(owner, name, call)


if __name__ == "__main__":
    main()
