"""Memory that is used again: on most machines touching new pages costs more than copying what goes into them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Memory:
    """Buffers by name, each as large as the largest tensor asked of it."""

    def __init__(self) -> None:
        self._buffers: dict[str, mmap.mmap] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of any content, valid until the next one of this name."""
        num_bytes = prod(shape) * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or len(held) < num_bytes:
            self._buffers.pop(name, None)  # the old pages go first
            held = self._buffers[name] = mmap.mmap(-1, max(num_bytes, 1))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                held.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(held, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


def own_storage(rows: Tensor) -> Tensor:
    """Contiguous `rows` as a tensor whose storage holds nothing else (`torch.save` writes whole storages)."""
    assert rows.is_contiguous()
    return torch.frombuffer(rows.view(-1).view(torch.uint8).numpy(), dtype=rows.dtype).view(rows.shape)


def cut_rows(pieces: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Rows [first, last) of a tensor given as consecutive rows in pieces, as views."""
    found, row = [], 0
    for piece in pieces:
        start, stop = max(first - row, 0), min(last - row, len(piece))
        if start < stop:
            found.append(piece[start:stop])
        row += len(piece)
    return found
