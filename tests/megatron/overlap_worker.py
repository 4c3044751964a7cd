"""Two tensor-parallel ranks: a column-parallel linear whose dX is summed beside WGrad against Megatron-Core's own
mappings (`copy_to_...`, `gather_from_...`), whose sum runs after WGrad. Argument: output directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe, Fp8Weight, quantize_weight, whole
from jetrl_megatron.fp8 import linear as fp8_linear_module
from jetrl_megatron.megatron.groups import initialize
from jetrl_megatron.megatron.overlap import ColumnParallelInput
from jetrl_megatron.ops import operators
from tests.support.launch import die_with_parent

T, K, N = 24, 256, 128


def stock(x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    if sequence_parallel:
        y: Tensor = mappings.gather_from_sequence_parallel_region(x, group=group)
        return y
    y = mappings.copy_to_tensor_model_parallel_region(x, group=group)
    return y


def gradients(
    fp8: bool, x: Tensor, w: Tensor, enter: Callable[[Tensor], Tensor], on_dx: Callable[[Tensor], None] | None
) -> list[Tensor]:
    """Output, dX and dW of one linear; x [S, 1, K]."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    if fp8:
        recipe = Fp8Recipe()
        weight = Fp8Weight.of(quantize_weight(w, recipe.format), whole(N))
        y = ops.fp8_linear(enter(x), w, weight, recipe, on_dx=on_dx)
    else:
        y = ops.linear(enter(x), w, ops.ExactWeight.of(w), on_dx)
    y.float().square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    ranks = initialize(ParallelConfig(tensor=2), seed=0)
    group = dist.group.WORLD
    assert group is not None
    events: list[str] = []
    started = ColumnParallelInput.start

    def start(self: ColumnParallelInput, dx: Tensor) -> None:
        events.append("sum of dX")
        started(self, dx)

    ColumnParallelInput.start = start  # type: ignore[method-assign]
    for owner, name in ((fp8_linear_module, "_wgrad"), (operators, "accumulate_main_grad")):
        watch(owner, name, events)
    result = []
    for fp8, sequence_parallel in product((True, False), (True, False)):
        torch.manual_seed(ranks.rank)
        w = torch.randn(N, K).bfloat16()
        rows = T // 2 if sequence_parallel else T
        if not sequence_parallel:
            torch.manual_seed(7)
        x = torch.randn(rows, 1, K).bfloat16()
        expected = gradients(fp8, x, w, lambda x, sp=sequence_parallel: stock(x, group, sp), None)  # type: ignore[misc]
        events.clear()
        region = ColumnParallelInput(group, sequence_parallel)
        found = gradients(fp8, x, w, region.enter, region.start)
        result.append((fp8, sequence_parallel, expected, found, list(events)))
    torch.save(result, Path(sys.argv[1]) / f"overlap.{os.environ['RANK']}.pt")
    dist.destroy_process_group()


def watch(owner: object, name: str, events: list[str]) -> None:
    original = getattr(owner, name)

    def call(*args: object, **kwargs: object) -> object:
        events.append("WGrad")
        return original(*args, **kwargs)

    setattr(owner, name, call)


if __name__ == "__main__":
    main()
