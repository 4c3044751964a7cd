"""Every Triton kernel against the torch form of the contract, byte for byte, on any device that can run the kernel: a
GPU, or the CPU inside Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_megatron.fp8 import (
    BLOCK,
    Fp8Format,
    Fp8Tensor,
    GridSlice,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)
from jetrl_megatron.fp8.backends import load
from jetrl_megatron.fp8.format import E4M3, num_blocks
from jetrl_megatron.fp8.gemm import PreparedWeight, contraction_order
from jetrl_megatron.fp8.gpu import blocks, columns, elementwise, fused, logprob, quantize
from jetrl_megatron.fp8.gpu.launch import ScaleLayout, padded
from jetrl_megatron.ops import reference
from jetrl_megatron.ops.gpu import kernels
from jetrl_megatron.ops.gpu.inputs import KINDS, fuzz_set, matrix

Outputs = dict[str, Tensor]
Pair = tuple[str, Outputs, Outputs]  # kernel, what it gave, what the reference gives
FORMATS = (Fp8Format("block", "fp32"), Fp8Format("block", "pow2"))
_INTERPRETED_ROWS = 4  # of RMSNorm, whose kernel runs once per row: 20 ms each in the interpreter
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Comparison:
    """One kernel on one input. first: name and index of the first different value, '' if none."""

    kernel: str
    case: str
    num_values: int
    num_different: int
    first: str = ""

    @property
    def equal(self) -> bool:
        return self.num_values > 0 and self.num_different == 0


def bits(x: Tensor) -> Tensor:
    """The bits of x as integers on the CPU. All NaNs of a 2- or 4-byte type count as one, those of FP8 do not."""
    x = x.detach().cpu().contiguous()
    integers = x.view(_INTEGERS[x.element_size()])
    return integers if x.element_size() == 1 else torch.where(torch.isnan(x), -1, integers)


def compare(kernel: str, case: str, actual: Outputs, expected: Outputs) -> Comparison:
    """Bitwise; a missing output, another dtype or another shape counts as different in every value."""
    total = different = 0
    first = ""
    for name, want in expected.items():
        got = actual.get(name)
        total += want.numel()
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            different += max(1, want.numel())
            first = first or f"{name}: {None if got is None else (tuple(got.shape), got.dtype)}"
            continue
        unequal = (bits(got) != bits(want)).nonzero()
        different += len(unequal)
        if len(unequal) and not first:
            first = f"{name}{unequal[0].tolist()}"
    return Comparison(kernel, case, total, different, first)


def _parts(x: Fp8Tensor, prefix: str = "") -> Outputs:
    return {f"{prefix}codes": x.data, f"{prefix}scale": x.scale}


def _quantizers(x: Tensor, fmt: Fp8Format, layout: ScaleLayout, device: str) -> Iterator[Pair]:
    there = x.to(device)
    yield "quantize 1x128", _parts(quantize.quantize_rows(there, fmt, layout)), _parts(quantize_rows(x, fmt))
    yield "quantize 128x128", _parts(quantize.quantize_weight(there, fmt)), _parts(quantize_weight(x, fmt))
    slices = _fused_parts_of(len(x))
    order = contraction_order(slices).to(device)
    yield (
        "quantize 128x128 of a fused weight",
        _parts(quantize.quantize_weight(there, fmt, order)),
        _parts(quantize_weight(x, fmt, slices)),
    )
    along = columns.quantize_columns(there, fmt, layout)
    yield "quantize along tokens", _parts(along), _parts(quantize_columns(x, fmt))
    wide = torch.nn.functional.pad(x, (0, 0, 0, padded(x.shape[0]) - x.shape[0]))
    both = columns.quantize_both(there, fmt, layout, pad_tokens=True)
    expected = {**_parts(quantize_rows(x, fmt)), **_parts(quantize_columns(wide, fmt), "along ")}
    yield "quantize both ways", {**_parts(both[0]), **_parts(both[1], "along ")}, expected


def _fused_parts_of(num_rows: int) -> list[GridSlice]:
    """Every third row is one Hugging Face tensor, cut at its row 100 of 400; the others are another, in reverse."""
    rows = torch.arange(num_rows)
    return [GridSlice(rows[::3], 100, 400), GridSlice(rows[rows % 3 > 0].flip(0), 0, num_rows)]


def _readers(x: Tensor, fmt: Fp8Format, layout: ScaleLayout, device: str) -> Iterator[Pair]:
    """Kernels that read FP8."""
    rows = quantize_rows(x, fmt)
    there = Fp8Tensor(rows.data.to(device), rows.scale.to(device), fmt)
    along = columns.requantize_columns(there, layout)
    yield "requantize along tokens", _parts(along), _parts(quantize_columns(rows.dequantize(torch.bfloat16), fmt))
    for dtype in (torch.float32, torch.bfloat16):
        yield "dequantize", {"out": quantize.dequantize(there, dtype)}, {"out": rows.dequantize(dtype)}


def _fused(x: Tensor, fmt: Fp8Format, layout: ScaleLayout, device: str) -> Iterator[Pair]:
    x = x.bfloat16()
    gate_up = torch.cat([x, x.roll(1, dims=1)], dim=1)
    activated = reference.swiglu(gate_up)
    got = fused.swiglu(gate_up.to(device), fmt, layout)
    yield "SwiGLU + quantize", _fused_parts(got), {**_parts(quantize_rows(activated, fmt)), "out": activated}
    x = x[:_INTERPRETED_ROWS] if device == "cpu" else x
    weight = x[0].clone().nan_to_num_(1.0, 1.0, 1.0).clamp(-4, 4)
    there, scaled_by, residual = x.to(device), weight.to(device), x.roll(1, dims=1)
    total = x + residual
    normed = reference.rmsnorm(total, weight, 1e-6)
    got = fused.rmsnorm(there, scaled_by, 1e-6, fmt, residual.to(device), layout)
    expected = {**_parts(quantize_rows(normed, fmt)), "out": normed, "residual": total}
    yield "residual + RMSNorm + quantize", _fused_parts(got), expected
    normed = reference.rmsnorm(x, weight, 1e-6)
    got = fused.rmsnorm(there, scaled_by, 1e-6, fmt, layout=layout)
    yield "RMSNorm + quantize", _fused_parts(got), {**_parts(quantize_rows(normed, fmt)), "out": normed}


def _unquantized(x: Tensor, device: str) -> Iterator[Pair]:
    """Norm and activation that no FP8 linear follows."""
    gate_up, weight = torch.cat([x, x.roll(1, dims=1)], dim=1), torch.linspace(-4, 4, x.shape[1]).bfloat16()
    there, scaled_by, residual = x.to(device), weight.to(device), x.roll(1, dims=1)
    yield "SwiGLU", _fused_parts(fused.swiglu(gate_up.to(device))), {"out": reference.swiglu(gate_up)}
    yield "RMSNorm", _fused_parts(fused.rmsnorm(there, scaled_by, 1e-6)), {"out": reference.rmsnorm(x, weight, 1e-6)}
    total = x + residual
    got = fused.rmsnorm(there, scaled_by, 1e-6, residual=residual.to(device))
    expected = {"out": reference.rmsnorm(total, weight, 1e-6), "residual": total}
    yield "residual + RMSNorm", _fused_parts(got), expected


def _fused_parts(result: fused.Fused) -> Outputs:
    quantized = {} if result.quantized is None else _parts(result.quantized)
    return {**quantized, "out": result.out, **({} if result.residual is None else {"residual": result.residual})}


FAMILIES: tuple[Callable[[Tensor, Fp8Format, ScaleLayout, str], Iterator[Pair]], ...] = (_quantizers, _readers, _fused)


def compare_all(device: str) -> Iterator[Comparison]:
    """Every kernel on the whole fuzz set, in both scale formats, scales in both layouts in turn."""
    for i, (name, x) in enumerate(fuzz_set()):
        for j, fmt in enumerate(FORMATS):
            layout: ScaleLayout = ("row_major", "tma")[(i + j) % 2]  # type: ignore[assignment]
            for family in FAMILIES:
                for kernel, actual, expected in family(x, fmt, layout, device):
                    yield compare(kernel, f"{name} {fmt.scale_format} {layout}", actual, expected)
    yield from compare_rows(device)
    yield from compare_blocks(device)
    yield compare_wide_rmsnorm(device)
    yield from compare_layouts(device)
    yield compare_far_rows(device)


def _heads(x: Tensor, device: str) -> Iterator[Pair]:
    """x [T, h, D]: heads for rope, experts' outputs for their sum."""
    t, heads, dim = x.shape
    generator = torch.Generator().manual_seed(x.numel())
    angle = torch.rand(t, dim // 2, generator=generator) * 6.3
    cos, sin, weights = angle.cos(), angle.sin(), torch.rand(t, heads, generator=generator)
    rotated = elementwise.rope(x.to(device), cos.to(device), sin.to(device))
    yield "rope", {"out": rotated}, {"out": reference.rope(x, cos, sin)}
    total = elementwise.moe_combine(x.to(device), weights.to(device))
    yield "sum over experts", {"out": total}, {"out": reference.moe_combine(x, weights)}


def _vocabulary(logits: Tensor, device: str) -> Iterator[Pair]:
    """logits [T, V] fp32."""
    total = reference.tree_sum(reference.exp32(logits - logits.amax(-1, keepdim=True)))
    yield "sum of exp", {"out": logprob.sum_exp(logits.to(device))[1]}, {"out": total}
    targets = torch.arange(len(logits)) % logits.shape[1]
    got = kernels.logprob(logits.to(device), targets.to(device))
    yield "log-prob", {"out": got}, {"out": reference.logprob(logits, targets)}


def compare_rows(device: str) -> Iterator[Comparison]:
    """Operators without a quantizer behind them: norm, activation, rope, the sum over experts, log-probs; every kind of
    number, several heads, experts and sizes of vocabulary."""
    for kind in KINDS:
        pairs: list[tuple[str, Iterator[Pair]]] = []
        for shape in ((33, 129), (40, 128), (1, 1)):
            pairs.append((f"{shape[0]}x{shape[1]}", _unquantized(matrix(kind, shape, torch.bfloat16), device)))
        for t, heads, dim in ((5, 3, 64), (33, 1, 24), (1, 2, 2)):
            x = matrix(kind, (t * heads, dim), torch.bfloat16).view(t, heads, dim)
            pairs.append((f"{t}x{heads}x{dim}", _heads(x, device)))
        for size in (1, 127, 300, 9001):
            pairs.append((f"V={size}", _vocabulary(matrix(kind, (2, size), torch.float32), device)))
        for case, family in pairs:
            for kernel, actual, expected in family:
                yield compare(kernel, f"{kind} {case}", actual, expected)


def compare_blocks(device: str) -> Iterator[Comparison]:
    """exp32 and tree_sum before any rounding to bf16: normal and extreme arguments, every length of tree."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, 87.0, -87.0, 88.0, -1e30, torch.inf, -torch.inf, torch.nan, 1e-40])
    x = torch.cat([special, torch.randn(40_000, generator=generator) * 20, torch.randn(10_000, generator=generator)])
    yield compare("exp32", "50,010 values", {"out": blocks.plan_exp32(x.to(device)).run()}, {"out": reference.exp32(x)})
    for length in (2, 3, 128, 300, 2048, 8192):
        rows = torch.randn(4, length, generator=generator) * torch.randn(4, 1, generator=generator).exp()
        got = blocks.plan_tree_sum(rows.to(device)).run()
        yield compare("tree_sum", f"{length} values", {"out": got}, {"out": reference.tree_sum(rows)})


def compare_wide_rmsnorm(device: str) -> Comparison:
    """RMSNorm of 400 x 7168 gaussian values: so many that a difference of one fp32 ulp in the root shows in bf16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 7168, generator=generator).bfloat16()
    weight = torch.randn(7168, generator=generator).bfloat16()
    got = fused.rmsnorm(x.to(device), weight.to(device), 1e-5, FORMATS[0])
    normed = reference.rmsnorm(x, weight, 1e-5)
    expected = {**_parts(quantize_rows(normed, FORMATS[0])), "out": normed}
    return compare("RMSNorm + quantize", "400x7168", _fused_parts(got), expected)


def compare_gemms(backend: str, device: str) -> Iterator[Comparison]:
    """A GEMM whose codes are integers up to 4: every partial sum of 128 products is below 2^11, which tensor cores hold
    exactly. So scales, order, fma and rounding must agree with the exact GEMM bit for bit, on a GPU too."""
    generator = torch.Generator().manual_seed(2)
    fmt, gpu, exact = FORMATS[0], load(backend), load("emulated")
    for m, n, k in ((70, 264, 1296), (1, 128, 512), (130, 40, 128)):
        a, b = (
            Fp8Tensor(
                torch.randint(-4, 5, (rows, k), generator=generator).float().to(E4M3),
                torch.rand(rows, num_blocks(k), generator=generator) * 2.0**-7,
                fmt,
            )
            for rows in (m, n)
        )
        there = Fp8Tensor(a.data.to(device), a.scale.to(device), fmt)
        weight = PreparedWeight(b.data, b.scale.t().contiguous(), fmt, k)
        moved = PreparedWeight(b.data.to(device), weight.scale.to(device), fmt, k)
        case = f"M={m} N={n} K={k}"
        for dtype in (torch.float32, torch.bfloat16):
            got, wanted = gpu.matmul(there, moved, dtype), exact.matmul(a, weight, dtype)
            yield compare(f"GEMM of integers, {backend}", f"{case} {dtype}", {"out": got}, {"out": wanted})
        start = torch.randn(m, n, generator=generator)
        right = Fp8Tensor(moved.codes, b.scale.to(device), fmt)
        got, wanted = gpu.wgrad(there, right, start.clone().to(device)), exact.wgrad(a, b, start.clone())
        yield compare(f"GEMM of integers, {backend}", f"{case} added", {"out": got}, {"out": wanted})


def compare_layouts(device: str) -> Iterator[Comparison]:
    """Scales in the TMA layout have MN-major strides with a pitch of whole 16 bytes."""
    for m in (1, 3, 4, 130):
        scale = quantize.quantize_rows(torch.ones(m, 300, device=device), FORMATS[0], "tma").scale
        strides = torch.tensor(scale.stride())
        want = torch.tensor((1, -(-m // 4) * 4))
        yield compare("TMA layout", f"{m} rows", {"strides": strides.int()}, {"strides": want.int()})


def compare_far_rows(device: str) -> Comparison:
    """Rows 2^30 elements apart: the third begins at 2^31, which 32-bit offsets cannot reach. The memory between them is
    never touched (on a CPU it is not even there)."""
    apart = 1 << 30
    far = torch.empty(2 * apart + BLOCK, dtype=torch.bfloat16, device=device).as_strided((3, BLOCK), (apart, 1))
    near = torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16()
    far.copy_(near)
    got = quantize.quantize_rows(far, FORMATS[0])
    return compare("quantize 1x128", "rows 2^30 elements apart", _parts(got), _parts(quantize_rows(near, FORMATS[0])))
