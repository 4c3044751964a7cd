"""Oracles in numpy and exact fractions, written from docs/numerics.md and sharing no code with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAN_CODE = 0x7F


# ------------------------------------------------------------------------------------------------ rounding
def round_to(x: Fraction, precision: int, min_exponent: int) -> float:
    """x rounded to nearest, ties to even, in a binary format of `precision` bits (24: fp32, 8: bf16)."""
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, min_exponent) - precision + 1)
    return float(round(x / quantum) * quantum)  # round() of a Fraction is half to even


def round_fp32(x: Fraction) -> float:
    return round_to(x, 24, -126)


def fma32(a: float, b: float, c: float) -> float:
    """fp32 a * b + c with one rounding."""
    return round_fp32(Fraction(a) * Fraction(b) + Fraction(c))


def ulp_bf16(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spacing of bf16 numbers at x."""
    return 2.0 ** (np.frexp(np.maximum(np.abs(x), 2.0**-126))[1] - 8.0)


# ------------------------------------------------------------------------------------------------ E4M3
def e4m3_value(code: int) -> float:
    """Value of an E4M3 code by the definition of the format (OCP FP8: bias 7, no infinities, S.1111.111 is NaN)."""
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = np.array([e4m3_value(code) for code in range(256)])
E4M3_POSITIVE = E4M3_VALUES[:127]  # ascending, 0 .. 448
E4M3_MIDPOINTS = (E4M3_POSITIVE[1:] + E4M3_POSITIVE[:-1]) / 2


def encode_e4m3(x: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Nearest E4M3 code by table look-up, ties to the even code, |x| clamped to 448."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    code = np.searchsorted(E4M3_MIDPOINTS, magnitude, side="left")
    tie = (code < 126) & (magnitude == E4M3_MIDPOINTS[np.minimum(code, 125)])
    code = code + (tie & (code % 2 == 1))
    return (code + 128 * np.signbit(x)).astype(np.uint8)


# ------------------------------------------------------------------------------------------------ quantizer
def scale_of(amax: NDArray[np.float32], scale_format: str) -> NDArray[np.float32]:
    """docs/numerics.md, section 1, steps 1 to 3."""
    scale = np.maximum(amax.astype(np.float32) / np.float32(448), np.float32(2.0**-126))
    if scale_format == "pow2":
        mantissa, exponent = np.frexp(scale.astype(np.float64))  # mantissa in [0.5, 1)
        scale = (2.0 ** np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)
    scale = np.where(amax == 0, np.float32(1), scale)
    return np.where(np.isfinite(amax), scale, np.float32(np.nan)).astype(np.float32)


def encode_group(x: NDArray[np.float32], scale: np.float32) -> NDArray[np.uint8]:
    """Step 4 for one group."""
    if np.isnan(scale):
        return np.full(x.shape, NAN_CODE, np.uint8)
    with np.errstate(under="ignore", over="ignore"):
        return encode_e4m3(x * (np.float32(1) / scale))


def quantize_blocks(
    x: NDArray[np.float32], rows: int, scale_format: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """[M, K] in blocks of rows x 128: codes [M, K] and row-expanded scales [M, ceil(K/128)], block by block."""
    m, k = x.shape
    codes = np.zeros((m, k), np.uint8)
    scales = np.zeros((m, -(-k // 128)), np.float32)
    for i in range(0, m, rows):
        for g, j in enumerate(range(0, k, 128)):
            block = x[i : i + rows, j : j + 128]
            scale = scale_of(np.abs(block).max(), scale_format)[()]  # np.max lets NaN through
            codes[i : i + rows, j : j + 128] = encode_group(block, scale)
            scales[i : i + rows, g] = scale
    return codes, scales


def dequantize(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float64]:
    return E4M3_VALUES[codes] * np.repeat(scales.astype(np.float64), 128, axis=1)[:, : codes.shape[1]]


def fake_quantize(x: NDArray[np.float32], rows: int = 1, scale_format: str = "fp32") -> NDArray[np.float64]:
    """x through FP8 and back, in fp64."""
    return dequantize(*quantize_blocks(x, rows, scale_format))


# ------------------------------------------------------------------------------------------------ GEMM
Quantized = tuple[NDArray[np.uint8], NDArray[np.float32]]  # codes and row-expanded scales


def gemm_exact(a: Quantized, b: Quantized, segments: int = 1) -> NDArray[np.float32]:
    """docs/numerics.md, section 2, in exact rational arithmetic: [M, N] fp32."""
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    num_k = a_scale.shape[1]
    out = np.zeros((len(a_codes), len(b_codes)), np.float32)
    ints_a, ints_b = (E4M3_VALUES[codes] * 512 for codes in (a_codes, b_codes))  # integers
    for m in range(len(a_codes)):
        for n in range(len(b_codes)):
            sums = []
            for first in range(0, num_k, num_k // segments):
                acc = 0.0
                for k in range(first, first + num_k // segments):
                    cut = slice(k * 128, k * 128 + 128)
                    dot = sum(int(x) * int(y) for x, y in zip(ints_a[m, cut], ints_b[n, cut], strict=True))
                    scale = round_fp32(Fraction(float(a_scale[m, k])) * Fraction(float(b_scale[n, k])))
                    acc = fma32(scale, round_fp32(Fraction(dot, 512 * 512)), acc)
                sums.append(acc)
            out[m, n] = tree_of(sums)
    return out


def tree_of(values: Sequence[float]) -> float:
    """((v0+v1)+(v2+v3)) in fp32."""
    values = list(values)
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [round_fp32(Fraction(x) + Fraction(y)) for x, y in pairs]
    return values[0]


# ------------------------------------------------------------------------------------------------ comparing
def rel_error(actual: Tensor | NDArray, expected: Tensor | NDArray) -> float:
    """Relative Frobenius error in fp64."""
    x, y = (torch.as_tensor(t).double() for t in (actual, expected))
    return float((x - y).norm() / y.norm())


def codes_of(data: Tensor) -> NDArray[np.uint8]:
    return data.view(torch.uint8).numpy()


def spread(shape: tuple[int, ...], seed: int, sigma: float = 2.0) -> Tensor:
    """fp32 gaussians times log-normal magnitudes: many binades inside one group."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(sigma * torch.randn(shape, generator=generator))
