"""Device functions of the contract (docs/numerics.md, sections 1 and 5), used by every Triton kernel.

Nothing here depends on how a compiler or an interpreter rounds: values are brought onto the E4M3 or bf16 grid by fp32
adds and integer operations, so the casts that follow are exact; division and square root are the correctly rounded
ones. Maxima are taken over the bits of |x| as integers, which orders NaN above Inf above every number, where a
floating-point maximum would drop NaN. No libdevice: Triton's interpreter has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(128)
_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
_NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """fp32 -> the bits of |x| as int32: monotonic in |x|, Inf and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits: tl.tensor, POW2: tl.constexpr) -> tl.tensor:
    """Bits of a group's max |x| -> its fp32 scale; NaN where an element is not finite, 1 where all are zero."""
    finite = amax_bits < _INF_BITS
    amax = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    bits = tl.div_rn(amax, 448.0).to(tl.int32, bitcast=True)
    bits = tl.maximum(bits, 0x00800000)  # 2^-126; both are positive, so integers compare like floats
    if POW2:
        bits = ((bits + 0x7FFFFF) >> 23) << 23
    bits = tl.where(amax_bits == 0, 0x3F800000, bits)
    return tl.where(finite, bits, _NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """fp32 x and its broadcastable scale -> E4M3 codes as uint8; 0x7F where the scale is NaN.

    2^20 times the (at least 2^-6) power of two of |y| has the E4M3 step of y as its last bit: adding and subtracting it
    rounds to nearest even, subnormals included."""
    y = x * tl.div_rn(1.0, scale)
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    step = ((tl.maximum(size, 0x3C800000) & 0x7F800000) + (20 << 23)).to(tl.float32, bitcast=True)
    rounded = tl.minimum((size.to(tl.float32, bitcast=True) + step) - step, 448.0)
    signed = rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    code = signed.to(tl.float32, bitcast=True).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(scale == scale, code, 0x7F).to(tl.uint8)


@triton.jit
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """E4M3 codes as uint8 -> fp32, exact; NaN for 0x7F and 0xFF.

    Exponent and mantissa, moved to their places in fp32, are the value times 2^-120 (as fp32 subnormals too)."""
    bits = code.to(tl.int32)
    size = bits & 0x7F
    value = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    signed = value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)
    return tl.where(size == 0x7F, _NAN_BITS, signed).to(tl.float32, bitcast=True)


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """bf16 (or fp32) -> fp32, by bits: the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrow(x: tl.tensor) -> tl.tensor:
    """fp32 that `round_to_bf16` made -> bf16, by bits."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_bf16(x: tl.tensor) -> tl.tensor:
    """fp32 -> the nearest bf16, ties to even, still as fp32; any NaN becomes 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, rounded, _NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def exp32(x: tl.tensor) -> tl.tensor:
    """exp of fp32: `ops.reference.exp32`, operation by operation (Cephes polynomial, mul and add rounded on their own).

    Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves that integer in the low bits."""
    x = tl.where(x > 87.0, 87.0, tl.where(x < -87.0, -87.0, x))  # NaN stays
    shifted = x * 1.44269504088896341 + 12582912.0
    k = shifted - 12582912.0
    power = ((shifted.to(tl.int32, bitcast=True) - 0x4B400000 + 127) << 23).to(tl.float32, bitcast=True)
    x = x - k * 0.693359375
    x = x - k * -2.12194440e-4
    y = x * 1.9875691500e-4
    y = (y + 1.3981999507e-3) * x
    y = (y + 8.3334519073e-3) * x
    y = (y + 4.1665795894e-2) * x
    y = (y + 1.6666665459e-1) * x
    y = (y + 5.0000001201e-1) * x
    return (y * x + x + 1.0) * power


@triton.jit
def interpreted_dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """`tl.dot` of bf16, or of E4M3, for the interpreter: products added in fp64, one rounding to fp32. numpy's fp32
    product depends on where a row lies in the tile, which that of tensor cores does not."""
    if a.dtype == tl.float8e4nv:
        a, b = from_e4m3(a.to(tl.uint8, bitcast=True)), from_e4m3(b.to(tl.uint8, bitcast=True))
    return tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64)).to(tl.float32)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """fp32 product of bf16 tiles: tensor cores', or the interpreter's."""
    return interpreted_dot(a, b) if INTERPRETED else tl.dot(a, b)


@triton.jit
def tree_sum(x: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Row sums of fp32 x [ROWS, 2^LEVELS] by halving: x[:, :n/2] + x[:, n/2:] (`ops.reference.tree_sum`)."""
    ROWS: tl.constexpr = x.shape[0]
    for level in tl.static_range(1, LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, 1 << (LEVELS - level))), axis=1)
    return tl.sum(x, axis=1)
