"""One set of forward operators with two callers: Megatron-Core (training) and SGLang (rollout)."""

from jetrl_megatron.ops.attention import packed_attention, paged_attention
from jetrl_megatron.ops.operators import (
    ExactWeight,
    add_rmsnorm,
    bias_add,
    embedding,
    fp8_linear,
    linear,
    lm_head,
    logprob,
    residual_add,
    rmsnorm,
    rope,
    row_parallel_linear,
    sample,
    swiglu,
)
from jetrl_megatron.ops.rope import RopeTable

__all__ = [
    "ExactWeight",
    "RopeTable",
    "add_rmsnorm",
    "bias_add",
    "embedding",
    "fp8_linear",
    "linear",
    "lm_head",
    "logprob",
    "packed_attention",
    "paged_attention",
    "residual_add",
    "rmsnorm",
    "rope",
    "row_parallel_linear",
    "sample",
    "swiglu",
]
