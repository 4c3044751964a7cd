"""exp32, log64, tree_sum and the integer grid: the arithmetic under every operator."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from jetrl_megatron.ops import reference
from tests.support.oracles import spread


def test_exp32_error() -> None:
    """Within 1.2e-7 (one fp32 ulp) relative of fp64 exp on 2 million points of [-87, 87]; exactly 1 at 0; clamped."""
    x = torch.linspace(-87, 87, 2_000_001)
    exact = np.exp(x.double().numpy())
    assert float(np.max(np.abs(reference.exp32(x).double().numpy() - exact) / exact)) < 1.2e-7
    fine = torch.linspace(-1, 1, 500_001)
    exact = np.exp(fine.double().numpy())
    assert float(np.max(np.abs(reference.exp32(fine).double().numpy() - exact) / exact)) < 1.2e-7
    at = reference.exp32(torch.tensor([0.0, -0.0, -1e30, float("-inf"), -87.0, 1e30, 87.0]))
    assert at[:2].tolist() == [1.0, 1.0]
    assert (at[2:5] == at[4]).all()
    assert at[5] == at[6]
    assert reference.exp32(torch.tensor(float("nan"))).isnan()


def test_sqrt32_is_correctly_rounded() -> None:
    """Half a unit from the fp32 neighbours in integer arithmetic, on a million values over the whole exponent range.
    (torch.sqrt is wrong for 15 % of them where MKL's vector math serves an AMD processor.)"""
    x = torch.exp2(torch.linspace(-126, 127, 1_000_003, dtype=torch.float64)).float()
    root = reference.sqrt32(x)
    assert torch.equal(root, torch.from_numpy(np.sqrt(x.numpy())))  # the processor's instruction
    for value, found in zip(x[::5000].tolist(), root[::5000], strict=True):
        low, high = (Fraction(float(torch.nextafter(found, torch.tensor(to)))) for to in (0.0, float("inf")))
        middle = Fraction(float(found))
        assert ((low + middle) / 2) ** 2 < Fraction(value) < ((middle + high) / 2) ** 2


def test_log64_error() -> None:
    """Within 4e-15 of fp64 log, relative to max(1, |log|), on a million values from 2^-126 to 2^127 and near 1."""
    wide = torch.exp2(torch.linspace(-126, 127, 1_000_001, dtype=torch.float64)).float()
    near = 1 + torch.linspace(-0.01, 0.01, 100_001)
    for x in (wide, near):
        exact = np.log(x.double().numpy())
        error = np.abs(reference.log64(x).numpy() - exact) / np.maximum(1, np.abs(exact))
        assert float(error.max()) < 4e-15
    assert reference.log64(torch.ones(1)).item() == 0.0


def tree_by_hand(values: list[np.float32]) -> np.float32:
    """The definition: zero padded to a power of two, halves added."""
    size = 1
    while size < len(values):
        size *= 2
    values = values + [np.float32(0)] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100, 129, 576])
def test_tree_sum_order(n: int) -> None:
    """tree_sum is the halving tree in fp32, bit for bit, on values where the order matters; rows are independent."""
    x = spread((4, n), n)
    expected = np.array([tree_by_hand(list(row)) for row in x.numpy()])
    np.testing.assert_array_equal(reference.tree_sum(x).numpy(), expected)
    np.testing.assert_array_equal(reference.tree_sum(x[2]).numpy(), expected[2])
    if n > 100:
        assert (x.numpy().cumsum(1)[:, -1] != expected).any()  # another order gives other bits


@pytest.mark.parametrize("bits", [20, 22])
def test_grid(bits: int) -> None:
    """Rows become integers of `bits` bits: |integer| <= 2^bits, the largest at least half of it, and integer * scale is
    within half a step of x; bf16 values within 2^(bits-8) of the largest are kept exactly."""
    x = spread((50, 300), 1).bfloat16()
    integers, scale = reference.grid(x, bits)
    assert torch.equal(integers, integers.round())
    top = integers.abs().amax(-1)
    assert ((top >= 2 ** (bits - 1)) & (top <= 2**bits)).all()
    error = (integers * scale - x.double()).abs()
    assert (error <= scale / 2).all()
    large = x.double().abs() >= x.double().abs().amax(-1, keepdim=True) * 2.0 ** (8 - bits)
    assert not error[large].any()
