"""Hugging Face checkpoints on disk: a lazy safetensors reader and a streaming, atomic writer.

Format: `model.safetensors`, or shards `model-0000i-of-0000n.safetensors` with `model.safetensors.index.json`
({"metadata": {"total_size"}, "weight_map": {tensor name: file name}}), beside `config.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetrl_megatron.config.stacked_experts import ExpertRows, split_experts
from jetrl_megatron.weights.plan import LM_HEAD, ConversionPlan

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
CARRIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
DEFAULT_MAX_SHARD_BYTES = 5 * 10**9


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` if all its elements are finite (any dtype; FP8 NaN codes count as NaN).

    Raises ValueError with the number of NaN and Inf elements.
    """
    if not tensor.dtype.is_floating_point:
        return tensor
    values = tensor.float() if tensor.element_size() == 1 else tensor  # FP8 has no isfinite
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        num_nan = int(torch.isnan(values).sum())
        num_inf = tensor.numel() - int(finite.sum()) - num_nan
        raise ValueError(
            f"{name}: {num_nan} NaN and {num_inf} Inf of {tensor.numel()} elements; rule: weights are finite; "
            f"fix: use an earlier checkpoint, or download the file again"
        )
    return tensor


class HfCheckpoint:
    """A checkpoint directory, read tensor by tensor (memory-mapped, nothing is loaded until asked for). Stacked experts
    (`config.stacked_experts`) are read as one tensor per expert.

    config: the parsed config.json. Raises ValueError if the directory, config.json, a shard or a listed tensor is
    missing, or if a file cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: no such directory; rule: a Hugging Face checkpoint; fix: correct the path")
        self.config: dict[str, Any] = read_json(self.path / CONFIG)
        self._files: dict[str, Any] = {}  # file name -> open safetensors file
        self._where: dict[str, str] = {}  # tensor name -> file name
        self._stacked: dict[str, tuple[str, ExpertRows]] = {}  # name of one expert's tensor -> where it is stacked
        weight_map = self._weight_map()
        for file_name in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]:
            self._open(file_name)
        if weight_map is not None and weight_map != self._where:
            wrong = sorted(n for n in {*weight_map, *self._where} if weight_map.get(n) != self._where.get(n))
            raise ValueError(
                f"{self.path / INDEX}: does not match its shards for {wrong[:8]} ({len(wrong)} in all); rule: every "
                f"tensor is in the shard that the index names; fix: download or write the checkpoint again"
            )
        for name in list(self._where):
            parts = split_experts(name, self.shape(name))
            self._stacked.update((part, (name, rows)) for part, rows in parts.items())
            if parts:
                self._where.update(dict.fromkeys(parts, self._where.pop(name)))

    def _weight_map(self) -> dict[str, str] | None:
        single, index = (self.path / SINGLE).exists(), (self.path / INDEX).exists()
        if not index:
            if not single:
                raise ValueError(
                    f"{self.path}: neither {SINGLE} nor {INDEX}; rule: weights in safetensors; "
                    f"fix: convert .bin or .gguf weights first, or finish the download"
                )
            return None
        weight_map: dict[str, str] = read_json(self.path / INDEX).get("weight_map", {})
        if single and SINGLE not in weight_map.values():
            raise ValueError(
                f"{self.path}: both {SINGLE} and an index of other shards; rule: one set of weights; fix: remove one"
            )
        return weight_map

    def _open(self, file_name: str) -> None:
        file = self.path / file_name
        if not file.is_file():
            raise ValueError(f"{file}: missing; rule: every shard of {INDEX}; fix: finish the download")
        try:
            opened: Any = safe_open(str(file), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file}: not a readable safetensors file of {file.stat().st_size} bytes ({error}); rule: complete "
                f"files, no Git LFS pointers; fix: download it again"
            ) from error
        self._files[file_name] = opened
        self._where.update(dict.fromkeys(opened.keys(), file_name))

    def file_names(self) -> list[str]:
        """Names of the safetensors files."""
        return sorted(self._files)

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._where)

    def _file(self, name: str) -> Any:
        if name not in self._where:
            raise ValueError(f"{name}: not in {self.path}; rule: a stored tensor; fix: check model_type in {CONFIG}")
        return self._files[self._where[name]]

    def tensor(self, name: str) -> Tensor:
        """The full tensor on the CPU in its stored dtype. Raises ValueError for an unknown name."""
        file = self._file(name)
        if name in self._stacked:
            stacked, (expert, first, last) = self._stacked[name]
            return file.get_slice(stacked)[expert : expert + 1, first:last].squeeze(0)
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the file header, without reading the tensor. Raises ValueError for an unknown name."""
        file = self._file(name)
        if name in self._stacked:
            stacked, (_, first, last) = self._stacked[name]
            return last - first, file.get_slice(stacked).get_shape()[2]
        return tuple(file.get_slice(name).get_shape())

    def verify(self, plan: ConversionPlan) -> None:
        """Check names and shapes against a plan, and an extra lm_head of a tied model against the embedding.

        Raises ValueError that names what differs.
        """
        plan.check_names(self.names())
        for rule in plan.rules:
            for hf in rule.hf:
                if self.shape(hf.name) != hf.shape:
                    raise ValueError(
                        f"{hf.name}: shape {list(self.shape(hf.name))}; rule: expected {list(hf.shape)}; "
                        f"fix: check that the weights and {self.path / CONFIG} belong together"
                    )
        self.verify_tied(plan)

    def verify_tied(self, plan: ConversionPlan) -> None:
        """An extra lm_head beside a tied embedding must equal it. Raises ValueError."""
        if plan.dims.tied_embeddings and LM_HEAD in self._where:
            embedding, head = self.tensor("model.embed_tokens.weight"), self.tensor(LM_HEAD)
            if not torch.equal(embedding, head):
                raise ValueError(
                    f"{LM_HEAD}: differs from model.embed_tokens.weight although tie_word_embeddings is true; "
                    f"rule: tied weights are equal; fix: set tie_word_embeddings to false, or remove {LM_HEAD}"
                )


class HfWriter:
    """Writes one checkpoint directory, tensor by tensor, and puts it in place only when complete.

    Use as a context manager: leaving it normally renames the finished temporary directory (beside the target) to the
    target; an exception removes it and leaves the target as it was. A killed process leaves `.NAME.tmp-*` behind,
    never a half-written target. Memory: at most one shard.

    config: written as config.json. source_dir: generation_config.json and tokenizer files are copied from there; may
    be the target itself. Raises ValueError for a target that holds something other than a checkpoint.
    """

    def __init__(
        self,
        path: Path | str,
        config: Mapping[str, Any],
        source_dir: Path | str | None = None,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    ) -> None:
        self.path = Path(path).resolve()
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: {max_shard_bytes}; rule: at least 1; fix: use the default")
        _require_replaceable(self.path)
        self._config = dict(config)
        self._source_dir = None if source_dir is None else Path(source_dir)
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._shards: list[list[str]] = []  # tensor names of each written shard
        self._names: set[str] = set()
        self._total_bytes = 0
        self._tmp = self.path.with_name(f".{self.path.name}.tmp-{uuid.uuid4().hex[:8]}")

    def __enter__(self) -> Self:
        self._tmp.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
                _replace_dir(self._tmp, self.path)
        finally:
            shutil.rmtree(self._tmp, ignore_errors=True)  # gone already after a successful rename

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor (copied at once, so its buffer may be reused). Raises ValueError for a name given twice."""
        if name in self._names:
            raise ValueError(f"{name}: written twice; rule: each tensor once; fix: check the conversion plan")
        num_bytes = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + num_bytes > self._max_shard_bytes:
            self._flush()
        self._names.add(name)
        self._shard[name] = _owned(tensor)
        self._shard_bytes += num_bytes
        self._total_bytes += num_bytes

    def _flush(self) -> None:
        file = self._tmp / f"shard-{len(self._shards)}"
        save_file(self._shard, str(file), metadata={"format": "pt"})
        _sync(file)
        self._shards.append(list(self._shard))
        self._shard, self._shard_bytes = {}, 0

    def _finish(self) -> None:
        if self._shard:
            self._flush()
        count = len(self._shards)
        if not count:
            raise ValueError(f"{self.path}: no tensors given; rule: at least one; fix: check the conversion plan")
        files = shard_names(count)
        write_config(self._tmp, self._config)
        for i, file_name in enumerate(files):
            shard = self._tmp / f"shard-{i}"
            shard.chmod((self._tmp / CONFIG).stat().st_mode)  # safetensors makes it readable by the owner alone
            shard.rename(self._tmp / file_name)
        if count > 1:
            where = {name: files[i] for i, names in enumerate(self._shards) for name in names}
            write_index(self._tmp, where, self._total_bytes)
        if self._source_dir is not None:
            carry_files(self._source_dir, self._tmp)
        _sync(self._tmp)


def write_hf(
    path: Path | str,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    source_dir: Path | str | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> None:
    """Write (name, tensor) pairs as a checkpoint directory; see `HfWriter`."""
    with HfWriter(path, config, source_dir, max_shard_bytes) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)


def shard_names(count: int) -> list[str]:
    """File names of a checkpoint of `count` shards."""
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    _write_json(folder / CONFIG, config)


def write_index(folder: Path, where: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of a sharded checkpoint. where: tensor name -> file name."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
    _write_json(folder / INDEX, index)


def carry_files(source: Path, folder: Path) -> None:
    """Copy generation config and tokenizer files, those that are there."""
    for file_name in CARRIED_FILES:
        if (source / file_name).is_file():
            shutil.copyfile(source / file_name, folder / file_name)
            _sync(folder / file_name)


def _owned(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy: callers may reuse buffers, and safetensors refuses tensors that share storage."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _require_replaceable(path: Path) -> None:
    """A target may be absent, an empty directory or an older checkpoint: never delete anything else."""
    if not path.exists():
        return
    is_checkpoint = (path / CONFIG).exists() and any(path.glob("*.safetensors"))
    if not path.is_dir() or (any(path.iterdir()) and not is_checkpoint):
        raise ValueError(f"{path}: exists and is not a checkpoint; rule: new, empty or one; fix: choose another path")


def _replace_dir(new: Path, target: Path) -> None:
    """Rename `new` to `target`; an existing target is moved aside first and put back if the rename fails."""
    old = None
    if target.exists():
        old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _sync(file)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError if it is missing or something else."""
    if not file.is_file():
        raise ValueError(f"{file}: missing; rule: every checkpoint has it; fix: finish the download")
    try:
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); rule: a JSON object; fix: download it again") from error
    is_object = isinstance(value, dict)
    if not is_object:
        raise ValueError(f"{file}: {type(value).__name__}; rule: a JSON object; fix: download it again")
    return value
