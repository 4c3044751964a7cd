"""Rotary embedding tables: one fp64 computation for both callers, rounded to fp32.

Source: RoFormer (arXiv 2104.09864); llama3 scaling as in Hugging Face `_compute_llama3_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CHUNK = 1024  # fixed shape of one evaluation, so that a position always takes the same vector path


@dataclass
class RopeTable:
    """cos and sin of positions 0 to num_positions - 1, the length that the model was made for; scaling: the llama3
    parameters or None. Computed on first use, on the CPU, so that they are the same bits everywhere; kept where they
    are looked up. A lookup reads nothing on the host, so callers answer for the positions: the configuration's rule on
    lengths, and engines, which end a request there."""

    theta: float
    head_dim: int
    num_positions: int
    scaling: Mapping[str, float] | None = None
    _cos_sin: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def inverse_frequencies(self) -> Tensor:
        """fp64 [head_dim / 2]."""
        d = self.head_dim
        plain = [self.theta ** (-2.0 * i / d) for i in range(d // 2)]
        if self.scaling is not None:
            plain = [_llama3(f, self.scaling) for f in plain]
        return torch.tensor(plain, dtype=torch.float64)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int -> fp32 cos, sin [T, head_dim / 2]."""
        if self._cos_sin is None:
            self._cos_sin = self._compute()
        if self._cos_sin[0].device != positions.device:
            self._cos_sin = self._cos_sin[0].to(positions.device), self._cos_sin[1].to(positions.device)
        cos, sin = self._cos_sin
        positions = positions.long()
        return cos[positions], sin[positions]

    def _compute(self) -> tuple[Tensor, Tensor]:
        inverse = self.inverse_frequencies()
        starts = range(0, self.num_positions, _CHUNK)
        chunks = [torch.arange(start, start + _CHUNK, dtype=torch.float64)[:, None] * inverse for start in starts]
        cos, sin = torch.cat([c.cos().float() for c in chunks]), torch.cat([c.sin().float() for c in chunks])
        return cos[: self.num_positions], sin[: self.num_positions]


def _llama3(frequency: float, scaling: Mapping[str, float]) -> float:
    """Long wavelengths are divided by `factor`, short ones kept, the band between interpolated."""
    original = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency
