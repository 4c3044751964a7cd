"""Times of the GPU kernels: memory-bound ones against a copy of the same bytes, linears and attention against BF16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, Fp8Weight, quantize_weight, whole
from jetrl_megatron.fp8.backends import load
from jetrl_megatron.fp8.gpu import columns, elementwise, fused, logprob, quantize
from jetrl_megatron.fp8.gpu.attention import attention
from jetrl_megatron.ops.attention import packed_pool
from jetrl_megatron.ops.gpu import kernels

# Hidden size, and (N, K) of qkv, o, gate+up, down: Qwen3-8B, -14B, -32B.
Models = dict[str, tuple[int, tuple[tuple[int, int], ...]]]
MODELS: Models = {
    "8B": (4096, ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))),
    "14B": (5120, ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408))),
    "32B": (5120, ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600))),
}
SMALL_MODELS: Models = {"small": (256, ((256, 256),))}  # for the interpreter
TOKENS = (64, 8192)  # a decode batch, a training micro-batch
# Sequences, keys of each, H, G, D: Qwen3-8B in training, decoding few long sequences, and many.
ATTENTION = ((2, 4096, 32, 8, 128), (4, 16384, 32, 8, 128), (128, 4096, 32, 8, 128))
_ROUNDS = 20
_FLUSH_BYTES = 256 << 20  # more than the L2 cache


@dataclass(frozen=True)
class Bandwidth:
    """A kernel that only moves memory. percent_of_copy: its bytes per second over those of `copy_`."""

    kernel: str
    shape: str
    ms: float
    gb_per_s: float
    percent_of_copy: float


@dataclass(frozen=True)
class Speed:
    """A linear's forward or backward. ratio: time of BF16 over ours; above 1 is faster."""

    backend: str
    model: str
    shape: str
    direction: str
    ms: float
    bf16_ms: float

    @property
    def ratio(self) -> float:
        return self.bf16_ms / self.ms


@dataclass(frozen=True)
class Attended:
    """Attention of one kind. torch_ms: scaled_dot_product_attention on keys that already lie one after the other."""

    what: str
    shape: str
    ms: float
    torch_ms: float

    @property
    def ratio(self) -> float:
        return self.torch_ms / self.ms


def time_ms(function: Callable[[], Any], device: str) -> float:
    """Median time of a call with a cold L2 cache, by events on a GPU; one call by the clock elsewhere."""
    function()
    if device == "cpu":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = []
    for _ in range(_ROUNDS):
        flush.zero_()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        function()
        end_event.record()
        events.append((start_event, end_event))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _num_bytes(value: Any) -> int:
    """Bytes of all tensors in arguments or results."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_num_bytes(item) for item in value)
    return sum(_num_bytes(item) for item in vars(value).values()) if hasattr(value, "__dataclass_fields__") else 0


def bandwidths(device: str, shapes: tuple[tuple[int, int], ...] | None = None) -> Iterator[Bandwidth]:
    """Every memory-bound kernel at [tokens, hidden], as training launches it."""
    shapes = shapes or tuple((TOKENS[-1], hidden) for hidden in sorted({hidden for hidden, _ in MODELS.values()}))
    for t, width in shapes:
        x = torch.randn(t, width, device=device).bfloat16()
        copy = torch.empty_like(x)
        copy_rate = 2 * _num_bytes(x) / time_ms(lambda: copy.copy_(x), device)  # noqa: B023
        yield Bandwidth("copy", f"{t}x{width}", 2 * _num_bytes(x) / copy_rate, copy_rate / 1e6, 100.0)
        for name, inputs, function in _memory_bound(x):
            moved = _num_bytes(inputs) + _num_bytes(function())
            ms = time_ms(function, device)
            yield Bandwidth(name, f"{t}x{width}", ms, moved / ms / 1e6, 100 * moved / ms / copy_rate)


def _memory_bound(x: Tensor) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """(name, what is read, call)."""
    fmt = Fp8Format()
    rows = quantize.quantize_rows(x, fmt, "tma")
    weight = torch.ones(x.shape[1], dtype=torch.bfloat16, device=x.device)
    gate_up = torch.cat([x, x], dim=1)
    yield "quantize 1x128", x, lambda: quantize.quantize_rows(x, fmt, "tma")
    yield "quantize 128x128", x, lambda: quantize.quantize_weight(x, fmt)
    yield "quantize along tokens", x, lambda: columns.quantize_columns(x, fmt, "tma", pad_tokens=True)
    yield "quantize both ways", x, lambda: columns.quantize_both(x, fmt, "tma", pad_tokens=True)
    yield "requantize along tokens", rows, lambda: columns.requantize_columns(rows, "tma", pad_tokens=True)
    yield "dequantize", rows, lambda: quantize.dequantize(rows, torch.bfloat16)
    yield "RMSNorm", (x, weight), lambda: fused.rmsnorm(x, weight, 1e-6)
    yield "RMSNorm + quantize", (x, weight), lambda: fused.rmsnorm(x, weight, 1e-6, fmt, layout="tma")
    yield (
        "residual + RMSNorm + quantize",
        (x, x, weight),
        lambda: fused.rmsnorm(x, weight, 1e-6, fmt, residual=x, layout="tma"),
    )
    yield "SwiGLU", gate_up, lambda: fused.swiglu(gate_up)
    yield "SwiGLU + quantize", gate_up, lambda: fused.swiglu(gate_up, fmt, layout="tma")
    heads = x.view(len(x), -1, 128)
    angles = torch.rand(len(x), 64, device=x.device)
    yield "rope", (x, angles, angles), lambda: elementwise.rope(heads, angles, angles)
    experts = gate_up.view(len(x), 2, -1)
    yield "sum over experts", (experts, angles[:, :2]), lambda: elementwise.moe_combine(experts, angles[:, :2])
    logits = gate_up.float()
    yield "sum of exp", logits, lambda: logprob.sum_exp(logits)


def speeds(
    backend: str,
    device: str,
    models: Models | None = None,
    tokens: tuple[int, ...] = TOKENS,
) -> Iterator[Speed]:
    """Every linear of the models, forward (quantizer and GEMM) and backward (both quantizers, DGrad, WGrad)."""
    for model, (_, layers) in (models or MODELS).items():
        for n, k in layers:
            weight, w = _weight(n, k, device)
            for t in tokens:
                yield from _speeds_of(backend, device, model, weight, w, t)


def _weight(n: int, k: int, device: str) -> tuple[Fp8Weight, Tensor]:
    w = torch.randn(n, k, device=device).mul_(0.02).bfloat16()
    return Fp8Weight.of(quantize_weight(w, Fp8Format()), whole(n)), w


def _speeds_of(name: str, device: str, model: str, weight: Fp8Weight, w: Tensor, t: int) -> Iterator[Speed]:
    backend, (n, k), fmt = load(name), w.shape, Fp8Format()
    x = torch.randn(t, k, device=device).bfloat16()
    dy = torch.randn(t, n, device=device).bfloat16()
    main_grad = torch.zeros(n, k, device=device)
    fprop, transposed = weight.fprop, weight.dgrad
    _, saved = backend.fprop(x, fprop, 1, torch.bfloat16)

    def backward() -> None:
        rows, dy_t = backend.quantize_both(dy, fmt)
        backend.matmul(rows, transposed, torch.bfloat16)
        backend.wgrad(dy_t, backend.requantize_columns(saved, torch.bfloat16), main_grad)

    def bf16_backward() -> None:
        dy @ w
        main_grad.add_(dy.t() @ x)

    shape = f"T={t} N={n} K={k}"
    ours = time_ms(lambda: backend.fprop(x, fprop, 1, torch.bfloat16), device)
    yield Speed(name, model, shape, "forward", ours, time_ms(lambda: torch.nn.functional.linear(x, w), device))
    if t >= 128:  # nobody trains on a decode batch
        yield Speed(name, model, shape, "backward", time_ms(backward, device), time_ms(bf16_backward, device))


def attentions(device: str, shapes: tuple[tuple[int, ...], ...] | None = None) -> Iterator[Attended]:
    """Decode in one program per query and split over keys; where sequences are few, training's forward and backward."""
    for batch, length, heads, groups, dim in shapes or ATTENTION:
        k, v = (torch.randn(batch * length, groups, dim, device=device).bfloat16() for _ in range(2))
        shape = f"{batch}x{length} H={heads} G={groups} D={dim}"
        yield from _decodes(shape, torch.randn(batch, heads, dim, device=device).bfloat16(), k, v)
        if batch * length <= TOKENS[-1]:
            yield from _trainings(shape, batch, torch.randn(batch * length, heads, dim, device=device).bfloat16(), k, v)


def _decodes(shape: str, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Attended]:
    """q [B, H, D]: one query per sequence, whose keys are scattered over the pools."""
    batch, scale = len(q), q.shape[-1] ** -0.5
    table = torch.randperm(len(k), device=q.device).view(batch, -1).int()
    rows, kv_len = torch.arange(batch, device=q.device), torch.full((batch,), table.shape[1], device=q.device)
    keys, values = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (k, v))
    stock = time_ms(
        lambda: F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True), q.device.type
    )

    def run(splits: int | None) -> Tensor:
        return attention(q, k, v, table, rows, None, kv_len, scale, splits=splits)

    yield Attended("decode", shape, time_ms(lambda: run(1), q.device.type), stock)
    yield Attended("decode, split as chosen", shape, time_ms(lambda: run(None), q.device.type), stock)


def _trainings(shape: str, batch: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Attended]:
    cu, scale = list(range(0, len(q) + 1, len(q) // batch)), q.shape[-1] ** -0.5
    pool, dout = packed_pool(q, cu), torch.randn_like(q)
    _, saved = kernels.attention_forward(q, k, v, *pool, scale)
    upstream, queries, keys, values = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (dout, q, k, v))
    inputs = tuple(x.contiguous().requires_grad_() for x in (queries, keys, values))

    def stock() -> Tensor:
        return F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True, enable_gqa=True)

    o, device = stock(), q.device.type
    forward = time_ms(lambda: kernels.attention_forward(q, k, v, *pool, scale), device)
    yield Attended("training, forward", shape, forward, time_ms(stock, device))
    backward = time_ms(lambda: kernels.attention_backward(dout, q, k, v, saved, cu, scale), device)
    stock_backward = time_ms(lambda: torch.autograd.grad(o, inputs, upstream, retain_graph=True), device)
    yield Attended("training, backward", shape, backward, stock_backward)
