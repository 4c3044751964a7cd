"""Kernel set of compiled C++: the functions of `reference` with the same bits. What it has no kernel for
(inputs other than bf16) goes to `reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_megatron.native.tensors import call
from jetrl_megatron.ops import reference

MAX_EXACT_K = reference.MAX_EXACT_K
Prepared = list[tuple[Tensor, Tensor, int]]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return reference.rmsnorm(x, weight, eps)
    x = x.contiguous()
    y = torch.empty_like(x)
    h = x.shape[-1]
    call("rmsnorm", x, weight.contiguous(), float(eps), y, x.numel() // h, h)
    return y


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        return reference.rope(x, cos, sin)
    x = x.contiguous()
    y = torch.empty_like(x)
    call("rope", x, cos.contiguous(), sin.contiguous(), y, x.shape[0], x.shape[1], x.shape[2] // 2)
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    if gate_up.dtype != torch.bfloat16:
        return reference.swiglu(gate_up)
    gate_up = gate_up.contiguous()
    f = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], f, dtype=torch.bfloat16)
    call("swiglu", gate_up, y, y.numel() // max(f, 1), f)
    return y


def prepare_linear(weight: Tensor, weight_max: Tensor | None = None) -> Prepared:
    """Per chunk of 8192 columns: integers of the 20-bit row grids as bf16 panels (2 bytes per weight), scales [N]."""
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
        chunks.append((packed, scale, n))
    return chunks


def linear_partial(x: Tensor, prepared: Prepared, x_max: Tensor | None = None) -> Tensor:
    total: Tensor | None = None
    for i, (packed, scale, n) in enumerate(prepared):
        out = torch.empty(x.shape[0], n, dtype=torch.float64)
        _grid_gemm(x, i * MAX_EXACT_K, packed, scale, x_max, out, None)
        total = out if total is None else total + out
    assert total is not None
    return total


def linear(x: Tensor, prepared: Prepared) -> Tensor:
    if len(prepared) > 1:
        return linear_partial(x, prepared).float()
    packed, scale, n = prepared[0]
    out = torch.empty(x.shape[0], n, dtype=torch.float32)
    _grid_gemm(x, 0, packed, scale, None, None, out)
    return out


def _grid_gemm(
    x: Tensor,
    first: int,
    packed: Tensor,
    scale: Tensor,
    x_max: Tensor | None,
    out64: Tensor | None,
    out32: Tensor | None,
) -> None:
    x = x.to(torch.bfloat16).contiguous()
    m, k = x.shape
    width = min(MAX_EXACT_K, k - first)
    top = _row_max(x[:, first : first + width]) if x_max is None else x_max.double().contiguous()
    call("grid_gemm", _view(x, first), top, packed, scale, out64, out32, m, len(scale), width, k)


def _row_max(x: Tensor) -> Tensor:
    x = x.contiguous()
    top = torch.empty(x.shape[0], dtype=torch.float64)
    call("row_max", x, x.shape[0], x.shape[1], top)
    return top


def _view(x: Tensor, first: int) -> Tensor:
    """Contiguous x as a flat tensor that begins at column `first` of row 0; the kernel strides over rows itself."""
    return x.view(-1)[first:]


def attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, cu_queries: list[int], kv_len: Tensor, scale: float
) -> Tensor:
    if any(t.dtype != torch.bfloat16 for t in (q, k_pool, v_pool)):
        return reference.attention(q, k_pool, v_pool, table, cu_queries, kv_len, scale)
    out = torch.zeros(q.shape, dtype=q.dtype)
    table = table.to(torch.int32).contiguous()
    offsets = torch.tensor(cu_queries, dtype=torch.int64)
    heads, groups, dim = q.shape[1], k_pool.shape[1], q.shape[2]
    call(
        "attention",
        q.contiguous(),
        k_pool.contiguous(),
        v_pool.contiguous(),
        table,
        table.shape[1],
        offsets,
        len(cu_queries) - 1,
        kv_len.to(torch.int64).contiguous(),
        heads,
        groups,
        dim,
        float(scale),
        out,
    )
    return out


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
