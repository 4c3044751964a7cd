"""The exact GEMM, against rational arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, Fp8Tensor, gemm_nt, num_segments_for, prepare_weight, quantize_rows
from jetrl_megatron.fp8 import gemm as gemm_module
from jetrl_megatron.fp8 import quantize_weight as quantize_weight_
from jetrl_megatron.fp8.gemm import addcmul_is_fused, fma32, fma32_by_round_to_odd, tree_add
from tests.support.oracles import codes_of, gemm_exact, spread
from tests.support.oracles import fma32 as fma32_oracle

BLOCK_FP32 = Fp8Format()
SHAPES = [(1, 3, 128), (3, 5, 100), (4, 3, 640), (2, 6, 1000), (1, 1, 1), (5, 4, 130)]


def operands(m: int, n: int, k: int, fmt: Fp8Format = BLOCK_FP32, seed: int = 0) -> tuple[Fp8Tensor, Fp8Tensor]:
    """An activation and a weight with magnitudes over many binades."""
    x, w = spread((m, k), seed).bfloat16(), (spread((n, k), seed + 1) * 0.02).bfloat16()
    return quantize_rows(x, fmt), quantize_weight_(w, fmt)


def in_numpy(x: Fp8Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    return codes_of(x.data), x.scale.numpy()


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_exact(
    shape: tuple[int, int, int], scale_format: str, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise the definition in rational arithmetic: exact partial sums rounded once, scales multiplied once, one fma
    per K block in ascending order; with the batched and the block-by-block partial sums."""
    if not batched:
        monkeypatch.setattr(gemm_module, "_BATCHED_LIMIT", 0)
    a, b = operands(*shape, Fp8Format("block", scale_format), seed=sum(shape))
    actual = gemm_nt(a, prepare_weight(b))
    assert actual.dtype == torch.float32
    np.testing.assert_array_equal(actual.numpy(), gemm_exact(in_numpy(a), in_numpy(b)))


@pytest.mark.parametrize(("num_k", "segments"), [(4, 4), (8, 4), (6, 2), (2, 2)])
def test_segments_are_a_tree(num_k: int, segments: int) -> None:
    """num_segments: chains of equal length added as ((s0+s1)+(s2+s3)), bitwise the oracle; and the column shards of
    TP 2 and 4, each with its share of the segments, add up to the same bits in the same tree."""
    a, b = operands(3, 4, 128 * num_k, seed=num_k)
    whole = gemm_nt(a, prepare_weight(b), segments)
    np.testing.assert_array_equal(whole.numpy(), gemm_exact(in_numpy(a), in_numpy(b), segments))

    def shard(x: Fp8Tensor, tp: int, rank: int) -> Fp8Tensor:
        data, scale = x.data.chunk(tp, 1)[rank].contiguous(), x.scale.chunk(tp, 1)[rank].contiguous()
        return Fp8Tensor(data, scale, x.format)

    for tp in (size for size in (2, 4) if segments % size == 0):
        parts = [gemm_nt(shard(a, tp, r), prepare_weight(shard(b, tp, r)), segments // tp) for r in range(tp)]
        assert torch.equal(tree_add(parts), whole)


def test_number_of_segments() -> None:
    """4 where it divides the K blocks, else 2, else 1."""
    assert [num_segments_for(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 28)] == [1, 2, 1, 4, 1, 2, 1, 4, 4, 2, 4]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("k", [384, 200])
def test_rows_do_not_depend_on_the_batch(k: int, num_threads: int, restore_threads: None) -> None:
    """Any prefix M = 1..67, any permutation and any padding of the rows, any subset of the outputs and 1 or 2 threads
    give the bits of the full batch (across the switch from batched to block-by-block partial sums as well)."""
    torch.set_num_threads(1)
    x, w = spread((67, k), 10).bfloat16(), (spread((1600, k), 11) * 0.02).bfloat16()
    fmt = Fp8Format()
    weight = quantize_weight_(w, fmt)
    prepared = prepare_weight(weight)
    full = gemm_nt(quantize_rows(x, fmt), prepared)
    torch.set_num_threads(num_threads)
    for m in range(1, 68):
        assert torch.equal(gemm_nt(quantize_rows(x[:m], fmt), prepared), full[:m]), m
    order = torch.randperm(67, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gemm_nt(quantize_rows(x[order], fmt), prepared), full[order])
    padded = torch.cat([torch.zeros(3, k, dtype=x.dtype), x[5:9], torch.full((2, k), float("nan"), dtype=x.dtype)])
    assert torch.equal(gemm_nt(quantize_rows(padded, fmt), prepared)[3:7], full[5:9])
    some = Fp8Tensor(weight.data[256:391].contiguous(), weight.scale[256:391].contiguous(), fmt)
    assert torch.equal(gemm_nt(quantize_rows(x, fmt), prepare_weight(some)), full[:, 256:391])


def test_fma_rounds_once() -> None:
    """The witness of docs/numerics.md: 1 + p*s is 1.00000012 with one rounding; rounding the product, or the fp64 sum,
    first gives 1. Both forms of `fma32` pass, the naive ones fail."""
    p, s = 8392705 * 2.0**-35, 8384513 * 2.0**-35
    assert fma32_oracle(p, s, 1.0) == 1.0 + 2.0**-23
    for form in (fma32, fma32_by_round_to_odd):
        acc, a, b = (torch.full((9,), value, dtype=torch.float32) for value in (1.0, p, s))
        assert (form(acc, a, b) == 1.0 + 2.0**-23).all()
    acc, a, b = (torch.tensor(value, dtype=torch.float32) for value in (1.0, p, s))
    assert acc + a * b == 1.0
    assert (acc.double() + a.double() * b.double()).float() == 1.0


def adversarial(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(acc, a, b) fp32, about 2 million: products next to half an ulp of acc, random bit patterns, cancellations,
    subnormal results."""
    rng = np.random.default_rng(seed)
    d = np.arange(1, 60_000, dtype=np.float64)
    low = np.floor((np.sqrt(d * d + 2.0**25 * d) - d) / 2)  # (2^23 + low + d)(2^23 - low) is close to 2^46
    low, d = (np.concatenate([v] * 9) for v in (low, d))
    low += np.repeat(np.arange(-4.0, 5.0), 59_999)
    a, b = (2.0**23 + low + d).astype(np.float32), (2.0**23 - low).astype(np.float32)
    acc = rng.choice(np.array([1.0, 1.5, 1 + 2.0**-23, 1 + 3 * 2.0**-23, 2 - 2.0**-23]), len(a)).astype(np.float32)
    acc *= rng.choice(np.array([-1, 1], np.float32), len(a))
    a *= np.float32(2.0**-35)
    b *= (2.0 ** (-35.0 + rng.integers(-1, 2, len(a)))).astype(np.float32) * rng.choice([-1, 1], len(a)).astype(
        np.float32
    )
    bits = [rng.integers(0, 2**32, 600_000, dtype=np.uint32).view(np.float32) for _ in range(3)]
    x, y = (rng.standard_normal(600_000).astype(np.float32) for _ in range(2))
    cancel = -(x * y) * (1 + rng.integers(-4, 5, len(x)) * np.float32(2.0**-24)).astype(np.float32)
    tiny = [rng.standard_normal(300_000).astype(np.float32) * np.float32(2.0**e) for e in (-140, -70, -72)]
    groups = [(acc, a, b), tuple(bits), (cancel, x, y), tuple(tiny)]
    columns = (np.concatenate([g[i] for g in groups]) for i in range(3))
    acc, a, b = columns
    finite = np.isfinite(acc) & np.isfinite(a) & np.isfinite(b)
    return tuple(torch.from_numpy(v[finite].astype(np.float32)) for v in (acc, a, b))  # type: ignore[return-value]


def test_round_to_odd_is_a_true_fma() -> None:
    """The form without hardware fma equals exact rational arithmetic on near-ties, cancellations and subnormals."""
    acc, a, b = adversarial(0)
    picked = torch.randperm(len(acc), generator=torch.Generator().manual_seed(0))[:12_000]
    picked = torch.cat([picked, torch.arange(3000)])
    acc, a, b = acc[picked], a[picked], b[picked]
    actual = fma32_by_round_to_odd(acc, a, b)
    naive = (acc.double() + a.double() * b.double()).float()
    wrong = 0
    limit = Fraction(2) ** 128 - Fraction(2) ** 103  # half way from the largest fp32 to 2^128
    for i, (x, y, z) in enumerate(zip(acc.tolist(), a.tolist(), b.tolist(), strict=True)):
        exact = Fraction(y) * Fraction(z) + Fraction(x)
        if abs(exact) < limit:
            expected = fma32_oracle(y, z, x)
            assert float(actual[i]) == expected, (x, y, z)
            wrong += float(naive[i]) != expected
    assert wrong > 0  # the values do catch double rounding


def test_hardware_fma_equals_round_to_odd() -> None:
    """Where fp32 addcmul is used because it is fused on this CPU, it gives the bits of the other form on 2 million
    adversarial values."""
    if not addcmul_is_fused():
        pytest.skip("this CPU's addcmul is not fused: fma32 is the round-to-odd form itself")
    for seed in (1, 2):
        acc, a, b = adversarial(seed)
        other = fma32_by_round_to_odd(acc, a, b)
        fused = fma32(acc.clone(), a, b)
        assert len(acc) > 1_900_000
        np.testing.assert_array_equal(fused.numpy(), other.numpy())


def test_the_path_without_hardware_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM gives the same bits on a CPU whose addcmul is not fused."""
    a, b = operands(33, 70, 1000)
    prepared = prepare_weight(b)
    expected = gemm_nt(a, prepared)
    monkeypatch.setattr(gemm_module, "addcmul_is_fused", lambda: False)
    assert torch.equal(gemm_nt(a, prepared), expected)


def test_mismatched_operands_are_refused() -> None:
    """Mixed scale formats and different K are errors, not wrong numbers."""
    a, _ = operands(2, 2, 256, Fp8Format("block", "fp32"))
    _, b = operands(2, 2, 256, Fp8Format("block", "pow2"))
    with pytest.raises(ValueError, match="scale_format: fp32 and pow2"):
        gemm_nt(a, prepare_weight(b))
    _, short = operands(2, 2, 255, Fp8Format("block", "fp32"))
    with pytest.raises(ValueError, match="K: 256 and 255"):
        gemm_nt(a, prepare_weight(short))


def test_a_fault_reaches_its_row_and_no_other() -> None:
    """A NaN in one row of A makes that row of D NaN, and no other."""
    x = spread((4, 256), 0)
    x[1, 200] = float("nan")
    w = quantize_weight_(spread((5, 256), 1), Fp8Format())
    out = gemm_nt(quantize_rows(x, Fp8Format()), prepare_weight(w))
    assert out.isnan().any(1).tolist() == [False, True, False, False]
    assert out[1].isnan().all()
