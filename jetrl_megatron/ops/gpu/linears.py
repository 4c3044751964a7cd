"""The GEMMs of a GPU backend against the exact ones within the tolerance of tensor cores, and against themselves
bitwise: a row's result must not depend on the batch, nor on the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Experts, Fp8Format, Fp8Tensor, Fp8Weight, deep_gemm, quantize_weight, whole
from jetrl_megatron.fp8.backends import Backend, GroupLoops, load
from jetrl_megatron.fp8.gemm import PreparedWeight
from jetrl_megatron.fp8.gpu.linear import linear
from jetrl_megatron.ops import reference
from jetrl_megatron.ops.gpu import kernels
from jetrl_megatron.ops.gpu.compare import bits

# Relative Frobenius error of tensor cores, which keep about 13 fraction bits in a K = 32 step, against exact partial
# sums (docs/numerics.md, section 2: 1.3e-4 on gaussian data); one bf16 rounding of both sides adds about 1.7e-3.
FP32_BOUND, BF16_BOUND = 5e-4, 2.5e-3
SHAPES = ((300, 512, 384), (128, 4096, 1024), (1, 1024, 256))  # T, K, N
SMALL_SHAPES = ((70, 256, 144), (3, 128, 128))
EXPERTS = ([130, 0, 1, 257], 512, 384)  # rows of the experts, K, N
SMALL_EXPERTS = ([70, 0, 1], 256, 128)


@dataclass(frozen=True)
class Agreement:
    """One property of one GEMM. error: relative Frobenius error, or number of different values where bound is 0."""

    backend: str
    gemm: str
    case: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN


def relative_error(actual: Tensor, expected: Tensor) -> float:
    wanted = expected.double().cpu()
    return float((actual.double().cpu() - wanted).norm() / wanted.norm())


def num_different(a: Tensor, b: Tensor) -> float:
    return float((bits(a) != bits(b)).sum())


def _problem(t: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t + k + n)
    shapes = ((t, k, 1.0), (n, k, 0.05), (t, n, 1e-3))
    x, w, dy = (torch.randn(a, b, generator=generator).mul(s).bfloat16() for a, b, s in shapes)
    return x, w, dy


def _to(weight: PreparedWeight, device: str) -> PreparedWeight:
    order = None if weight.order is None else weight.order.to(device)
    return replace(weight, codes=weight.codes.to(device), scale=weight.scale.to(device), order=order)


def check_linear(name: str, device: str, shape: tuple[int, int, int]) -> Iterator[Agreement]:
    """FProp, DGrad and WGrad of one backend at T, K, N, which must be a multiple of 128 or leave DGrad out."""
    t, k, n = shape
    case = f"T={t} K={k} N={n}"
    x, w, dy = _problem(t, k, n)
    fmt = Fp8Format()
    weight = Fp8Weight.of(quantize_weight(w, fmt), whole(n))
    exact, backend = load("emulated"), load(name)
    fprop = _to(weight.fprop, device)

    y, quantized = backend.fprop(x.to(device), fprop, 1, torch.bfloat16)
    expected, saved = exact.fprop(x, weight.fprop, 1, torch.bfloat16)
    yield Agreement(name, "FProp", case, relative_error(y, expected), BF16_BOUND)
    yield Agreement(name, "saved activation", case, num_different(quantized.data, saved.data), 0)
    for rows in (1, 7, t // 2):
        part, _ = backend.fprop(x[:rows].to(device), fprop, 1, torch.bfloat16)
        yield Agreement(name, "FProp alone = in the batch", f"{case} rows={rows}", num_different(part, y[:rows]), 0)
    again, _ = backend.fprop(x.to(device), fprop, 1, torch.bfloat16)
    yield Agreement(name, "FProp twice", case, num_different(again, y), 0)

    yield from _check_backward(name, case, backend, exact, (dy, weight), (quantized, saved), device)


def _check_backward(
    name: str,
    case: str,
    backend: Backend,
    exact: Backend,
    upstream: tuple[Tensor, Fp8Weight],
    saved: tuple[Fp8Tensor, Fp8Tensor],
    device: str,
) -> Iterator[Agreement]:
    """saved: the FProp copy of the backend and of the exact one."""
    dy, weight = upstream
    fmt = saved[1].format
    if weight.dgrad.order is None:
        rows, dy_t = backend.quantize_both(dy.to(device), fmt)
        dx = backend.matmul(rows, _to(weight.dgrad, device), torch.bfloat16)
        expected = exact.matmul(exact.quantize_rows(dy, fmt), weight.dgrad, torch.bfloat16)
        yield Agreement(name, "DGrad", case, relative_error(dx, expected), BF16_BOUND)
    else:
        dy_t = backend.quantize_columns(dy.to(device), fmt)
    x_t = backend.requantize_columns(saved[0], torch.bfloat16)
    wanted = exact.wgrad(exact.quantize_columns(dy, fmt), exact.requantize_columns(saved[1], torch.bfloat16), None)
    start = torch.ones_like(wanted) * wanted.abs().mean()
    main_grad = start.clone().to(device)
    backend.wgrad(dy_t, x_t, main_grad)
    yield Agreement(name, "WGrad", case, relative_error(main_grad, start + wanted), FP32_BOUND)
    again = start.clone().to(device)
    backend.wgrad(dy_t, x_t, again)
    yield Agreement(name, "WGrad twice", case, num_different(again, main_grad), 0)


def check_bf16_linear(device: str, shape: tuple[int, int, int]) -> Iterator[Agreement]:
    """Against the exact linear of the reference; rows alone against rows in a batch, and columns in another order."""
    t, k, n = shape
    x, w, _ = (tensor.to(device) for tensor in _problem(t, k, n))
    y, case = linear(x, w), f"T={t} K={k} N={n}"
    exact = reference.linear(x.cpu(), reference.prepare_linear(w.cpu()))
    yield Agreement("triton", "BF16 linear", case, relative_error(y, exact), FP32_BOUND)
    for rows in (1, t // 2):
        part = num_different(linear(x[t - rows :], w), y[t - rows :])
        yield Agreement("triton", "BF16 linear alone = in the batch", f"{case} rows={rows}", part, 0)
    turned = num_different(linear(x, w.flip(0)), y.flip(1))
    yield Agreement("triton", "BF16 linear, columns reordered", case, turned, 0)


def check_row_parallel(device: str, shape: tuple[int, int, int]) -> Iterator[Agreement]:
    """K cut over four ranks that are simulated: the sum of their partial sums has no order, and is near the exact."""
    t, k, n = shape
    x, w, _ = (tensor.to(device) for tensor in _problem(t, k, n))
    ranks = list(zip(x.chunk(4, 1), w.chunk(4, 1), strict=True))
    top = torch.stack([reference.row_max(linear(*rank)) for rank in ranks]).amax(0)
    partials: list[Tensor] = []

    def sent(mine: Tensor) -> Tensor:
        partials.append(mine.clone())
        return mine

    for rank in ranks:
        kernels.row_parallel_linear(*rank, lambda _mine: top, sent)

    def run(step: int) -> Tensor:
        total = torch.zeros_like(partials[0])
        for partial in partials[::step]:
            total += partial
        return kernels.row_parallel_linear(*ranks[0], lambda _mine: top, lambda _mine: total)

    y, case = run(1), f"T={t} K=4x{k // 4} N={n}"
    exact = reference.linear(x.cpu(), reference.prepare_linear(w.cpu()))
    yield Agreement("triton", "BF16 linear over ranks", case, relative_error(y, exact), FP32_BOUND)
    yield Agreement("triton", "BF16 linear over ranks, reversed", case, num_different(run(-1), y), 0)


def _experts(counts: list[int], k: int, n: int, device: str) -> tuple[Tensor, Tensor, list[Fp8Weight]]:
    """Rows of all experts, sorted, their upstream gradients, and a weight per expert."""
    x, _, dy = _problem(sum(counts), k, n)
    weights = [quantize_weight(_problem(1, k, n + e)[1][:n], Fp8Format()) for e in range(len(counts))]
    there = [Fp8Tensor(w.data.to(device), w.scale.to(device), w.format) for w in weights]
    return x.to(device), dy.to(device), [Fp8Weight.of(weight, whole(n)) for weight in there]


def _stacked(weights: Sequence[Fp8Weight]) -> Fp8Experts:
    parts = [weight.quantized for weight in weights]
    codes = torch.stack([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    scale = torch.stack([part.scale for part in parts])
    return Fp8Experts(Fp8Tensor(codes, scale, parts[0].format), weights[0].slices)


def check_routed_linear(device: str, counts: list[int], k: int, n: int) -> Iterator[Agreement]:
    """BF16 experts whose numbers of rows only the device knows, against one linear after the other, bitwise."""
    x = _problem(sum(counts) + 3, k, n)[0].to(device)
    weights = [_problem(1, k, n + e)[1][:n].to(device) for e in range(len(counts))]
    offsets = torch.tensor([0, *itertools.accumulate(counts)], device=device)
    parts = [linear(rows, weight) for rows, weight in zip(x[:-3].split(counts), weights, strict=True)]
    wanted = torch.cat([*parts, torch.zeros(3, n, device=device)])
    error = num_different(kernels.routed_linear(x, torch.stack(weights), offsets), wanted)
    yield Agreement("triton", "routed BF16 linear = dense", f"rows={counts} K={k} N={n}", error, 0)


def check_experts(name: str, device: str, counts: list[int], k: int, n: int) -> Iterator[Agreement]:
    """Grouped GEMMs against the same GEMMs one after the other, bitwise; an expert without rows among them."""
    x, dy, weights = _experts(counts, k, n, device)
    backend, fmt, case = load(name), Fp8Format(), f"rows={counts} K={k} N={n}"
    fprop, dgrad = [w.fprop for w in weights], [w.dgrad for w in weights]
    rows, dy_rows = x.split(counts), dy.split(counts)
    y, _ = backend.fprop_grouped(rows, fprop, 1, torch.bfloat16)
    wanted, _ = GroupLoops.fprop_grouped(backend, rows, fprop, 1, torch.bfloat16)  # type: ignore[arg-type]
    yield Agreement(name, "grouped FProp = dense", case, num_different(y, wanted), 0)
    experts = _stacked(weights)
    offsets = torch.tensor([0, *itertools.accumulate(counts)], device=device)
    spare = torch.cat([x, x[:3]])  # three rows of no expert
    routed, _ = backend.fprop_routed(spare, experts, offsets, 1, torch.bfloat16)
    wanted = torch.cat([y, torch.zeros_like(y[:3])])
    yield Agreement(name, "routed FProp = grouped", case, num_different(routed, wanted), 0)
    operands = [backend.quantize_rows(group, fmt) for group in dy_rows]
    dx = backend.matmul_grouped(operands, dgrad, torch.bfloat16)
    wanted = GroupLoops.matmul_grouped(backend, operands, dgrad, torch.bfloat16)  # type: ignore[arg-type]
    yield Agreement(name, "grouped DGrad = dense", case, num_different(dx, wanted), 0)
    dy_t, x_t = ([backend.quantize_columns(group, fmt) for group in groups] for groups in (dy_rows, rows))
    grads: list[list[Tensor | None]] = [[torch.ones(n, k, device=device) for _ in counts] for _ in range(2)]
    made = torch.stack(backend.wgrad_grouped(dy_t, x_t, grads[0]))
    wanted = torch.stack(GroupLoops.wgrad_grouped(backend, dy_t, x_t, grads[1]))  # type: ignore[arg-type]
    yield Agreement(name, "grouped WGrad = dense", case, num_different(made, wanted), 0)


def check_masked(device: str, counts: list[int], k: int, n: int) -> Iterator[Agreement]:
    """DeepGEMM's masked grouped GEMM against its dense one, bitwise."""
    x, _, weights = _experts(counts, k, n, device)
    backend, prepared = load("deep_gemm"), [w.fprop for w in weights]
    dense, _ = GroupLoops.fprop_grouped(backend, x.split(counts), prepared, 1, torch.bfloat16)  # type: ignore[arg-type]
    codes = torch.stack([w.codes for w in prepared])
    grid = torch.stack([w.scale.t()[::128].contiguous() for w in prepared])
    call, places = deep_gemm.prepare_masked(backend.quantize_rows(x, Fp8Format()), counts, codes, grid, max(counts))
    y = deep_gemm.execute(call)
    assert y is not None
    error = num_different(y.view(-1, n)[places], dense)
    yield Agreement("deep_gemm", "grouped masked = dense", str(counts), error, 0)
