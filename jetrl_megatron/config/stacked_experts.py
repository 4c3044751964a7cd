"""Checkpoints that stack the experts of a layer in one tensor, seen as one tensor per expert. Torch-free.

`mlp.experts.gate_up_proj` [E, 2F, H] holds gate_proj and then up_proj of every expert, `mlp.experts.down_proj`
[E, H, F] its down_proj (the layout of transformers 5 in memory; published checkpoints have one tensor per expert).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ExpertRows(NamedTuple):
    """Rows [first, last) of one expert in a stacked tensor."""

    expert: int
    first: int
    last: int


def split_experts(name: str, shape: Sequence[int]) -> dict[str, ExpertRows]:
    """Per-expert names (`...mlp.experts.3.up_proj.weight`) and where they lie in the stacked tensor `name`; empty for
    any other tensor."""
    prefix, _, leaf = name.rpartition(".")
    projections = _PROJECTIONS.get(leaf, ())
    if not projections or not prefix.endswith(".mlp.experts") or len(shape) != 3 or shape[1] % len(projections):
        return {}
    rows = shape[1] // len(projections)
    return {
        f"{prefix}.{expert}.{projection}.weight": ExpertRows(expert, i * rows, (i + 1) * rows)
        for expert in range(shape[0])
        for i, projection in enumerate(projections)
    }
