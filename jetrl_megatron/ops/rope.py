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
    """cos and sin of every position, grown on demand. scaling: the llama3 parameters or None. Computed on the CPU, so
    that they are the same bits everywhere; kept where they are looked up."""

    theta: float
    head_dim: int
    scaling: Mapping[str, float] | None = None
    _cos: Tensor = field(default_factory=lambda: torch.empty(0))
    _sin: Tensor = field(default_factory=lambda: torch.empty(0))

    def inverse_frequencies(self) -> Tensor:
        """fp64 [head_dim / 2]."""
        d = self.head_dim
        plain = [self.theta ** (-2.0 * i / d) for i in range(d // 2)]
        if self.scaling is not None:
            plain = [_llama3(f, self.scaling) for f in plain]
        return torch.tensor(plain, dtype=torch.float64)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int -> fp32 cos, sin [T, head_dim / 2]."""
        needed = int(positions.max()) + 1 if positions.numel() else 1
        if self._cos.shape[0] < needed:
            self._grow(needed)
        if self._cos.device != positions.device:
            self._cos, self._sin = self._cos.to(positions.device), self._sin.to(positions.device)
        positions = positions.long()
        return self._cos[positions], self._sin[positions]

    def _grow(self, needed: int) -> None:
        inverse = self.inverse_frequencies()
        chunks = [torch.arange(c, c + _CHUNK, dtype=torch.float64)[:, None] * inverse for c in range(0, needed, _CHUNK)]
        self._cos = torch.cat([c.cos().float() for c in chunks])
        self._sin = torch.cat([c.sin().float() for c in chunks])


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
