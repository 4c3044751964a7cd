"""Where operators put their tensors: the torch forms on a device that holds CPU values, with the CPU's bits.

A tensor silently made on the CPU would meet one of the device and be refused there, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.ops import reference
from tests.support.pretend_device import DEVICE, Pretended, pretending

pytestmark = pytest.mark.usefixtures("reference_forms")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def identity(x: Tensor) -> Tensor:
    return x


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.packed_attention(q, k, v, [0, 3, 9], 0.25)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    table = ops.RopeTable(1e4, x.shape[-1], 4096)
    table.lookup(torch.arange(3))  # a table that was last used elsewhere
    return ops.rope(x, positions, table)


def route(logits: Tensor) -> Tensor:
    experts, weights = ops.route(logits, 2, True)
    return torch.cat([experts.float(), weights], 1)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rmsnorm": (lambda x, w: ops.rmsnorm(x, w, 1e-6), (randn(5, 96).bfloat16(), randn(96).bfloat16())),
    "swiglu": (ops.swiglu, (randn(5, 192).bfloat16(),)),
    "rope": (rope, (randn(5, 2, 16).bfloat16(), torch.arange(2000, 2005))),
    "attention": (attention, tuple(randn(11, heads, 16).bfloat16() for heads in (4, 2, 2))),
    "linear": (
        lambda x, w: ops.linear(x, w, ops.ExactWeight.of(w)),
        (randn(5, 96).bfloat16(), randn(7, 96).bfloat16()),
    ),
    "row-parallel linear": (
        lambda x, w: ops.row_parallel_linear(x, w, ops.ExactWeight.of(w, identity), identity, identity),
        (randn(5, 96).bfloat16(), randn(7, 96).bfloat16()),
    ),
    "route": (route, (randn(5, 8),)),
    "moe_combine": (
        ops.moe_combine,
        (randn(5, 2, 32).bfloat16(), randn(5, 2), torch.tensor([[1, 0], [2, 3], [0, 1], [5, 4], [6, 7]])),
    ),
    "logprob": (lambda z, t: ops.logprob(z, t, 0.7), (randn(5, 50), torch.arange(5))),
    "sample": (
        ops.sample,
        (
            randn(4, 50),
            torch.tensor([0.1, 0.5, 0.9, 0.3], dtype=torch.float64),
            torch.tensor([1.0, 0.9, 0.5, 1.0]),
            torch.tensor([50, 50, 10, 3]),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_where_the_inputs_are(name: str) -> None:
    """Forward, and backward where there is one: on the inputs' device, the CPU's bits."""
    function, inputs = CASES[name]

    def run(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        moved = [move(x.clone()).requires_grad_(x.is_floating_point() and name != "sample") for x in inputs]
        y = function(*moved)
        if y.requires_grad:
            torch.autograd.backward(y, torch.ones_like(y))
        return [y.detach(), *(x.grad for x in moved if x.grad is not None)]

    expected = run(lambda x: x)
    with pretending():
        found = run(Pretended)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert isinstance(got, Pretended)
        assert got.device == DEVICE
        assert torch.equal(got.held, want)


def test_paged_attention_from_another_page_order() -> None:
    """Decode from a pool on the device, two rows of a table of three requests."""
    q, k, v = (randn(6, heads, 16).bfloat16() for heads in (4, 2, 2))
    table, rows, lengths = torch.tensor([[0, 2, 4], [9, 9, 9], [3, 1, 5]]), torch.tensor([2, 0]), torch.tensor([3, 2])
    expected = reference.attention(q[:2], k, v, table, rows, None, lengths, 0.25)
    with pretending():
        moved = [Pretended(x) for x in (q[:2].clone(), k, v, table, rows)]
        found = ops.paged_attention(*moved, None, Pretended(lengths), 0.25)
    assert isinstance(found, Pretended)
    assert torch.equal(found.held, expected)
