"""The compiled kernels give the bits of the torch forms: on every instruction set, with any number of threads."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl_megatron import native as build_module
from jetrl_megatron.fp8 import (
    Fp8Format,
    Fp8Recipe,
    Fp8Tensor,
    Fp8Weight,
    GridSlice,
    dequantize,
    fp8_linear,
    fp8_matmul,
    quantize_rows,
    quantize_weight,
    whole,
)
from jetrl_megatron.native import LEVELS, Native, status
from jetrl_megatron.native import tensors as compiled
from jetrl_megatron.ops import compiled as fast
from jetrl_megatron.ops import reference

FORMATS = (Fp8Format("block", "fp32"), Fp8Format("block", "pow2"))
Maker = Callable[[int, int, int], Tensor]


def library() -> ctypes.CDLL:
    found = status()
    assert isinstance(found, Native), f"the compiled kernels must be built where tests run: {found}"
    return found.library


@pytest.fixture(params=range(len(LEVELS)), ids=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each instruction set of this processor in turn; those it lacks are reported as skipped."""
    best = library().jetrl_best_level()
    if request.param > best:
        pytest.skip(f"this processor has no {LEVELS[request.param]}")
    library().jetrl_use_level(request.param)
    yield request.param
    library().jetrl_use_level(best)


@pytest.fixture
def torch_forms(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to switch the FP8 functions to their torch forms for the rest of the test."""
    return lambda: monkeypatch.setattr(compiled, "usable", lambda *_tensors: False)


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def adversarial(rows: int, columns: int, seed: int) -> Tensor:
    """Spread over many binades, outliers in fixed columns, a row of zeros, denormals and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp(3 * torch.randn(rows, columns, generator=generator))
    x[:, ::128], x[:, 1::128] = 1e4, -1e4
    x[rows // 3] = 0
    x[rows // 2, ::3] = 1e-40
    x[rows // 2, 1::3] = -0.0
    return x.bfloat16()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("make", [gaussian, adversarial])
@pytest.mark.parametrize("fmt", FORMATS, ids=["fp32", "pow2"])
@pytest.mark.parametrize(("m", "n", "k"), [(37, 200, 576), (1, 1000, 1024), (130, 96, 128), (5, 17, 70), (12, 33, 129)])
def test_fp8_quantizers_gemm_and_gradients(
    level: int, torch_forms: Callable[[], None], make: Maker, fmt: Fp8Format, m: int, n: int, k: int
) -> None:
    """Codes, scales, FProp with 1, 2 and 4 segments, DGrad and WGrad: ragged shapes, both scale formats."""
    x, w = make(m, k, 0), make(n, k, 1)

    def compute() -> list[Tensor]:
        a, b = quantize_rows(x, fmt), quantize_weight(w, fmt)
        weight = Fp8Weight.of(b, whole(n))
        groups = -(-k // 128)
        forward = [fp8_matmul(x, weight, s) for s in (1, 2, 4) if groups % s == 0]
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        fp8_linear(x_leaf, w_leaf, weight, Fp8Recipe(fmt)).sum().backward()
        assert x_leaf.grad is not None
        assert w_leaf.grad is not None
        return [
            a.data.view(torch.uint8),
            a.scale,
            b.data.view(torch.uint8),
            b.scale,
            *forward,
            x_leaf.grad,
            w_leaf.grad,
        ]

    ours = compute()
    torch_forms()
    assert all(same(a, b) for a, b in zip(ours, compute(), strict=True))


def test_gradients_of_a_fused_and_cut_weight(level: int, torch_forms: Callable[[], None]) -> None:
    """DGrad through a fused qkv weight whose blocks are short, interleaved and cut: rows in the order of the grid."""
    order = torch.randperm(320, generator=torch.Generator().manual_seed(12))
    slices = [GridSlice(order[:192], 64, 384), GridSlice(order[192:256], 0, 64), GridSlice(order[256:], 0, 64)]
    x, w = adversarial(19, 200, 13), adversarial(320, 200, 14)

    def compute() -> Tensor:
        weight = Fp8Weight.of(quantize_weight(w, FORMATS[0], slices), slices)
        leaf = x.clone().requires_grad_()
        fp8_linear(leaf, w.clone().requires_grad_(), weight, Fp8Recipe()).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    ours = compute()
    torch_forms()
    assert same(ours, compute())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize(level: int, torch_forms: Callable[[], None], dtype: torch.dtype) -> None:
    """All 256 codes under many scales, per row and per block, ragged."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(200, 2)[:, :301].contiguous().view(torch.float8_e4m3fn)
    scale = torch.exp2(40 * torch.rand(200, 3, generator=torch.Generator().manual_seed(20)) - 20)
    ours = [dequantize(codes, scale, 1, dtype), dequantize(codes, scale[:2], 128, dtype)]
    torch_forms()
    theirs = [dequantize(codes, scale, 1, dtype), dequantize(codes, scale[:2], 128, dtype)]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, theirs, strict=True))


def test_non_finite_groups_are_poisoned_alike(level: int, torch_forms: Callable[[], None]) -> None:
    """NaN and Inf poison their own group only: scale NaN, codes 0x7F, and NaN in the GEMM's rows."""
    x = gaussian(6, 300, 2)
    x[1, 5], x[2, 200], x[3, 299] = float("nan"), float("inf"), float("-inf")

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        q = quantize_rows(x, FORMATS[0])
        w = Fp8Weight.of(quantize_weight(gaussian(20, 300, 3), FORMATS[0]), whole(20))
        return q.data.view(torch.uint8), torch.isnan(q.scale), torch.isnan(fp8_matmul(x, w))

    ours = compute()
    assert (ours[0][1, :128] == 0x7F).all()
    assert ours[1].tolist()[1:4] == [[True, False, False], [False, True, False], [False, False, True]]
    assert ours[2].any(-1).tolist() == [False, True, True, True, False, False]
    torch_forms()
    assert all(same(a, b) for a, b in zip(ours, compute(), strict=True))


def test_double_rounding_witness(level: int) -> None:
    """The chain is a true fma: 1 + p*s with one rounding is 1 + 2^-23, with two it would be 1."""
    codes, weight = (torch.zeros(1, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
    codes[0, 0], weight[0, 0] = 1.0, 1.0  # acc = 1 after the first block
    for slot, (left, right) in enumerate([(128.0, 128.0), (8.0, 1.0), (2.0**-9, 1.0)]):
        codes[0, 128 + slot], weight[0, 128 + slot] = left, right  # partial = 8392705 * 2^-9
    scale_a = torch.tensor([[1.0, 8384513 * 2.0**-61]])
    out = compiled.fp8_gemm(codes, scale_a, compiled.pack_fp8(weight), torch.ones(2, 1), 1)
    assert float(out) == 1.0 + 2.0**-23


@pytest.mark.parametrize("make", [gaussian, adversarial])
@pytest.mark.parametrize(("m", "n", "k"), [(9, 77, 576), (1, 50, 1024), (64, 33, 70), (3, 20, 9000)])
def test_exact_linear(level: int, make: Maker, m: int, n: int, k: int) -> None:
    """BF16 linear and lm_head, fp32 and fp64 results, K beyond 8192 too; with the maxima of a longer row given."""
    x, w = make(m, k, 4), make(n, k, 5)
    ours, theirs = fast.prepare_linear(w), reference.prepare_linear(w)
    assert same(fast.linear(x, ours), reference.linear(x, theirs))
    assert same(fast.linear_partial(x, ours), reference.linear_partial(x, theirs))
    x_max, w_max = (t.double().abs().amax().expand(len(t), 1) * 2 for t in (x, w))  # another rank holds larger values
    shard = fast.linear_partial(x, fast.prepare_linear(w, w_max), x_max)
    assert same(shard, reference.linear_partial(x, reference.prepare_linear(w, w_max), x_max))


@pytest.mark.parametrize("make", [gaussian, adversarial])
@pytest.mark.parametrize("width", [64, 70, 576])
def test_rows(level: int, make: Maker, width: int) -> None:
    """RMSNorm, SwiGLU, rope, the combine of experts, log-prob and sampling weights."""
    x, weight = make(41, width, 6), gaussian(1, width, 7)[0]
    assert same(fast.rmsnorm(x, weight, 1e-6), reference.rmsnorm(x, weight, 1e-6))
    assert same(fast.swiglu(x), reference.swiglu(x))
    for top_k in (1, 3):
        outputs, shares = torch.stack([x, x.flip(0), -2 * x], dim=1)[:, :top_k], torch.rand(41, top_k)
        assert same(fast.moe_combine(outputs, shares), reference.moe_combine(outputs, shares))
    angles = torch.rand(41, width // 2)
    heads = torch.stack([x, x.flip(0)], dim=1)
    assert same(fast.rope(heads, angles.cos(), angles.sin()), reference.rope(heads, angles.cos(), angles.sin()))
    logits = torch.randn(41, 5003) * 5
    targets = torch.randint(0, 5003, (41,))
    assert same(fast.logprob(logits, targets), reference.logprob(logits, targets))
    draws, top_p, top_k = torch.rand(41).double(), torch.full((41,), 0.9), torch.full((41,), 50)
    top_p[::2], top_k[::2] = 1.0, 1 << 30
    assert torch.equal(fast.sample(logits, draws, top_p, top_k), reference.sample(logits, draws, top_p, top_k))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("make", [gaussian, adversarial])
@pytest.mark.parametrize("width", [64, 70, 576])
def test_fused_quantizers(level: int, make: Maker, width: int, fmt: Fp8Format, torch_forms: Callable[[], None]) -> None:
    """Norm (with or without the residual add) and SwiGLU with the quantizer in one pass: the bytes of the torch forms
    one after the other, with the higher dims and the single row of decode too."""
    x, residual, weight = make(41, width, 6), make(41, width, 30), gaussian(1, width, 7)[0]

    def compute(kernels: ModuleType) -> list[Tensor]:
        made: list[Any] = []
        for rows in (slice(0, 41), slice(3, 4)):
            made += kernels.rmsnorm_quantize(x[rows], weight, 1e-6, fmt)
            made += kernels.add_rmsnorm(x[rows], residual[rows], weight, 1e-6, fmt)
            made += kernels.add_rmsnorm(x[rows], residual[rows], weight, 1e-6, None)[:2]
            made += kernels.swiglu_quantize(x[rows].unsqueeze(1), fmt)
        return [part for t in made for part in ((t.data, t.scale) if isinstance(t, Fp8Tensor) else (t,))]

    ours = compute(fast)
    torch_forms()
    theirs = compute(reference)
    assert len(ours) == len(theirs) == 24
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 2, 64), (4, 4, 128), (8, 1, 32), (3, 3, 96)])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_attention(level: int, heads: int, groups: int, dim: int, spread: float) -> None:
    """Packed sequences, chunks with a prefix, and decode from a shuffled pool."""
    generator = torch.Generator().manual_seed(8)
    lengths = [5, 200, 17, 64, 130]
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)

    def draw(h: int) -> Tensor:
        x = torch.randn(cu[-1], h, dim, generator=generator)
        return (x * torch.exp(spread * torch.randn(cu[-1], h, 1, generator=generator))).bfloat16()

    q, k, v = draw(heads), draw(groups), draw(groups)
    pool = torch.randperm(cu[-1], generator=generator)
    k_pool, v_pool = torch.empty_like(k), torch.empty_like(v)
    k_pool[pool], v_pool[pool] = k, v
    table = torch.zeros(len(lengths), 210, dtype=torch.int32)
    for i, length in enumerate(lengths):
        table[i, :length] = pool[cu[i] : cu[i + 1]].int()
    kv_len = torch.cat([torch.arange(1, n + 1) for n in lengths])
    everyone = torch.arange(len(lengths))
    whole_rows = (q, k_pool, v_pool, table, everyone, cu, kv_len, dim**-0.5)
    assert same(fast.attention(*whole_rows), reference.attention(*whole_rows))
    last = torch.tensor(cu[1:]) - 1
    order = torch.tensor([3, 0, 4, 1])
    decode = (q[last[order]], k_pool, v_pool, table, order.int(), None, torch.tensor(lengths)[order], dim**-0.5)
    assert same(fast.attention(*decode), reference.attention(*decode))
    assert same(fast.attention(*decode), fast.attention(*whole_rows)[last[order]])


def test_threads_change_nothing(level: int) -> None:
    """One and three threads: the same bits of every kernel."""
    x, w = adversarial(50, 576, 9), adversarial(300, 576, 10)
    q = gaussian(100, 4 * 64, 11).view(100, 4, 64)
    table, kv_len = torch.arange(100, dtype=torch.int32)[None], torch.arange(1, 101)

    def compute() -> list[Tensor]:
        weight = Fp8Weight.of(quantize_weight(w, FORMATS[0]), whole(300))
        return [
            fp8_matmul(x, weight),
            fast.linear(x, fast.prepare_linear(w)),
            fast.attention(q, q[:, :2], q[:, 2:], table, torch.tensor([0]), [0, 100], kv_len, 0.125),
            fast.rmsnorm(x, w[0], 1e-6),
            fast.add_rmsnorm(x, x.flip(0), w[0], 1e-6, FORMATS[0])[2].data,
            fast.swiglu_quantize(x, FORMATS[0])[1].data,
        ]

    alone = compute()
    compiled.use_threads(3)
    try:
        assert all(same(a, b) for a, b in zip(alone, compute(), strict=True))
    finally:
        compiled.use_threads(1)


@given(
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    k=st.integers(1, 400),
    scale=st.sampled_from([1e-38, 1e-20, 1.0, 1e20]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_fuzz_fp8_matmul(m: int, n: int, k: int, scale: float, seed: int) -> None:
    """Any shape and magnitude: the compiled FP8 matmul is the torch one."""
    x, w = (adversarial(rows, k, seed + rows).float() * scale for rows in (m, n))
    x, w = x.nan_to_num(posinf=0, neginf=0).bfloat16(), w.nan_to_num(posinf=0, neginf=0).bfloat16()
    ours = fp8_matmul(x, Fp8Weight.of(quantize_weight(w, FORMATS[0]), whole(n)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "usable", lambda *_tensors: False)
        theirs = fp8_matmul(x, Fp8Weight.of(quantize_weight(w, FORMATS[0]), whole(n)))
    assert same(ours, theirs)


@pytest.mark.slow
def test_ten_million_outputs(level: int, torch_forms: Callable[[], None]) -> None:
    """More than ten million outputs of the FP8 matmul, gaussian and adversarial, equal to the torch form."""
    pairs = [(make(2048, 640, 20), make(2560, 640, 21)) for make in (gaussian, adversarial)]

    def compute() -> list[Tensor]:
        return [fp8_matmul(x, Fp8Weight.of(quantize_weight(w, FORMATS[0]), whole(len(w)))) for x, w in pairs]

    ours = compute()
    torch_forms()
    theirs = compute()
    assert sum(t.numel() for t in ours) > 10_000_000
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_a_compiler_the_torch_forms_serve(tmp_path: Path) -> None:
    """No compiler is no error: the torch forms run, and `status` says why."""
    code = (
        "from jetrl_megatron.native import status; from jetrl_megatron.ops.kernels import kernels;"
        "print(status().reason); print(kernels().__name__)"
    )
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == ["not built: no g++ on PATH", "jetrl_megatron.ops.reference"]


def test_a_damaged_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test at load catches a kernel that computes something else."""
    real = library().jetrl_fp8_gemm

    class Damaged:
        jetrl_pack_fp8 = library().jetrl_pack_fp8

        @staticmethod
        def jetrl_fp8_gemm(*arguments: ctypes.c_void_p) -> None:
            real(*arguments)
            ctypes.cast(arguments[4], ctypes.POINTER(ctypes.c_float))[7] += 1.0

    assert build_module._self_test(library())
    assert not build_module._self_test(Damaged)  # type: ignore[arg-type]
