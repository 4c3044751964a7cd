"""Kernel set of compiled C++: the functions of `reference` with the same bits. What it has no kernel for
(inputs other than bf16) goes to `reference`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, Fp8Tensor
from jetrl_megatron.native.tensors import call, fp8_buffers, has_tiles
from jetrl_megatron.ops import reference

MAX_EXACT_K = reference.MAX_EXACT_K
_MIN_TILE_ROWS = 6  # as in fp8/gemm.py


@dataclass(frozen=True)
class _Chunk:
    """Up to 8192 columns of a weight: integers of its 20-bit row grids as bf16 panels (2 bytes each), scales [N]."""

    panels: Tensor
    scale: Tensor
    width: int

    @functools.cached_property
    def tiles(self) -> Tensor:
        """int8 digits for matrix tiles, 3 bytes per weight; made on first use."""
        n = len(self.scale)
        packed = torch.empty(-(-n // 16) * -(-self.width // 64) * 3 * 1024, dtype=torch.int8)
        call("grid_digits", self.panels, n, self.width, packed)
        return packed


Prepared = list[_Chunk]
top_experts, expert_weights = reference.top_experts, reference.expert_weights
attention_backward = reference.attention_backward


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _bf16(x, weight):
        return reference.rmsnorm(x, weight, eps)
    return _rmsnorm(x, None, weight, eps, None)[0]


def rmsnorm_quantize(x: Tensor, weight: Tensor, eps: float, fmt: Fp8Format) -> tuple[Tensor, Fp8Tensor]:
    if not _bf16(x, weight):
        return reference.rmsnorm_quantize(x, weight, eps, fmt)
    y, _, quantized = _rmsnorm(x, None, weight, eps, fmt)
    assert quantized is not None
    return y, quantized


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None
) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
    if not _bf16(x, residual, weight):
        return reference.add_rmsnorm(x, residual, weight, eps, fmt)
    return _rmsnorm(x, residual, weight, eps, fmt)


def _rmsnorm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fmt: Fp8Format | None
) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
    """(norm, what was normed, the norm quantized if there is a format)."""
    assert residual is None or residual.shape == x.shape
    assert weight.shape == x.shape[-1:]
    x, h = x.contiguous(), x.shape[-1]
    residual = None if residual is None else residual.contiguous()
    total = None if residual is None else torch.empty_like(x)
    y = torch.empty_like(x)
    quantized = _fp8_like(y, fmt)
    call("rmsnorm", x, residual, weight.contiguous(), float(eps), total, y, *_codes(quantized), x.numel() // h, h)
    return y, x if total is None else total, quantized


def _bf16(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 for t in tensors)


def _fp8_like(y: Tensor, fmt: Fp8Format | None) -> Fp8Tensor | None:
    """Memory for y [..., K] quantized."""
    return None if fmt is None else Fp8Tensor(*fp8_buffers(y.numel() // max(y.shape[-1], 1), y.shape[-1]), fmt)


def _codes(quantized: Fp8Tensor | None) -> tuple[int, Tensor | None, Tensor | None]:
    """The kernels' arguments: pow2, codes, scales."""
    if quantized is None:
        return 0, None, None
    return int(quantized.format.scale_format == "pow2"), quantized.data, quantized.scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        return reference.rope(x, cos, sin)
    x = x.contiguous()
    y = torch.empty_like(x)
    call("rope", x, cos.contiguous(), sin.contiguous(), y, x.shape[0], x.shape[1], x.shape[2] // 2)
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    return _swiglu(gate_up, None)[0] if _bf16(gate_up) else reference.swiglu(gate_up)


def swiglu_quantize(gate_up: Tensor, fmt: Fp8Format) -> tuple[Tensor, Fp8Tensor]:
    if not _bf16(gate_up):
        return reference.swiglu_quantize(gate_up, fmt)
    y, quantized = _swiglu(gate_up, fmt)
    assert quantized is not None
    return y, quantized


def _swiglu(gate_up: Tensor, fmt: Fp8Format | None) -> tuple[Tensor, Fp8Tensor | None]:
    gate_up = gate_up.contiguous()
    f = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], f, dtype=torch.bfloat16)
    quantized = _fp8_like(y, fmt)
    call("swiglu", gate_up, y, *_codes(quantized), y.numel() // max(f, 1), f)
    return y, quantized


def prepare_linear(weight: Tensor, weight_max: Tensor | None = None) -> Prepared:
    """One chunk per 8192 columns. weight_max: max |row| [N, 1] where K is split over ranks."""
    weight = weight.to(torch.bfloat16).contiguous()
    n, k = weight.shape
    chunks = []
    for first in range(0, k, MAX_EXACT_K):
        width = min(MAX_EXACT_K, k - first)
        part = weight[:, first : first + width]
        top = _row_max(part) if weight_max is None else weight_max.double().contiguous()
        packed = torch.empty(-(-n // 16) * width * 16, dtype=torch.uint16)
        scale = torch.empty(n, dtype=torch.float64)
        call("pack_grid", _view(weight, first), top, n, width, k, packed, scale)
        chunks.append(_Chunk(packed, scale, width))
    return chunks


def linear_partial(x: Tensor, prepared: Prepared, x_max: Tensor | None = None) -> Tensor:
    total: Tensor | None = None
    for i, chunk in enumerate(prepared):
        out = torch.empty(x.shape[0], len(chunk.scale), dtype=torch.float64)
        _grid_gemm(x, i * MAX_EXACT_K, chunk, x_max, out, None)
        total = out if total is None else total + out
    assert total is not None
    return total


def linear(x: Tensor, prepared: Prepared) -> Tensor:
    if len(prepared) > 1:
        return linear_partial(x, prepared).float()
    out = torch.empty(x.shape[0], len(prepared[0].scale), dtype=torch.float32)
    _grid_gemm(x, 0, prepared[0], None, None, out)
    return out


def prepare_experts(weight: Tensor) -> list[Prepared]:
    return [prepare_linear(expert) for expert in weight]


def routed_linear(x: Tensor, prepared: list[Prepared], offsets: Tensor) -> Tensor:
    return reference.by_group(linear, x, prepared, offsets)


def row_parallel_linear(
    x: Tensor, prepared: Prepared, maximum: Callable[[Tensor], Tensor], sum_fp64: Callable[[Tensor], Tensor]
) -> Tensor:
    return sum_fp64(linear_partial(x, prepared, maximum(reference.row_max(x)))).float()


def _grid_gemm(
    x: Tensor, first: int, chunk: _Chunk, x_max: Tensor | None, out64: Tensor | None, out32: Tensor | None
) -> None:
    """Columns [first, first + width) of bf16 x times the chunk, into one of the outputs."""
    x = x.to(torch.bfloat16).contiguous()
    m, k = x.shape
    width = chunk.width
    top = _row_max(x[:, first : first + width]) if x_max is None else x_max.double().contiguous()
    shape = (out64, out32, m, len(chunk.scale), width, k)
    if m >= _MIN_TILE_ROWS and has_tiles() and bool(torch.isfinite(top).all()):
        call("grid_gemm_digits", _view(x, first), top, chunk.tiles, chunk.scale, *shape)
    else:
        call("grid_gemm", _view(x, first), top, chunk.panels, chunk.scale, *shape)


def _row_max(x: Tensor) -> Tensor:
    x = x.contiguous()
    top = torch.empty(x.shape[0], dtype=torch.float64)
    call("row_max", x, x.shape[0], x.shape[1], top)
    return top


def _view(x: Tensor, first: int) -> Tensor:
    """Contiguous x as a flat tensor that begins at column `first` of row 0; the kernel strides over rows itself."""
    return x.view(-1)[first:]


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
) -> Tensor:
    if not _bf16(q, k_pool, v_pool):
        return reference.attention(q, k_pool, v_pool, table, rows, cu_queries, kv_len, scale)
    out = torch.zeros(q.shape, dtype=q.dtype)
    table = table.to(torch.int32).contiguous()
    offsets = torch.arange(len(q) + 1) if cu_queries is None else torch.tensor(cu_queries, dtype=torch.int64)
    heads, groups, dim = q.shape[1], k_pool.shape[1], q.shape[2]
    call(
        "attention",
        q.contiguous(),
        k_pool.contiguous(),
        v_pool.contiguous(),
        table,
        table.shape[1],
        rows.to(torch.int64).contiguous(),
        offsets,
        len(offsets) - 1,
        kv_len.to(torch.int64).contiguous(),
        heads,
        groups,
        dim,
        float(scale),
        out,
    )
    return out


def attention_forward(*inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    return attention(*inputs), ()


def moe_combine(outputs: Tensor, weights: Tensor) -> Tensor:
    if outputs.dtype != torch.bfloat16:
        return reference.moe_combine(outputs, weights)
    tokens, top_k, h = outputs.shape
    y = torch.empty(tokens, h, dtype=torch.bfloat16)
    call("moe_combine", outputs.contiguous(), weights.float().contiguous(), y, tokens, top_k, h)
    return y


def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float().contiguous()
    rows, vocab = logits.shape
    top = torch.empty(rows, dtype=torch.float32)
    log_sum = torch.empty(rows, dtype=torch.float64)
    call("log_sum_exp", logits, rows, vocab, top, log_sum)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - top
    return (chosen.double() - log_sum).float()


def sample(logits: Tensor, uniforms: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    logits = logits.float().contiguous()
    weights = torch.empty(logits.shape, dtype=torch.float64)
    call("exp_weights", logits, logits.shape[0], logits.shape[1], weights)
    return reference.draw(logits, weights, uniforms, top_p, top_k)
