"""What autograd keeps of a micro-batch, operator by operator, as `ops/` and `megatron/` save it.

T packed tokens of a rank's micro-batch, s ranks that share them under sequence parallelism, t tensor-parallel ranks.
"""

from __future__ import annotations

from jetrl_megatron.config.capacity.layout import Layout
from jetrl_megatron.config.capacity.weights import SCALE_BYTES, blocks
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.schema import PrecisionConfig

LOGITS_COPIES = 4  # fp32 [n, V] alive at once in the backward of log-softmax: logits, softmax, and two gradients


def linear_input(width: int, precision: PrecisionConfig) -> int:
    """Bytes per token of the input that a linear keeps for WGrad."""
    if precision.train == "bf16" or precision.saved_activation == "bf16":
        return 2 * width
    return width + SCALE_BYTES * blocks(width)


def layer_bytes_per_token(dims: ModelDims, layout: Layout, precision: PrecisionConfig) -> dict[str, float]:
    """Saved bytes per token and layer, by part. Inputs of column-parallel linears are gathered: whole on every rank."""
    t, s = layout.tensor, layout.tensor if layout.sequence else 1
    hidden, q, kv = dims.hidden_size, dims.q_size // t, dims.kv_size // t
    parts: dict[str, float] = {
        "norm inputs": 2 * 2 * hidden / s,
        # the fused output stays for v; q is a copy of its part; normed and rotated q and k
        "q, k, v": 2 * (q + 2 * kv) + 2 * q + (2 * (q + kv) if dims.qk_norm else 0) + 2 * (q + kv),
        "rope tables": 2 * 2 * 4 * (dims.head_dim // 2),
        "linear inputs": linear_input(hidden, precision) + linear_input(q, precision),
    }
    if precision.backend != "emulated":
        # Two fp32 per head, and the result; in bf16 that is the very tensor that the next linear keeps.
        kept = linear_input(q, precision) == 2 * q
        parts["attention"] = 2 * 4 * (dims.num_heads // t) + (0 if kept else 2 * q)
    if dims.moe is None:
        inner = dims.intermediate_size // t
        parts["swiglu input"] = 2 * 2 * inner
        parts["linear inputs"] += linear_input(hidden, precision) + linear_input(inner, precision)
        return parts
    moe = dims.moe
    rows = moe.experts_per_token / s  # per token, if the router is balanced
    # input, two fp32 [T, E]; indices of the permutations and of the combine, and its weights
    parts["router"] = (2 * hidden + 8 * moe.num_experts + 80 * moe.experts_per_token) / s
    parts["linear inputs"] += rows * (linear_input(hidden, precision) + linear_input(moe.intermediate_size, precision))
    parts["swiglu input"] = rows * 2 * 2 * moe.intermediate_size
    parts["expert outputs"] = rows * 2 * 2 * hidden  # as they came, and in ascending expert id
    return parts


def layers_bytes(dims: ModelDims, layout: Layout, precision: PrecisionConfig, tokens: int, recompute: bool) -> int:
    """Saved by the layers of the first stage, which holds the most micro-batches at once under 1F1B.

    In flight: P micro-batches; interleaved with v chunks, P * (1 + (P - 1) / (P v)) stages' worth (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2). Full recompute keeps a layer's input, and one layer whole while it is redone.
    """
    per_layer = tokens * sum(layer_bytes_per_token(dims, layout, precision).values())
    p, v = layout.pipeline, layout.virtual_pipeline
    in_flight = 1.0 if p == 1 else p * (1 + (p - 1) / (p * v)) if v > 1 else float(p)
    layers = dims.num_layers // p
    if not recompute:
        return round(in_flight * layers * per_layer)
    s = layout.tensor if layout.sequence else 1
    return round(in_flight * layers * tokens * 2 * dims.hidden_size / s + per_layer)


def logits_bytes(dims: ModelDims, layout: Layout, response_tokens: int) -> int:
    """The last stage, for all response tokens of a micro-batch: the larger of two moments in backward, and the final
    norm's input and the picked rows. First gathered fp32 logits with LOGITS_COPIES; then, for dW of lm_head, this
    rank's gradient in fp32, bf16 and fp32 again, and dW in fp32 before it is added to main_grad."""
    vocab = dims.padded_vocab_size(layout.tensor)
    own = vocab // layout.tensor
    softmax = LOGITS_COPIES * 4 * vocab * response_tokens
    weight_grad = (4 + 2 + 4) * own * response_tokens + 4 * own * dims.hidden_size
    return max(softmax, weight_grad) + response_tokens * 2 * 2 * dims.hidden_size
