"""One set of forward operators with two callers: Megatron-Core (training) and SGLang (rollout)."""

from jetrl_megatron.ops.attention import packed_attention, paged_attention
from jetrl_megatron.ops.operators import (
    ExactWeight,
    add_rmsnorm,
    embedding,
    fp8_grouped_linear,
    fp8_linear,
    grouped_linear,
    linear,
    lm_head,
    logprob,
    moe_combine,
    residual_add,
    rmsnorm,
    rope,
    route,
    router,
    row_parallel_linear,
    sample,
    swiglu,
)
from jetrl_megatron.ops.rope import RopeTable

__all__ = [
    "ExactWeight",
    "RopeTable",
    "add_rmsnorm",
    "embedding",
    "fp8_grouped_linear",
    "fp8_linear",
    "grouped_linear",
    "linear",
    "lm_head",
    "logprob",
    "moe_combine",
    "packed_attention",
    "paged_attention",
    "residual_add",
    "rmsnorm",
    "rope",
    "route",
    "router",
    "row_parallel_linear",
    "sample",
    "swiglu",
]
