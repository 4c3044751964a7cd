"""A weight bundle: one version of a model's weights as safetensors buckets plus a checksummed manifest.

The trainer writes it, every engine rank reads it. The manifest is written last and by rename, so a bundle either is
whole or does not exist; a reader checks every tensor before it uses the first one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetrl_megatron.atomic import write_atomic

MANIFEST = "manifest.json"
SCALE_SUFFIX = "_scale_inv"  # Hugging Face's name for the block scales, which multiply

_THREADS = min(8, os.cpu_count() or 1)


def checksum(tensor: Tensor) -> str:
    """BLAKE2b-128 of dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksums_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Checksums by name, several at once: hashing lets go of the interpreter's lock."""
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = {name: pool.submit(checksum, tensor) for name, tensor in tensors}
        return {name: future.result() for name, future in futures.items()}


def combined(checksums: dict[str, str]) -> str:
    """One digest of all tensors, independent of their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(checksums):
        digest.update(f"{name}={checksums[name]};".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A written bundle. checksums: tensor name -> checksum; num_bytes: of all tensors."""

    path: Path
    version: int
    files: tuple[str, ...]
    checksums: dict[str, str]
    num_bytes: int

    @property
    def digest(self) -> str:
        return combined(self.checksums)

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Raises ValueError when there is no whole bundle at `path`."""
        manifest = path / MANIFEST
        if not manifest.is_file():
            raise ValueError(f"weight bundle: {path}; rule: holds {MANIFEST}; fix: send the weights again")
        raw: dict[str, Any] = json.loads(manifest.read_text())
        return cls(path, raw["version"], tuple(raw["files"]), raw["checksums"], raw["num_bytes"])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, file by file (memory mapped)."""
        for file in self.files:
            with safe_open(self.path / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield name, opened.get_tensor(name)

    def verify(self) -> None:
        """Raises ValueError naming the first tensor whose bytes are not those that were written, or a missing one."""
        found = checksums_of(self.tensors())
        for name, value in found.items():
            if self.checksums.get(name) != value:
                raise ValueError(f"{name}: checksum differs; rule: bytes arrive unchanged; fix: send the weights again")
        missing = sorted(set(self.checksums) - set(found))
        if missing:
            raise ValueError(f"{missing[0]}: missing from the bundle ({len(missing)} tensors); fix: send it again")


def write_bundle(path: Path, version: int, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Bundle:
    """Stream `tensors` into buckets of about `bucket_bytes`; at most one bucket is held in memory."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    checksums: dict[str, str] = {}
    files: list[str] = []
    bucket: dict[str, Tensor] = {}
    total = held = 0

    def flush(pool: Executor) -> None:
        nonlocal bucket, held
        if bucket:
            hashing = {name: pool.submit(checksum, tensor) for name, tensor in bucket.items()}
            files.append(f"bucket-{len(files):05d}.safetensors")
            save_file(bucket, path / files[-1])
            checksums.update({name: value.result() for name, value in hashing.items()})
            bucket, held = {}, 0

    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if held and held + size > bucket_bytes:
                flush(pool)
            bucket[name] = tensor.contiguous().cpu()
            held += size
            total += size
        flush(pool)
    manifest = {"version": version, "files": files, "checksums": checksums, "num_bytes": total}
    write_atomic(path / MANIFEST, json.dumps(manifest))
    return Bundle(path, version, tuple(files), checksums, total)
