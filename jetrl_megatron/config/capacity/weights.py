"""The tensors that a training rank and an engine rank hold, and their bytes in BF16, FP8, FP32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jetrl_megatron.config.capacity.layout import Layout
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.plan import BLOCK

SCALE_BYTES = 4


@dataclass(frozen=True)
class LocalWeight:
    """A parameter [n, k] of one rank (k = 1: a vector). parts: rows of the Hugging Face tensors that it fuses; count:
    equal ones; quantized: a linear that may run in FP8."""

    name: str
    n: int
    k: int = 1
    count: int = 1
    parts: tuple[int, ...] = ()
    quantized: bool = False
    expert: bool = False

    @property
    def numel(self) -> int:
        return self.n * self.k * self.count


def blocks(length: int) -> int:
    return -(-length // BLOCK)


def stage_weights(dims: ModelDims, layout: Layout, stage: int) -> list[LocalWeight]:
    """Parameters of one rank of pipeline stage `stage`."""
    tp, first, last = layout.tensor, stage == 0, stage == layout.pipeline - 1
    layers = dims.num_layers // layout.pipeline
    experts = 0 if dims.moe is None else dims.moe.num_experts // layout.expert
    out = list(_layer(dims, tp, layers, experts, expert_ways=1, kv_ways=tp))
    rows = dims.padded_vocab_size(tp) // tp
    if first:
        out.append(LocalWeight("embedding", rows, dims.hidden_size))
    if last:
        out.append(LocalWeight("final_norm", dims.hidden_size))
        if not dims.tied_embeddings or not first:
            out.append(LocalWeight("lm_head", rows, dims.hidden_size))
    return out


def engine_weights(dims: ModelDims, layout: Layout) -> list[LocalWeight]:
    """Parameters of one engine rank."""
    tp, ep = layout.engine_tensor, layout.engine_expert
    experts = 0 if dims.moe is None else dims.moe.num_experts // ep
    kv_ways = min(tp, dims.num_kv_heads)
    out = list(_layer(dims, tp, dims.num_layers, experts, expert_ways=tp // ep, kv_ways=kv_ways))
    rows = blocks64(dims.vocab_size) // tp
    out += [LocalWeight("embedding", rows, dims.hidden_size), LocalWeight("final_norm", dims.hidden_size)]
    return out if dims.tied_embeddings else [*out, LocalWeight("lm_head", rows, dims.hidden_size)]


def blocks64(vocab_size: int) -> int:
    """Vocabulary rows of an engine: SGLang pads to a multiple of 64."""
    return -(-vocab_size // 64) * 64


def _layer(
    dims: ModelDims, tp: int, layers: int, experts: int, expert_ways: int, kv_ways: int
) -> Iterator[LocalWeight]:
    hidden, q, kv = dims.hidden_size, dims.q_size // tp, dims.kv_size // kv_ways
    yield LocalWeight("norms", hidden, count=2 * layers)
    if dims.qk_norm:
        yield LocalWeight("qk_norms", dims.head_dim, count=2 * layers)
    if dims.qkv_bias:
        yield LocalWeight("qkv_bias", q + 2 * kv, count=layers)
    yield LocalWeight("qkv", q + 2 * kv, hidden, layers, (q, kv, kv), True)
    yield LocalWeight("proj", hidden, q, layers, (hidden,), True)
    if dims.moe is None:
        inner, count, expert = dims.intermediate_size // tp, layers, False
    else:
        yield LocalWeight("router", dims.moe.num_experts, hidden, layers)
        inner, count, expert = dims.moe.intermediate_size // expert_ways, layers * experts, True
    yield LocalWeight("fc1", 2 * inner, hidden, count, (inner, inner), True, expert)
    yield LocalWeight("fc2", hidden, inner, count, (hidden,), True, expert)


def num_parameters(weights: list[LocalWeight]) -> int:
    return sum(weight.numel for weight in weights)


def fprop_bytes(weight: LocalWeight) -> int:
    """FP8 codes, and the scales twice: one per row and 128 columns, and transposed for the GEMM (fp8/gemm.py)."""
    return weight.count * (weight.n * weight.k + 2 * SCALE_BYTES * weight.n * blocks(weight.k))


def dgrad_bytes(weight: LocalWeight) -> int:
    """The transposed codes, every part padded to whole blocks, and a scale per block of rows and column."""
    rows = BLOCK * sum(blocks(part) for part in weight.parts)
    return weight.count * weight.k * (rows + SCALE_BYTES * rows // BLOCK)


def fp8_bytes(weights: list[LocalWeight], dgrad: bool) -> int:
    """FP8 copies of the linears that a rank keeps for one weight version."""
    linears = [weight for weight in weights if weight.quantized]
    return sum(fprop_bytes(w) + (dgrad_bytes(w) if dgrad else 0) for w in linears)


def bundle_bytes(dims: ModelDims, fp8: bool) -> int:
    """One weight version as it is sent: whole Hugging Face tensors, linears in FP8 with [N/128, K/128] scales."""
    experts = 0 if dims.moe is None else dims.moe.num_experts
    layer = list(_layer(dims, 1, dims.num_layers, experts, 1, 1))
    head = 1 if dims.tied_embeddings else 2
    total = 2 * dims.hidden_size * (head * dims.vocab_size + 1)
    for w in layer:
        if w.quantized and fp8:
            grid = sum(blocks(part) for part in w.parts) * blocks(w.k)
            total += w.numel + SCALE_BYTES * w.count * grid
        else:
            total += 2 * w.numel
    return total


def active_parameters(dims: ModelDims) -> tuple[int, int]:
    """(weights of linears that one token meets in all layers, weights of lm_head)."""
    experts = 0 if dims.moe is None else dims.moe.experts_per_token
    layer = _layer(dims, 1, dims.num_layers, experts, 1, 1)
    return sum(w.numel for w in layer if w.k > 1), dims.vocab_size * dims.hidden_size


def kv_bytes_per_token(dims: ModelDims, layout: Layout) -> int:
    """BF16 keys and values of all layers on one engine rank."""
    ways = min(layout.engine_tensor, dims.num_kv_heads)
    return 2 * 2 * dims.num_layers * dims.kv_size // ways
