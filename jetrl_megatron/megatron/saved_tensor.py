"""Where the bytes of a tensor lie in a file of `torch.save`, without loading them."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

_LOCAL_HEADER = 30  # bytes of a zip entry's header in front of its name; two lengths at its end


@dataclass(frozen=True)
class SavedTensor:
    """A contiguous tensor. start: its first byte in the file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def saved_tensor(file: BinaryIO) -> SavedTensor | None:
    """None for anything but a contiguous tensor of a classic storage. Raises zipfile.BadZipFile, EOFError or
    pickle.UnpicklingError for a damaged file."""
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in entries:
            raise zipfile.BadZipFile("no data.pkl")
        pickled = entries["data.pkl"]
        file.seek(_start(file, pickled))
        try:
            found = _Unpickler(io.BytesIO(file.read(pickled.file_size))).load()
        except _UnusualError:
            return None
        if not isinstance(found, _Rebuilt) or not found.is_contiguous:
            return None
        entry = entries.get(f"data/{found.key}")
        if entry is None or entry.file_size < (found.offset + prod(found.shape)) * found.dtype.itemsize:
            raise zipfile.BadZipFile(f"data/{found.key} is missing or short")
    start = _start(file, entry) + found.offset * found.dtype.itemsize
    return SavedTensor(start, found.dtype, found.shape)


def _start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where the (uncompressed) content of an entry starts. The module zipfile would check a CRC that may be absent."""
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or entry.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{entry.filename} has no readable header")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return entry.header_offset + _LOCAL_HEADER + name + extra


class _UnusualError(Exception):
    """Something else than a plain tensor."""


@dataclass(frozen=True)
class _Rebuilt:
    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def _rebuild(storage: tuple[str, torch.dtype], offset: int, shape: tuple[int, ...], stride: Any, *_: Any) -> _Rebuilt:
    return _Rebuilt(*storage, offset, tuple(shape), tuple(stride))


class _Unpickler(pickle.Unpickler):
    """Knows what `torch.save` writes for one tensor, and refuses the rest."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch", "BFloat16Storage"): torch.bfloat16,
            ("torch", "HalfStorage"): torch.float16,
            ("torch", "FloatStorage"): torch.float32,
        }
        if (module, name) not in known:
            raise _UnusualError(f"{module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise _UnusualError(str(kind))
        return str(key), dtype
