"""What an HF folder must hold, read without torch: safetensors headers, the index, tensor names and shapes."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.errors import Violation, one_line, show
from jetrl_megatron.config.stacked_experts import split_experts

MAX_HEADER_BYTES = 100 * 1024 * 1024  # the safetensors format's own limit
METADATA = ".metadata"  # of a torch_dist checkpoint
HF_FOLDER = "hf"  # config.json, generation config and tokenizer of the model, inside a converted folder
INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor. dtype as safetensors spells it (BF16, F32, F8_E4M3, ...). start: its first byte in
    the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int


def read_header(path: Path) -> list[TensorInfo]:
    """Tensors of one safetensors file: 8 bytes little-endian length, then JSON. Raises ValueError if malformed."""
    size_bytes = path.stat().st_size
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
            raise ValueError("not a safetensors file (bad header length)")
        header = json.loads(handle.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file (header is not a mapping)")
    tensors, end = [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = map(int, entry["data_offsets"])
            shape = tuple(int(d) for d in entry["shape"])
            info = TensorInfo(name, str(entry["dtype"]), shape, path.name, 8 + length + first)
            end = max(end, last)
        except (KeyError, TypeError, ValueError, IndexError):
            raise ValueError(f"malformed header entry of {name}") from None
        tensors.append(info)
    if size_bytes != 8 + length + end:
        raise ValueError(f"truncated or oversized: {size_bytes} bytes, the header asks for {8 + length + end}")
    return tensors


def expected_tensors(dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor the family needs, in file order. Tied embeddings need no lm_head."""
    hidden = dims.hidden_size
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (dims.vocab_size, hidden)}
    for layer in range(dims.num_layers):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = (hidden,)
        for name, size in (("q", dims.q_size), ("k", dims.kv_size), ("v", dims.kv_size)):
            out[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            if dims.qkv_bias:
                out[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        out[prefix + "self_attn.o_proj.weight"] = (hidden, dims.q_size)
        if dims.qk_norm:
            out[prefix + "self_attn.q_norm.weight"] = (dims.head_dim,)
            out[prefix + "self_attn.k_norm.weight"] = (dims.head_dim,)
        out[prefix + "post_attention_layernorm.weight"] = (hidden,)
        mlps, inner = [prefix + "mlp."], dims.intermediate_size
        if dims.moe is not None:
            out[prefix + "mlp.gate.weight"] = (dims.moe.num_experts, hidden)
            mlps = [f"{prefix}mlp.experts.{expert}." for expert in range(dims.moe.num_experts)]
            inner = dims.moe.intermediate_size
        for mlp in mlps:
            out[mlp + "gate_proj.weight"] = out[mlp + "up_proj.weight"] = (inner, hidden)
            out[mlp + "down_proj.weight"] = (hidden, inner)
    out["model.norm.weight"] = (hidden,)
    if not dims.tied_embeddings:
        out["lm_head.weight"] = (dims.vocab_size, hidden)
    return out


def ignorable(name: str, dims: ModelDims) -> bool:
    """Tensors that some checkpoints carry and no family needs."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and dims.tied_embeddings)


def load_json(path: Path, what: str) -> tuple[dict[str, Any], list[Violation]]:
    """A JSON mapping, or the fault. `what` names the key in the message."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, [Violation(what, str(path), "the file exists", f"add {path.name}")]
    except (OSError, ValueError) as error:
        return {}, [Violation(what, str(path), f"valid JSON ({one_line(error)})", f"correct {path.name}")]
    if not isinstance(value, dict):
        return {}, [Violation(what, str(path), "a JSON mapping", f"correct {path.name}")]
    return value, []


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of Megatron."""
    return (folder / METADATA).is_file()


def model_folder(path: Path) -> Path:
    """The folder with config.json and tokenizer of a checkpoint: its own, or the one inside a torch_dist checkpoint."""
    return path / HF_FOLDER if is_torch_dist(path) else path


def weight_files(folder: Path) -> tuple[list[Path], list[Violation]]:
    """The safetensors files of an HF folder: the shards of its index, or every *.safetensors without one."""
    index = folder / INDEX_NAME
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if files:
            return files, []
        rule = "holds *.safetensors files"
        return [], [Violation("model.path", str(folder), rule, "point to an HF folder with safetensors weights")]
    data, faults = load_json(index, "model.path")
    weight_map = data.get("weight_map")
    if faults or not isinstance(weight_map, dict) or not weight_map:
        return [], faults or [Violation("model.path", str(index), "has a weight_map", "download the index again")]
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        value = f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more shards" if len(missing) > 1 else "")
        return [], [Violation("model.path", value, f"every shard of {INDEX_NAME} exists", "download it again")]
    return [folder / name for name in names], []


def check_tensors(folder: Path, dims: ModelDims) -> Iterator[Violation]:
    """Faults of the weights: unreadable file, missing or unexpected tensor, wrong shape or dtype."""
    files, faults = weight_files(folder)
    yield from faults
    found: dict[str, TensorInfo] = {}
    for file in files:
        try:
            infos = read_header(file)
        except (OSError, ValueError) as error:
            yield Violation("model.path", str(file), f"a readable safetensors file ({one_line(error)})", "get it again")
            return
        for info in itertools.chain.from_iterable(map(_per_expert, infos)):
            if info.name in found:
                value = f"{info.name} in {found[info.name].file} and {info.file}"
                yield Violation("model.path", value, "each tensor once", "remove one of the files")
            found[info.name] = info
    if files:
        yield from _compare(folder, dims, found)


def _per_expert(info: TensorInfo) -> list[TensorInfo]:
    """`info`, or the tensors of the single experts that it stacks."""
    parts = split_experts(info.name, info.shape)
    if not parts:
        return [info]
    return [replace(info, name=name, shape=(rows.last - rows.first, info.shape[2])) for name, rows in parts.items()]


def _compare(folder: Path, dims: ModelDims, found: dict[str, TensorInfo]) -> Iterator[Violation]:
    expected = expected_tensors(dims)
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        rule = f"holds every tensor of a {dims.model_type} model with {dims.num_layers} layers"
        yield Violation("model.path", f"{folder} lacks {missing[0]}{more}", rule, "use a complete checkpoint")
    extra = [n for n in found if n not in expected and not ignorable(n, dims)]
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        rule = f"holds no tensor that a {dims.model_type} model has no place for"
        yield Violation(
            "model.path", f"{found[extra[0]].file} has {extra[0]}{more}", rule, "check model_type and config"
        )
    wrong = (_tensor_fault(found[name], shape) for name, shape in expected.items() if name in found)
    first = next((fault for fault in wrong if fault is not None), None)
    if first is not None:  # one wrong tensor usually means all of them: name the first
        yield first


def _tensor_fault(info: TensorInfo, shape: tuple[int, ...]) -> Violation | None:
    if info.shape != shape:
        value = f"{info.file}: {info.name} has shape {show(list(info.shape))}"
        return Violation("model.path", value, f"shape {list(shape)} by config.json", "config and weights must match")
    if info.dtype not in FLOAT_DTYPES:  # an FP8 checkpoint too: master weights start from the unquantized model
        value = f"{info.file}: {info.name} has dtype {info.dtype}"
        return Violation(
            "model.path", value, f"dtype one of {', '.join(FLOAT_DTYPES)}", "use an unquantized checkpoint"
        )
    return None
