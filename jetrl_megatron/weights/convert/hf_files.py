"""Writing safetensors files and HF folders, tensor by tensor: the header is known before the first byte is made."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.weights.convert.job import Output, Part, Step, start_writeback, write_pieces
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.convert.source import DTYPE_NAMES, QUANT_CONFIG, byte_view
from jetrl_megatron.weights.io import DEFAULT_MAX_SHARD_BYTES, carry_files, shard_names, write_config, write_index

_ALIGNMENT = 8  # of the first data byte, as in the format


def write_safetensors(folder: Path, part: Part) -> None:
    """Write the files of a part, each chunk as it is made."""
    outputs = part.outputs()
    with ExitStack() as opened:
        files = [opened.enter_context(open(folder / name, "wb", buffering=0)) for name in part.files]
        ends = [
            _write_header(file, [output for output in outputs if output.slot == slot])
            for slot, file in enumerate(files)
        ]
        memory = Memory()
        for step in part.steps:
            for slot, chunk in step.chunks(memory):
                write_pieces(files[slot], byte_view(chunk.contiguous()))
            for file in files:
                start_writeback(file)
        assert [file.tell() for file in files] == ends, "chunks do not fill their tensors"


def _write_header(file: Any, outputs: Sequence[Output]) -> int:
    """Returns the size that the file will have."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        span = [end, end + output.num_bytes]
        assert output.name not in header, output.name
        header[output.name] = {"dtype": DTYPE_NAMES[output.dtype], "shape": output.shape, "data_offsets": span}
        end = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    return 8 + len(text) + end


def hf_parts(steps: Sequence[Step], workers: int) -> list[Part]:
    """Steps in order as shards of at most 5 GB, and at least one per worker."""
    sizes = [sum(output.num_bytes for output in step.outputs()) for step in steps]
    limit = min(DEFAULT_MAX_SHARD_BYTES, -(-sum(sizes) // workers))
    groups: list[list[Step]] = []
    held = 0
    for step, size in zip(steps, sizes, strict=True):
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(step)
        held += size
    names = shard_names(len(groups))
    return [Part((name,), tuple(group)) for name, group in zip(names, groups, strict=True)]


def finish_hf(parts: Sequence[Part], config: Mapping[str, Any], source_dir: Path) -> Callable[[Path, list[Any]], None]:
    """What makes the shards a checkpoint: index, config.json, generation config, tokenizer."""

    def finish(folder: Path, _results: list[Any]) -> None:
        where = {output.name: part.files[output.slot] for part in parts for output in part.outputs()}
        if len(parts) > 1:
            write_index(folder, where, sum(part.num_bytes for part in parts))
        write_config(folder, config)
        carry_files(source_dir, folder)

    return finish


def fp8_config(config: Mapping[str, Any], not_quantized: Iterable[str]) -> dict[str, Any]:
    """config.json of a block-FP8 checkpoint. not_quantized: names of the modules that stay BF16. Power-of-two scales
    are stored as fp32 too and get no `scale_fmt`, which for transformers means scales of one byte."""
    quant: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(not_quantized),
    }
    return {**config, QUANT_CONFIG: quant}


def unquantized_config(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """config.json of a checkpoint in `dtype`."""
    plain = {key: value for key, value in config.items() if key != QUANT_CONFIG}
    return {**plain, "torch_dtype" if "torch_dtype" in plain else "dtype": str(dtype).removeprefix("torch.")}


def modules_not_quantized(names: Iterable[str]) -> list[str]:
    """Linears that stay BF16: lm_head (a tied one too, which has no tensor of its own) and the routers of experts."""
    return ["lm_head", *(name.removesuffix(".weight") for name in names if name.endswith(".mlp.gate.weight"))]
