"""The prepared form of an engine's bf16 weights, made once per version.

On GPUs it is the weight itself, whose memory an update never moves: a captured CUDA graph goes on reading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.rollout.weight_loader import weight_generation


def exact_weight(layer: Any, maximum: Callable[[Tensor], Tensor] | None = None) -> ops.ExactWeight:
    """Of layer.weight [N, K]; maximum: as for `ExactWeight.of`."""
    cached: tuple[int, ops.ExactWeight] | None = layer.__dict__.get("jetrl_exact")
    if cached is None or cached[0] != weight_generation():
        cached = layer.__dict__["jetrl_exact"] = weight_generation(), ops.ExactWeight.of(layer.weight, maximum)
    return cached[1]
