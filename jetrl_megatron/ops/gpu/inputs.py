"""Inputs on which a quantizer can go wrong: ragged shapes, and every kind of number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import E4M3

SHAPES = ((1, 1), (1, 128), (3, 127), (33, 129), (128, 128), (130, 300), (257, 66))
KINDS = ("normal", "spread", "zeros", "tiny", "huge", "not finite", "ties")
_TINY = 2.0**-133  # the smallest bf16 subnormal


def matrix(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A matrix of one of KINDS on the CPU, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + 31 * shape[0] + shape[1] + KINDS.index(kind))
    x = torch.randn(shape, generator=generator)
    position = torch.randint(0, x.numel(), (4,), generator=generator)
    if kind == "spread":
        x *= torch.exp(8 * torch.randn(shape[0], 1, generator=generator) + 3 * torch.randn(shape, generator=generator))
    elif kind == "zeros":
        x = torch.where(x > 0.5, 0.0, -0.0)
        x.view(-1)[position[0]] = _TINY
    elif kind == "tiny":
        x = torch.round(x * 4) * _TINY * 2.0 ** torch.randint(0, 16, (shape[0], 1), generator=generator)
    elif kind == "huge":
        x = (x * 1e38).clamp(-3.38e38, 3.38e38)
    elif kind == "not finite":
        position[0] %= shape[1]  # the first row
        x.view(-1)[position] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    elif kind == "ties":
        points = tie_points(dtype)
        x = points[torch.randint(0, len(points), shape, generator=generator)]
        x[:, ::128] = 448.0  # scale 1 in every group, so that the points reach the rounding as they are
    return x.to(dtype)


def tie_points(dtype: torch.dtype) -> Tensor:
    """Every E4M3 value up to 448, every midpoint between two, and their neighbours in bf16 or fp32; both signs."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    if dtype == torch.bfloat16:
        bits = points.bfloat16().view(torch.int16)
        near = torch.cat([bits, bits + 1, (bits - 1).clamp_min(0)]).view(torch.bfloat16).float()
    else:
        bits32 = points.view(torch.int32)
        near = torch.cat([bits32, bits32 + 1, (bits32 - 1).clamp_min(0)]).view(torch.float32)
    near = near[near <= 448.0]
    return torch.cat([near, -near])


def fuzz_set() -> Iterator[tuple[str, Tensor]]:
    """(name, matrix): every kind in every shape, bf16 and fp32 in turn; ties in both, in rows long enough for all."""
    for i, shape in enumerate(SHAPES):
        for j, kind in enumerate(KINDS):
            dtype = (torch.bfloat16, torch.float32)[(i + j) % 2]
            yield f"{kind} {shape[0]}x{shape[1]} {_name(dtype)}", matrix(kind, shape, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        points = tie_points(dtype)
        chunks = torch.nn.functional.pad(points, (0, -len(points) % 127)).view(-1, 127)
        x = torch.nn.functional.pad(chunks, (1, 0), value=448.0)
        yield f"all ties {x.shape[0]}x128 {_name(dtype)}", x.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
