"""Megatron's distributed checkpoints (torch_dist), read without process groups, a parameter at a time.

A torch_dist checkpoint holds global tensors as chunks: `.metadata` says which part of which tensor lies where in the
`.distcp` files, and any layout can load it. Names as in Megatron-Core: a parameter of every layer is one tensor with
the layers in front, `decoder.layers.self_attention.linear_qkv.weight` [L, n, k]; of every expert, with the layers and
experts in front. The norms are stored once under two names, which layers with separate norms (ours) and with fused ones
(the stock specs) ask for.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Container
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from jetrl_megatron.config.checkpoint_files import METADATA
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.megatron.saved_tensor import saved_tensor
from jetrl_megatron.weights.convert.job import fingerprint
from jetrl_megatron.weights.convert.layout import model_files
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.convert.source import Span
from jetrl_megatron.weights.plan import ConversionPlan, expert_of, layer_of
from jetrl_megatron.weights.rules import Rule

MAX_PADDING_ROWS = 128 * 64  # stock Megatron pads the vocabulary to a multiple of 128 x TP
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a global tensor: `key`, at index `lead` (layer, expert) of its leading dimensions
    `lead_shape`."""

    key: str
    lead: tuple[int, ...]
    lead_shape: tuple[int, ...]


def places(rule: Rule, plan: ConversionPlan) -> list[Place]:
    """Every place where a checkpoint may hold the parameter; the first ones are written, in one copy."""
    layer, expert = layer_of(rule), expert_of(rule)
    if layer is None:
        return [Place(rule.megatron_name, (), ())]
    name = rule.megatron_name.removeprefix(f"{_LAYERS}{layer}.")
    lead: tuple[int, ...] = (layer,)
    shape: tuple[int, ...] = (plan.dims.num_layers,)
    if expert is not None:
        assert plan.dims.moe is not None
        name = name.replace(f"experts.local_experts.{expert}.", "experts.experts.")
        lead, shape = (layer, expert), (plan.dims.num_layers, plan.dims.moe.num_experts)
    names = [name, _FUSED_NORMS[name]] if name in _FUSED_NORMS else [name]
    stacked = [Place(_LAYERS + n, lead, shape) for n in names]
    single = [Place(f"{_LAYERS}{layer}.{n}", lead[1:], shape[1:]) for n in names]  # non-homogeneous layers
    return stacked + single


def written_places(rule: Rule, plan: ConversionPlan) -> list[Place]:
    found = places(rule, plan)
    return found[: max(len(found) // 2, 1)]


class MegatronCheckpoint:
    """A torch_dist checkpoint, also one that the trainer or Megatron saved (optimizer state is left alone). Raises
    ValueError for a missing, unfitting or superfluous tensor."""

    def __init__(self, path: Path, hf_config: Path | None = None) -> None:
        self.path = path
        self.model_dir, self.config = model_files(path, hf_config)
        self.plan = ConversionPlan(ModelDims.from_hf(self.config))
        if not (path / METADATA).is_file():
            raise ValueError(f"{path / METADATA}: missing; rule: a complete torch_dist checkpoint; fix: save it again")
        try:
            metadata = FileSystemReader(path).read_metadata()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise ValueError(
                f"{path / METADATA}: not readable ({error}); rule: a torch_dist checkpoint; fix: save it again"
            ) from error
        self._storage = metadata.storage_data
        self._tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not key.startswith("optimizer.")
        }
        known = {place.key: len(place.lead) for rule in self.plan.rules for place in places(rule, self.plan)}
        self._check_names(known)
        self._chunks = {key: _by_lead(value, known[key]) for key, value in self._tensors.items()}

    def _check_names(self, known: Container[str]) -> None:
        extra = sorted(key for key in self._tensors if key not in known)
        if extra:
            raise ValueError(
                f"{self.path}: {extra[0]} has no rule ({len(extra)} such tensors); rule: the tensors of "
                f"{self.plan.dims.model_type}; fix: check model_type and tie_word_embeddings in config.json"
            )
        for rule in self.plan.rules:
            self._place(rule)

    def _place(self, rule: Rule) -> tuple[Place, TensorStorageMetadata]:
        """Where the parameter is. Raises ValueError if nowhere or in another shape; a vocabulary may be padded."""
        found = [place for place in places(rule, self.plan) if place.key in self._tensors]
        if not found:
            raise ValueError(
                f"{rule.megatron_name}: not in {self.path}; rule: every parameter of the model; fix: check config.json"
            )
        tensor, shape = self._tensors[found[0].key], (*found[0].lead_shape, *rule.megatron_shape(1))
        size = tuple(tensor.size)
        padding = size[0] - shape[0] if rule.kind == "vocab" else 0
        if (size[0] - padding, *size[1:]) != shape or not 0 <= padding < MAX_PADDING_ROWS:
            padded = f" and at most {MAX_PADDING_ROWS - 1} rows of padding" if rule.kind == "vocab" else ""
            raise ValueError(
                f"{rule.megatron_name}: shape {list(size)}; rule: {list(shape)}{padded}; fix: check that config.json "
                f"(vocab_size, num_hidden_layers) belongs to the checkpoint"
            )
        return found[0], tensor

    def dtype(self, rule: Rule) -> torch.dtype:
        found: torch.dtype = self._place(rule)[1].properties.dtype
        return found

    def parameter(self, rule: Rule) -> Tensor:
        """The unsharded Megatron tensor, without padding. Raises ValueError for a hole or a truncated file."""
        pieces = self.pieces(rule, Memory())
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pieces(self, rule: Rule, memory: Memory) -> list[Tensor]:
        """The same as consecutive rows, mapped from the files where chunks are whole rows, else made in `memory`."""
        place, tensor = self._place(rule)
        shape, num_leading = rule.megatron_shape(1), len(place.lead)
        parts = []  # (offsets, values) of the chunks, without leading dimensions and padding
        for chunk in (*self._chunks[place.key].get(place.lead, ()), *self._chunks[place.key].get(None, ())):
            lead = [at - first for at, first in zip(place.lead, chunk.offsets, strict=False)]
            offsets, sizes = chunk.offsets[num_leading:], chunk.sizes[num_leading:]
            inside = [min(size, end - first) for first, size, end in zip(offsets, sizes, shape, strict=True)]
            held = all(0 <= at < size for at, size in zip(lead, chunk.sizes, strict=False))
            if held and all(length > 0 for length in inside):
                values = self._read(place.key, chunk)[tuple(lead)]
                parts.append((offsets, values[tuple(slice(length) for length in inside)]))
        covered = sum(values.numel() for _, values in parts)
        if covered != prod(shape):
            raise ValueError(
                f"{rule.megatron_name}: {covered} of {prod(shape)} elements in {self.path}; rule: chunks cover the "
                f"tensor; fix: save the checkpoint again"
            )
        if all(values.shape[1:] == shape[1:] for _, values in parts):
            return [values for _, values in sorted(parts, key=lambda part: part[0][0])]
        whole = memory.empty("parameter", shape, tensor.properties.dtype)
        for offsets, values in parts:
            whole[tuple(slice(first, first + n) for first, n in zip(offsets, values.shape, strict=True))] = values
        return [whole]

    def _read(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk, mapped from its file unless it is stored in an unusual way."""
        info = self._storage[MetadataIndex(key, chunk.offsets)]
        file = self.path / info.relative_path
        try:
            with open(file, "rb") as handle:
                part: Any = _Slice(handle, info.offset, info.length)
                found = saved_tensor(part)
                if found is None:
                    tensor: Tensor = torch.load(part, weights_only=True)
                    return tensor
        except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{file}: {key} is not readable ({error}); rule: complete files; fix: get the checkpoint again"
            ) from error
        return Span(key, str(file), info.offset + found.start, found.dtype, found.shape).whole()

    def fingerprint(self) -> list[Any]:
        """Changes when a file does: names, sizes and times."""
        files = {info.relative_path for info in self._storage.values()} | {METADATA}
        return fingerprint(self.path, (file for file in files if (self.path / file).is_file()))


def _by_lead(
    tensor: TensorStorageMetadata, num_leading: int
) -> dict[tuple[int, ...] | None, list[ChunkStorageMetadata]]:
    """Chunks by their leading indices; None: chunks that hold several layers or experts."""
    found: dict[tuple[int, ...] | None, list[ChunkStorageMetadata]] = {}
    for chunk in tensor.chunks:
        lead = tuple(chunk.offsets[:num_leading])
        single = all(size == 1 for size in chunk.sizes[:num_leading])
        found.setdefault(lead if single else None, []).append(chunk)
    return found


class _Slice(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._start + self._at)
        count = int(self._file.readinto(view))
        self._at += count
        return count
