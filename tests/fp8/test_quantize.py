"""The quantizer, against E4M3's definition and a numpy implementation of the contract."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl_megatron.fp8 import (
    E4M3,
    Fp8Format,
    Fp8Tensor,
    compact_weight_scale,
    expand_weight_scale,
    quantize_rows,
    quantize_weight,
)
from jetrl_megatron.fp8.quantize import scale_from_amax
from tests.support.oracles import (
    E4M3_MIDPOINTS,
    E4M3_POSITIVE,
    E4M3_VALUES,
    codes_of,
    encode_e4m3,
    quantize_blocks,
    round_fp32,
    scale_of,
    spread,
)

FORMATS = ("fp32", "pow2")


def assert_is(actual: Fp8Tensor, codes: np.ndarray, scales: np.ndarray) -> None:
    """Same bytes and, NaN included, same scales."""
    np.testing.assert_array_equal(codes_of(actual.data), codes)
    np.testing.assert_array_equal(actual.scale.numpy(), scales)


def test_all_256_values() -> None:
    """torch's float8_e4m3fn is the E4M3 of the oracle, code for code: no infinities, two NaN codes, 448 at most."""
    decoded = torch.arange(256, dtype=torch.uint8).view(E4M3).double().numpy()
    np.testing.assert_array_equal(decoded, E4M3_VALUES)
    assert np.isnan(decoded).sum() == 2
    assert np.nanmax(decoded) == 448.0


def test_rounds_to_nearest_even() -> None:
    """With scale 1 (amax 448) every E4M3 value, every midpoint and its fp32 neighbours get the nearest code, ties even;
    subnormal results included."""
    points = np.concatenate([E4M3_POSITIVE, E4M3_MIDPOINTS]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(449))])
    points = points[points <= 448]
    points = np.concatenate([points, -points])
    for chunk in np.array_split(points, -(-len(points) // 127)):
        x = torch.from_numpy(np.append(chunk, np.float32(448)))[None]
        quantized = quantize_rows(x, Fp8Format())
        assert quantized.scale.tolist() == [[1.0]]
        np.testing.assert_array_equal(codes_of(quantized.data), encode_e4m3(x.numpy()))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 5),
    k=st.integers(1, 300),
    exponent=st.integers(-140, 120),
    sigma=st.sampled_from([0.0, 1.0, 4.0]),
    scale_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_fuzz_rows(
    seed: int, m: int, k: int, exponent: int, sigma: float, scale_format: str, dtype: torch.dtype
) -> None:
    """Codes and scales of 1x128 groups are bitwise those of the numpy oracle: any shape, magnitude and spread, from
    subnormal amax to 1e37, ragged last groups."""
    x = (spread((m, k), seed, sigma).double().clamp(-64, 64) * 2.0**exponent).to(dtype)
    quantized = quantize_rows(x, Fp8Format("block", scale_format))
    assert quantized.data.shape == (m, k)
    assert_is(quantized, *quantize_blocks(x.float().numpy(), 1, scale_format))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    scale_format=st.sampled_from(FORMATS),
)
def test_fuzz_weights(seed: int, n: int, k: int, scale_format: str) -> None:
    """A weight's 128x128 blocks, ragged at both edges, are bitwise those of the oracle; its compact grid restores."""
    w = spread((n, k), seed).bfloat16()
    quantized = quantize_weight(w, Fp8Format("block", scale_format))
    assert_is(quantized, *quantize_blocks(w.float().numpy(), 128, scale_format))
    grid = compact_weight_scale(quantized.scale)
    assert grid.shape == (-(-n // 128), -(-k // 128))
    assert torch.equal(expand_weight_scale(grid, n), quantized.scale)


def test_scale_is_a_correctly_rounded_division() -> None:
    """scale = RN(amax / 448), not amax * RN(1/448): compared with exact fractions, where the two differ often."""
    bits = np.random.default_rng(0).integers(0x00800000 + (12 << 23), 0x7F000000, 3000, dtype=np.int32)
    amax = bits.view(np.float32)
    exact = np.array([round_fp32(Fraction(float(a)) / 448) for a in amax], np.float32)
    np.testing.assert_array_equal(scale_from_amax(torch.from_numpy(amax), "fp32").numpy(), exact)
    assert (amax * np.float32(1 / 448) != exact).mean() > 0.1


def test_pow2_is_the_smallest_power_of_two_not_below() -> None:
    """scale_format pow2 on 200,000 fp32 patterns and the neighbours of every power of two."""
    powers = (448 * 2.0 ** np.arange(-130.0, 119.0)).astype(np.float32)
    near = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    random = np.random.default_rng(1).integers(1, 0x7F800000, 200_000, dtype=np.int32).view(np.float32)
    amax = np.concatenate([near, random])
    scale = scale_from_amax(torch.from_numpy(amax), "pow2").numpy()
    np.testing.assert_array_equal(scale, scale_of(amax, "pow2"))
    assert (np.frexp(scale)[0] == 0.5).all()
    plain = scale_of(amax, "fp32")
    assert ((plain <= scale) & (scale.astype(np.float64) / 2 < plain)).all()


@pytest.mark.parametrize("scale_format", FORMATS)
def test_elements_at_amax_never_become_nan(scale_format: str) -> None:
    """+-amax just above, at and below 448 * 2^e encodes to a finite code, 448 with fp32 scales; the dequantized value
    is within 2^-4 of x (E4M3 has no infinity: 449..480 must not become NaN; scales are final before codes are
    made)."""
    base = (448 * 2.0 ** np.arange(-120.0, 119.0)).astype(np.float32)
    rows = [base]
    for _ in range(3):
        rows += [np.nextafter(rows[-1], np.float32(np.inf)), np.nextafter(rows[0], np.float32(0))]
    amax = torch.from_numpy(np.concatenate(rows))
    x = torch.stack([amax, -amax, amax * 0.75, amax * 0.3], 1)
    quantized = quantize_rows(x, Fp8Format("block", scale_format))
    codes = codes_of(quantized.data)
    assert not np.isnan(E4M3_VALUES[codes]).any()
    if scale_format == "fp32":
        assert (codes[:, 0] == 0x7E).all()
        assert (codes[:, 1] == 0xFE).all()
    back = quantized.dequantize(torch.float64)
    assert float(((back - x.double()).abs() / x.double().abs()).max()) <= 2.0**-4


@pytest.mark.parametrize("scale_format", FORMATS)
def test_zero_groups(scale_format: str) -> None:
    """Zero groups get scale 1 and zeros, never NaN; 256x256 zeros with one nonzero element keep exactly that
    element."""
    fmt = Fp8Format("block", scale_format)
    zeros = quantize_rows(torch.zeros(3, 200, dtype=torch.bfloat16), fmt)
    assert zeros.scale.tolist() == [[1.0, 1.0]] * 3
    assert not codes_of(zeros.data).any()
    w = torch.zeros(256, 256)
    w[0, 0] = 1.0
    quantized = quantize_weight(w, fmt)
    expected = torch.ones(2, 2)
    expected[0, 0] = float(scale_of(np.float32(1)[None], scale_format)[0])
    assert torch.equal(compact_weight_scale(quantized.scale), expected)
    assert torch.allclose(quantized.dequantize(), w, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_fault_poisons_its_own_group_only(bad: float) -> None:
    """A NaN or Inf gives its 1x128 group (128x128 block) scale NaN and codes 0x7F; every other group is untouched."""
    clean = spread((5, 384), 3)
    dirty = clean.clone()
    dirty[2, 130] = bad
    a, b = quantize_rows(clean, Fp8Format()), quantize_rows(dirty, Fp8Format())
    hit = torch.zeros(5, 3, dtype=torch.bool)
    hit[2, 1] = True
    assert torch.equal(b.scale.isnan(), hit)
    assert torch.equal(a.scale[~hit], b.scale[~hit])
    inside = hit.repeat_interleave(128, 1)
    assert (b.data.view(torch.uint8)[inside] == 0x7F).all()
    assert torch.equal(a.data.view(torch.uint8)[~inside], b.data.view(torch.uint8)[~inside])

    w = spread((256, 256), 4)
    w[200, 3] = bad
    grid = compact_weight_scale(quantize_weight(w, Fp8Format()).scale)
    assert grid.isnan().tolist() == [[False, False], [True, False]]


def test_tiny_gradients_keep_their_precision() -> None:
    """No floor on amax: scaled by 2^-14, 2^-27 or 2^-60 the codes are the same bytes; scaled by 1e-4 or 1e-7 the
    relative error is the same within 1 %."""
    x = spread((64, 512), 5, 1.0)

    def error(scaled: Tensor) -> float:
        back = quantize_rows(scaled, Fp8Format()).dequantize(torch.float64)
        return float((back - scaled.double()).norm() / scaled.double().norm())

    reference = quantize_rows(x, Fp8Format())
    for exponent in (-14, -27, -60):
        scaled = quantize_rows(x * 2.0**exponent, Fp8Format())
        assert torch.equal(scaled.data.view(torch.uint8), reference.data.view(torch.uint8))
        assert torch.equal(scaled.scale, reference.scale * 2.0**exponent)
    for factor in (1e-4, 1e-7):
        assert error(x * factor) == pytest.approx(error(x), rel=0.01)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_channel_and_tensor_granularity(scale_format: str) -> None:
    """`channel`: one scale per row; `tensor`: one scale for all; both kept row-expanded, codes as the oracle's."""
    x = spread((7, 300), 6).numpy()
    for granularity, amax in (
        ("channel", np.abs(x).max(1, keepdims=True)),
        ("tensor", np.broadcast_to(np.abs(x).max(), (7, 1))),
    ):
        scale = np.broadcast_to(scale_of(amax, scale_format), (7, 3))
        codes = encode_e4m3(x * (np.float32(1) / scale[:, :1]))
        fmt = Fp8Format(granularity, scale_format)
        assert_is(quantize_rows(torch.from_numpy(x), fmt), codes, scale)
        assert_is(quantize_weight(torch.from_numpy(x), fmt), codes, scale)


def test_padding_rows_and_columns_change_nothing() -> None:
    """Rows of a batch are independent, and zero columns up to the next multiple of 128 do not change a group."""
    x = spread((9, 200), 7).bfloat16()
    whole = quantize_rows(x, Fp8Format())
    for i in range(9):
        alone = quantize_rows(x[i : i + 1], Fp8Format())
        assert_is(alone, codes_of(whole.data)[i : i + 1], whole.scale[i : i + 1].numpy())
    padded = quantize_rows(torch.nn.functional.pad(x, (0, 56)), Fp8Format())
    assert_is(padded, np.pad(codes_of(whole.data), ((0, 0), (0, 56))), whole.scale.numpy())
