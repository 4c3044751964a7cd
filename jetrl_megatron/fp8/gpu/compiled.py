"""What the compiler must make of the kernels, checked without a GPU: each is compiled for Hopper and its PTX searched.

Triton accepts fast approximations silently (`/` on fp32, exp, fused multiply-adds); one of them would change bits that
the interpreter cannot see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import E4M3, Fp8Format, Fp8Tensor, num_blocks
from jetrl_megatron.fp8.gpu.attention import plan_attention, plan_merge_segments
from jetrl_megatron.fp8.gpu.attention_backward import plan_backward
from jetrl_megatron.fp8.gpu.blocks import plan_exp32, plan_tree_sum
from jetrl_megatron.fp8.gpu.columns import plan_both, plan_columns, plan_requantize
from jetrl_megatron.fp8.gpu.elementwise import plan_moe_combine, plan_rope
from jetrl_megatron.fp8.gpu.fused import plan_rmsnorm, plan_swiglu
from jetrl_megatron.fp8.gpu.gemm import plan_gemm_nt, plan_grouped_gemm_nt, plan_routed_gemm_nt
from jetrl_megatron.fp8.gpu.launch import Plan, instructions, padded
from jetrl_megatron.fp8.gpu.linear import plan_linear, plan_routed_linear
from jetrl_megatron.fp8.gpu.logprob import plan_sum_exp
from jetrl_megatron.fp8.gpu.quantize import plan_dequantize, plan_rows, plan_weight

# Approximate, flushing or unordered arithmetic, and multiply or add that ptxas may still contract (no `.rn`).
FORBIDDEN = (
    r".*\.ftz\b.*",
    r".*\.approx\b.*",
    r"div\.full\..*",
    r"(add|sub|mul)\.f32",
    r"(atom|red)\..*",
)
_FMA = r"fma\..*"
_ROUNDING = ("div.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32", "cvt.rn.satfinite.e4m3x2.f32")
_VECTORS = ("ld.global.v4.b32", "st.global.v4.b32")


@dataclass(frozen=True)
class Expectation:
    """One kernel at one launch. required: instructions that must appear; fma: whether the contract asks for fma;
    allowed: patterns that are no fault here."""

    name: str
    plan: Plan[Any]
    required: tuple[str, ...]
    fma: bool = False
    allowed: str = ""

    def faults(self, ptx: str) -> list[str]:
        """What is wrong with the PTX, in words; empty if nothing."""
        found = instructions(ptx)
        faults = [f"{wanted} is missing" for wanted in self.required if not any(i.startswith(wanted) for i in found)]
        for pattern in FORBIDDEN if self.fma else (*FORBIDDEN, _FMA):
            found -= {i for i in found if self.allowed and re.fullmatch(self.allowed, i)}
            faults += [f"{i} is forbidden" for i in sorted(found) if re.fullmatch(pattern, i)]
        return faults


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _operand(rows: int, k: int, scale_rows: int) -> tuple[Tensor, Tensor]:
    return _meta(rows, k, dtype=E4M3), _meta(scale_rows, num_blocks(k), dtype=torch.float32)


def expectations() -> Iterator[Expectation]:
    """Every kernel as an 8B model launches it, fp32 and pow2 scales, aligned shapes, ragged ones, and single elements
    (Triton turns integers that are 1 into constants)."""
    for fmt in (Fp8Format("block", "fp32"), Fp8Format("block", "pow2")):
        for t, width, vectors in ((8192, 4096, _VECTORS), (257, 1411, ()), (1, 1, ())):
            yield from _quantizing(fmt, _meta(t, width), vectors)
    fmt = Fp8Format()
    rows = Fp8Tensor(*_operand(8192, 4096, 8192), fmt)
    yield Expectation("dequantize", plan_dequantize(rows, torch.bfloat16), ("mul.rn.f32", *_VECTORS))
    yield Expectation("dequantize fp32", plan_dequantize(rows), ("mul.rn.f32", *_VECTORS))
    yield Expectation("exp32", plan_exp32(_meta(4096, dtype=torch.float32)), ("mul.rn.f32", "add.rn.f32"))
    yield Expectation("tree_sum", plan_tree_sum(_meta(8, 4096, dtype=torch.float32)), ("add.rn.f32",))
    yield from _rows()
    yield from _linears()
    yield from _gemms()
    yield from _attention()


def _quantizing(fmt: Fp8Format, x: Tensor, vectors: tuple[str, ...]) -> Iterator[Expectation]:
    t, width = x.shape
    label = f"{fmt.scale_format} {t}x{width}"
    needed = (*_ROUNDING, *vectors)
    weight = _meta(width)
    rows = Fp8Tensor(_meta(t, width, dtype=E4M3), _meta(t, num_blocks(width), dtype=torch.float32), fmt)
    yield Expectation(f"quantize 1x128 {label}", plan_rows(x, fmt, "tma"), needed)
    yield Expectation(f"quantize 1x128 of fp32 {label}", plan_rows(x.float(), fmt), needed)
    yield Expectation(f"quantize 128x128 {label}", plan_weight(x, fmt), needed)
    order = _meta(padded(t), dtype=torch.int64)
    yield Expectation(f"quantize 128x128 of a fused weight {label}", plan_weight(x, fmt, order), needed)
    yield Expectation(f"quantize along tokens {label}", plan_columns(x, fmt, "tma", pad_tokens=True), needed)
    yield Expectation(f"quantize both ways {label}", plan_both(x, fmt, "tma", pad_tokens=True), needed)
    yield Expectation(f"requantize along tokens {label}", plan_requantize(rows, "tma", pad_tokens=True), needed)
    plan = plan_rmsnorm(x, weight, 1e-6, fmt, x, layout="tma")
    yield Expectation(f"residual + RMSNorm + quantize {label}", plan, ("sqrt.rn.f32", *needed))
    plan = plan_rmsnorm(x, weight, 1e-6, fmt, layout="tma")
    yield Expectation(f"RMSNorm + quantize {label}", plan, ("sqrt.rn.f32", *needed))
    yield Expectation(f"SwiGLU + quantize {label}", plan_swiglu(_meta(t, 2 * width), fmt, layout="tma"), needed)


def _rows() -> Iterator[Expectation]:
    """What no quantizer follows: aligned shapes and ragged ones."""
    rounding = ("mul.rn.f32", "add.rn.f32")
    for t, width, vectors in ((8192, 4096, _VECTORS), (257, 1411, ())):
        x, weight, label = _meta(t, width), _meta(width), f"{t}x{width}"
        root = ("sqrt.rn.f32", "div.rn.f32", *rounding, *vectors)
        yield Expectation(f"RMSNorm {label}", plan_rmsnorm(x, weight, 1e-6), root)
        yield Expectation(f"residual + RMSNorm {label}", plan_rmsnorm(x, weight, 1e-6, residual=x), root)
        needed = ("div.rn.f32", *rounding, *vectors)
        yield Expectation(f"SwiGLU {label}", plan_swiglu(_meta(t, 2 * width)), needed)
        experts, weights = _meta(t, 8, width), _meta(t, 8, dtype=torch.float32)
        yield Expectation(f"sum over experts {label}", plan_moe_combine(experts, weights), (*rounding, *vectors))
    heads = _meta(8192 * 32, 128)
    yield Expectation("RMSNorm of heads", plan_rmsnorm(heads, _meta(128), 1e-6), ("sqrt.rn.f32", *_VECTORS))
    for t, num_heads, dim, vectors in ((8192, 32, 128, _VECTORS), (257, 3, 24, ())):
        angles = _meta(t, dim // 2, dtype=torch.float32)
        plan = plan_rope(_meta(t, num_heads, dim), angles, angles)
        yield Expectation(f"rope {t}x{num_heads}x{dim}", plan, ("mul.rn.f32", "sub.rn.f32", "add.rn.f32", *vectors))
    for t, vocabulary, loads in ((8192, 151936, _VECTORS[:1]), (257, 49153, ())):
        logits = _meta(t, vocabulary, dtype=torch.float32)
        needed = (*rounding, "bar.sync", *loads)
        yield Expectation(f"sum of exp {t}x{vocabulary}", plan_sum_exp(logits), needed)


def _linears() -> Iterator[Expectation]:
    needed = ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",)
    yield Expectation("BF16 linear", plan_linear(_meta(8192, 4096), _meta(12288, 4096)), needed)
    yield Expectation("BF16 linear of one row", plan_linear(_meta(1, 4096), _meta(151936, 4096)), needed)
    yield Expectation("BF16 linear ragged", plan_linear(_meta(257, 1411), _meta(131, 1411)), needed)
    experts, offsets = _meta(128, 1536, 2048), _meta(129, dtype=torch.int64)
    yield Expectation("routed BF16 linear", plan_routed_linear(_meta(2048, 2048), experts, offsets), needed)


def _attention() -> Iterator[Expectation]:
    products = tuple(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16" for n in (64, 128))
    softmax, allowed = ("ex2.approx.f32", "mul.rn.f32", "add.rn.f32"), r"ex2\.approx\..*"
    q, pool, cu = _meta(512, 32, 128), _meta(4096, 8, 128), [0, 128, 512]
    table, counts, requests = (_meta(*shape, dtype=torch.int32) for shape in ((64, 1024), (512,), (2,)))
    plan = plan_attention(q, pool, pool, table, requests, cu, counts, 0.088)
    yield Expectation("attention", plan, (*products, *softmax, "div.rn.f32"), allowed=allowed)
    k = _meta(512, 8, 128)
    first, second = plan_backward(q, q, k, k, plan.result, cu, 0.088)
    yield Expectation("attention backward, dq", first, (*products, *softmax), allowed=allowed)
    yield Expectation("attention backward, dk and dv", second, (*products, *softmax[:-1]), allowed=allowed)
    requests, counts = (_meta(512, dtype=torch.int64) for _ in range(2))
    plan = plan_attention(q, pool, pool, table, requests, None, counts, 0.088)
    yield Expectation("attention, decode", plan, (*products, *softmax, "div.rn.f32"), allowed=allowed)
    plan = plan_attention(q, pool, pool, table, requests, None, counts, 0.088, splits=2)
    yield Expectation("attention, split decode", plan, (*products, *softmax), allowed=allowed)
    merge = plan_merge_segments(plan.result, counts)
    yield Expectation("attention, merge of segments", merge, (*softmax, "div.rn.f32"), allowed=allowed)


def _gemms() -> Iterator[Expectation]:
    needed = ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "fma.rn.f32", "mul.rn.f32")
    a, weight = _operand(8192, 4096, 8192), _operand(12288, 4096, 96)
    yield Expectation("GEMM FProp", plan_gemm_nt(a, weight), needed, fma=True)
    one, ragged = _operand(1, 4096, 1), _operand(257, 1411, 257)
    yield Expectation("GEMM of one row", plan_gemm_nt(one, weight, torch.float32), needed, fma=True)
    yield Expectation("GEMM ragged", plan_gemm_nt(ragged, _operand(131, 1411, 131)), needed, fma=True)
    experts = [_meta(rows, 12288) for rows in (64, 200)]
    plan = plan_grouped_gemm_nt([(a[0][: len(e)], a[1][: len(e)]) for e in experts], [weight] * 2, experts, False)
    yield Expectation("grouped GEMM FProp", plan, needed, fma=True)
    stacked = _meta(128, 1536, 2048, dtype=E4M3), _meta(128, 1536, 16, dtype=torch.float32)
    offsets = _meta(129, dtype=torch.int64)
    routed = plan_routed_gemm_nt(_operand(2048, 2048, 2048), stacked, offsets, torch.bfloat16)
    yield Expectation("routed GEMM", routed, needed, fma=True)
    yield Expectation(
        "grouped GEMM ragged", plan_grouped_gemm_nt([ragged], [ragged], [_meta(257, 257)], False), needed, fma=True
    )
    a, b = _operand(12288, 8192, 12288), _operand(4096, 8192, 4096)
    main_grad = _meta(12288, 4096, dtype=torch.float32)
    yield Expectation("GEMM WGrad", plan_gemm_nt(a, b, main_grad), (*needed, "add.rn.f32"), fma=True)
    plan = plan_grouped_gemm_nt([a, a], [b, b], [main_grad, main_grad], True)
    yield Expectation("grouped GEMM WGrad", plan, (*needed, "add.rn.f32"), fma=True)


def compile_all() -> Iterator[tuple[Expectation, list[str], int]]:
    """Compile every kernel for sm_90: (expectation, faults, bytes of the cubin)."""
    for expectation in expectations():
        compiled = expectation.plan.compile()
        yield expectation, expectation.faults(compiled.asm["ptx"]), len(compiled.asm["cubin"])
