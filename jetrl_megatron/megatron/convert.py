"""Conversion to and from Megatron's distributed checkpoints in one process, streamed (format: `torch_dist`)."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from jetrl_megatron.config.checkpoint_files import METADATA
from jetrl_megatron.megatron.torch_dist import MegatronCheckpoint, Place, places, written_places
from jetrl_megatron.weights.convert.hf_files import finish_hf, hf_parts, unquantized_config, write_safetensors
from jetrl_megatron.weights.convert.job import Job, Output, Part, start_writeback, write_pieces
from jetrl_megatron.weights.convert.layout import Layout, carry_model_files
from jetrl_megatron.weights.convert.memory import Memory, cut_rows, own_storage
from jetrl_megatron.weights.convert.source import DTYPE_NAMES, Source, Weight
from jetrl_megatron.weights.plan import ConversionPlan, layer_of
from jetrl_megatron.weights.rules import Rule

CONFIG_FILE = "metadata.json"


@dataclass(frozen=True)
class HfTensors:
    """The HF tensors of a parameter as one global Megatron tensor."""

    weights: tuple[Weight, ...]
    dtype: torch.dtype

    def pieces(self, rule: Rule, _memory: Memory) -> list[Tensor]:
        """Consecutive rows of the unsharded Megatron tensor, mapped from the files where they are not FP8."""
        parts = [weight.span.whole() if weight.scale is None else weight.dense() for weight in self.weights]
        return rule.to_megatron_rows(parts, 1, 0)


@dataclass(frozen=True)
class StoredTensor:
    """A parameter of another torch_dist checkpoint."""

    path: str
    hf_config: str
    dtype: torch.dtype

    def pieces(self, rule: Rule, memory: Memory) -> list[Tensor]:
        """Consecutive rows of the unsharded tensor."""
        return _opened(self.path, self.hf_config).pieces(rule, memory)


@dataclass(frozen=True)
class WriteParameter:
    """One global Megatron tensor as chunks, one per tensor-parallel rank (two where gate and up are fused)."""

    rule: Rule
    source: HfTensors | StoredTensor
    tensor: int
    places: tuple[Place, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Unsharded; the vocabulary padded to a multiple of the tensor-parallel size."""
        shape = self.rule.megatron_shape(self.tensor)
        if self.rule.tp_dim is None:
            return shape
        return tuple(size * self.tensor if i == self.rule.tp_dim else size for i, size in enumerate(shape))

    def outputs(self) -> Sequence[Output]:
        return (Output(self.places[0].key, self.source.dtype, self.shape),)

    @property
    def _cut(self) -> tuple[int, int]:
        """(dimension, number of equal pieces)."""
        count = 1 if self.rule.tp_dim is None else self.tensor
        return (1 if self.rule.tp_dim == 1 else 0), count * (2 if self.rule.kind == "gate_up" else 1)

    def offsets(self) -> list[tuple[int, ...]]:
        """Where each chunk lies in the tensor."""
        dim, count = self._cut
        size = self.shape[dim] // count
        return [tuple(i * size if d == dim else 0 for d in range(len(self.shape))) for i in range(count)]

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        pieces = self.source.pieces(self.rule, memory)
        dim, count = self._cut
        shape = tuple(size // count if d == dim else size for d, size in enumerate(self.shape))
        for i in range(count):
            first = i * shape[0] if dim == 0 else 0
            rows = cut_rows(pieces, first, first + shape[0])
            if dim == 1:
                rows = [piece.narrow(1, i * shape[1], shape[1]) for piece in rows]
            yield 0, own_storage(self._joined(rows, shape, memory))

    def _joined(self, rows: Sequence[Tensor], shape: tuple[int, ...], memory: Memory) -> Tensor:
        """One contiguous tensor, padded with zero rows; the rows themselves where they are that already."""
        if len(rows) == 1 and rows[0].shape == shape and rows[0].is_contiguous() and rows[0].dtype == self.source.dtype:
            return rows[0]
        out = memory.empty("piece", shape, self.source.dtype)
        row = 0
        for piece in rows:
            out[row : row + len(piece)].copy_(piece)
            row += len(piece)
        out[row:].zero_()
        return out


def write_distcp(folder: Path, part: Part) -> list[dict[str, Any]]:
    """Write one `.distcp` file; returns where each chunk lies."""
    written, memory = [], Memory()
    with _without_checksums(), open(folder / part.files[0], "wb") as file:
        in_pieces: Any = _InPieces(file)
        for step in part.steps:
            assert isinstance(step, WriteParameter)
            for offset, (_, piece) in zip(step.offsets(), step.chunks(memory), strict=True):
                start = file.tell()
                torch.save(piece.view(*[1] * len(step.places[0].lead), *piece.shape), in_pieces)
                written.append(
                    {
                        "places": [[place.key, place.lead, place.lead_shape] for place in step.places],
                        "dtype": DTYPE_NAMES[piece.dtype],
                        "shape": step.shape,
                        "offset": offset,
                        "sizes": list(piece.shape),
                        "start": start,
                        "length": file.tell() - start,
                    }
                )
            file.flush()
            start_writeback(file)
    return written


class _InPieces(io.RawIOBase):
    """A file for `torch.save`, which writes a whole tensor at once."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_pieces(self._file, view)
        return len(view)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """`torch.save` without the CRC of zip entries, which `torch.load` does not look at and which costs as much as
    writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _write_metadata(folder: Path, parts: Sequence[Part], results: list[Any], plan: ConversionPlan) -> None:
    """`.metadata` and metadata.json, with Megatron's empty extra states and common state in a file of their own."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    for part, chunks in zip(parts, results, strict=True):
        for chunk in chunks:
            for key, lead, lead_shape in chunk["places"]:
                properties = TensorProperties(dtype=dtypes[chunk["dtype"]])
                size = torch.Size((*lead_shape, *chunk["shape"]))
                tensor = tensors.setdefault(key, TensorStorageMetadata(properties, size, []))
                offsets = torch.Size((*lead, *chunk["offset"]))
                sizes = torch.Size((*[1] * len(lead), *chunk["sizes"]))
                tensor.chunks.append(ChunkStorageMetadata(offsets, sizes))
                info = _StorageInfo(part.files[0], chunk["start"], chunk["length"])
                storage[MetadataIndex(key, offsets)] = info
    objects_file = f"__{len(parts)}_0.distcp"
    with open(folder / objects_file, "wb") as file:
        nothing = _write_object(file, objects_file, [None])
        for key in _extra_states(plan):
            tensors[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), nothing
        key = "common_state/shard_0_1"
        common = _write_object(file, objects_file, [{"checkpoint_version": 3.0}])
        tensors[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), common
    (folder / METADATA).write_bytes(pickle.dumps(Metadata(tensors, storage_data=storage)))
    (folder / CONFIG_FILE).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _write_object(file: Any, name: str, value: Any) -> _StorageInfo:
    start, packed = file.tell(), io.BytesIO()
    torch.save(value, packed)
    file.write(packed.getbuffer())
    return _StorageInfo(name, start, file.tell() - start)


def _extra_states(plan: ConversionPlan) -> Iterator[str]:
    """Keys of the (empty) extra states that Megatron's linears ask for when they load."""
    for rule in plan.rules:
        place = places(rule, plan)[0]
        if place.lead and ".linear_" in place.key and place.key.endswith(".weight"):
            at, of = (".".join(map(str, numbers)) for numbers in (place.lead, place.lead_shape))
            yield f"{place.key.removesuffix('weight')}_extra_state/shard_{at}_{of}"


def _distributed_job(
    out: Path,
    plan: ConversionPlan,
    layout: Layout,
    sources: dict[str, HfTensors] | dict[str, StoredTensor],
    model: tuple[Path, dict[str, Any]],
    key: dict[str, Any],
) -> Job:
    """One file for the embedding, one per layer, one for the output."""
    layout.check(plan)
    groups: dict[int, list[WriteParameter]] = {}
    for rule in plan.rules:
        layer = layer_of(rule)
        group = layer + 1 if layer is not None else 0 if rule is plan.rules[0] else plan.dims.num_layers + 1
        found = tuple(written_places(rule, plan))
        groups.setdefault(group, []).append(WriteParameter(rule, sources[rule.megatron_name], layout.tensor, found))
    parts = [Part((f"__{i}_0.distcp",), tuple(groups[i])) for i in sorted(groups)]

    def finish(folder: Path, results: list[Any]) -> None:
        _write_metadata(folder, parts, results, plan)
        carry_model_files(*model, folder)

    return Job(out, parts, write_distcp, finish, {**key, "layout": asdict(layout)})


def hf_to_megatron(hf: Path, out: Path, layout: Layout, fp32: bool = False) -> Job:
    """A torch_dist checkpoint in bf16 or fp32; FP8 weights are dequantized. Its chunks are the shards of `layout`,
    so that a rank of that layout reads its own bytes only; any other layout loads it too."""
    source, dtype = Source(hf), torch.float32 if fp32 else torch.bfloat16
    sources = {
        rule.megatron_name: HfTensors(tuple(source.weights[part.name] for part in rule.hf), dtype)
        for rule in source.plan.rules
    }
    key = {"tool": "hf_to_megatron", "dtype": DTYPE_NAMES[dtype], "files": source.fingerprint()}
    return _distributed_job(out, source.plan, layout, sources, (source.path, source.config), key)


@cache
def _opened(path: str, hf_config: str) -> MegatronCheckpoint:
    """One reader per process and checkpoint, for steps that run in worker processes."""
    return MegatronCheckpoint(Path(path), Path(hf_config))


@dataclass(frozen=True)
class ReadParameter:
    """The HF tensors of one parameter of a torch_dist checkpoint."""

    rule: Rule
    path: str
    hf_config: str
    dtype: torch.dtype

    def outputs(self) -> Sequence[Output]:
        return [Output(hf.name, self.dtype, hf.shape) for hf in self.rule.hf]

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        pieces = _opened(self.path, self.hf_config).pieces(self.rule, memory)
        found: list[list[tuple[int, list[Tensor]]]] = [[] for _ in self.rule.hf]
        row = 0
        for run in self.rule.runs(1, 0):
            found[run.part].append((run.start, cut_rows(pieces, row, row + run.length)))
            row += run.length
        for runs in found:
            for _, rows in sorted(runs, key=lambda item: item[0]):
                yield from ((0, piece) for piece in rows)


def megatron_to_hf(path: Path, out: Path, hf_config: Path | None = None, workers: int = 1) -> Job:
    """An HF checkpoint in the precision that the parameters are stored in."""
    checkpoint = MegatronCheckpoint(path, hf_config)
    model, plan = str(checkpoint.model_dir), checkpoint.plan
    steps = [ReadParameter(rule, str(path), model, checkpoint.dtype(rule)) for rule in plan.rules]
    parts = hf_parts(steps, workers)
    config = unquantized_config(checkpoint.config, steps[0].dtype)
    key = {"tool": "megatron_to_hf", "parts": len(parts), "files": checkpoint.fingerprint()}
    return Job(out, parts, write_safetensors, finish_hf(parts, config, checkpoint.model_dir), key)


def reshard(path: Path, out: Path, layout: Layout, hf_config: Path | None = None) -> Job:
    """The same tensors with the chunks and the vocabulary padding of another layout."""
    checkpoint = MegatronCheckpoint(path, hf_config)
    model, plan = str(checkpoint.model_dir), checkpoint.plan
    sources = {rule.megatron_name: StoredTensor(str(path), model, checkpoint.dtype(rule)) for rule in plan.rules}
    key = {"tool": "reshard", "files": checkpoint.fingerprint()}
    return _distributed_job(out, plan, layout, sources, (checkpoint.model_dir, checkpoint.config), key)
