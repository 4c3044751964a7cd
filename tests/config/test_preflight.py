"""Claims about file faults: each is found before anything starts, and named precisely."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.config import ConfigError, RunConfig, preflight, read_dims
from tests.config.conftest import hf_shapes, write_weights

MakeFolder = Callable[..., Path]


def config(folder: Path, data: Path, **sections: dict[str, Any]) -> RunConfig:
    staging = {"staging_dir": str(data.parent)}
    base: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"path": str(data)}, "sync": staging}
    return RunConfig.model_validate(base | sections)


def faults(cfg: RunConfig, run_dir: Path) -> list[str]:
    try:
        preflight(cfg, run_dir)
    except ConfigError as error:
        return error.errors
    return []


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_complete_folder_passes_and_run_dir_is_not_made(
    hf_folder: MakeFolder, rows: Path, tmp_path: Path, model_type: str, tied: bool
) -> None:
    folder = hf_folder(model_type=model_type, tie_word_embeddings=tied)
    assert faults(config(folder, rows), tmp_path / "runs" / "a") == []
    assert not (tmp_path / "runs").exists()


def test_random_model_needs_no_folder(tmp_path: Path, hf_folder: MakeFolder) -> None:
    architecture = json.loads((hf_folder() / "config.json").read_text())
    cfg = RunConfig.model_validate(
        {
            "model": {"init": "random", "architecture": architecture},
            "data": {"task": "chain"},
            "sync": {"staging_dir": str(tmp_path)},
        }
    )
    assert faults(cfg, tmp_path) == []
    assert read_dims(cfg).q_size == 128


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_norm.weight", "lm_head.weight", "model.norm.weight"])
def test_first_missing_tensor_is_named(hf_folder: MakeFolder, rows: Path, tmp_path: Path, name: str) -> None:
    folder = hf_folder()
    shapes = hf_shapes(json.loads((folder / "config.json").read_text()))
    del shapes[name]
    write_weights(folder / "model.safetensors", shapes)
    (line,) = faults(config(folder, rows), tmp_path)
    assert f"lacks {name};" in line


def test_several_missing_tensors_name_the_first_and_count(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    folder = hf_folder()
    shapes = hf_shapes(json.loads((folder / "config.json").read_text()))
    write_weights(folder / "model.safetensors", {n: s for n, s in shapes.items() if "layers.1." not in n})
    (line,) = faults(config(folder, rows), tmp_path)
    assert "lacks model.layers.1.input_layernorm.weight (and 10 more)" in line


@pytest.mark.parametrize(
    ("name", "tied", "refused"),
    [
        ("model.layers.0.self_attn.q_proj.bias", False, True),
        ("model.layers.2.mlp.up_proj.weight", False, True),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", False, True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False, False),
        ("lm_head.weight", True, False),
    ],
)
def test_extra_tensors(hf_folder: MakeFolder, rows: Path, tmp_path: Path, name: str, tied: bool, refused: bool) -> None:
    """A tensor without a place in the model is an error; what tied and old checkpoints carry is not."""
    folder = hf_folder(tie_word_embeddings=tied)
    write_weights(folder / "extra.safetensors", {name: (4,)})
    found = faults(config(folder, rows), tmp_path)
    assert len(found) == refused
    assert not refused or f"extra.safetensors has {name};" in found[0]


def test_wrong_shape_and_dtype_are_named(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    folder = hf_folder()
    shapes = hf_shapes(json.loads((folder / "config.json").read_text()))
    name = "model.layers.0.mlp.down_proj.weight"
    write_weights(folder / "model.safetensors", shapes | {name: (256, 128)})
    (line,) = faults(config(folder, rows), tmp_path)
    assert f"{name} has shape [256, 128]; rule: shape [128, 256]" in line
    raw_safetensors(folder / "model.safetensors", {n: ("I32", s) for n, s in shapes.items()})
    (line,) = faults(config(folder, rows), tmp_path)
    assert "model.embed_tokens.weight has dtype I32; rule: dtype one of BF16, F16, F32" in line


def test_fp8_checkpoint_is_no_starting_point(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    """Master weights start from an unquantized model; both the dtype and the scale tensor are named."""
    folder = hf_folder()
    name = "model.layers.0.mlp.down_proj.weight"
    entries = {n: ("BF16", s) for n, s in hf_shapes(json.loads((folder / "config.json").read_text())).items()}
    raw_safetensors(folder / "model.safetensors", entries)
    assert faults(config(folder, rows), tmp_path) == []
    fp8 = {name: ("F8_E4M3", (128, 256)), name + "_scale_inv": ("F32", (1, 2))}
    raw_safetensors(folder / "model.safetensors", entries | fp8)
    found = faults(config(folder, rows), tmp_path)
    assert len(found) == 2
    assert f"has {name}_scale_inv;" in found[0]
    assert f"{name} has dtype F8_E4M3; rule: dtype one of BF16, F16, F32" in found[1]


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "text"])
def test_damaged_weights_are_found(hf_folder: MakeFolder, rows: Path, tmp_path: Path, damage: str) -> None:
    """Also a download that broke off: the header is whole, the data is not."""
    folder = hf_folder()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {"cut": whole[:-100], "header": struct.pack("<Q", 1 << 40) + whole[8:], "empty": b"", "text": b"version https"}[
            damage
        ]
    )
    (line,) = faults(config(folder, rows), tmp_path)
    assert line.startswith(f"model.path: {file}; rule: a readable safetensors file")


def test_missing_shard_is_named(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    folder = hf_folder()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (line,) = faults(config(folder, rows), tmp_path)
    assert "lacks model-00002-of-00002.safetensors" in line


def test_missing_parts_of_the_folder(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    folder = hf_folder()
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    found = faults(config(folder, rows), tmp_path)
    assert ["*.safetensors" in found[0], "tokenizer.json" in found[1], len(found)] == [True, True, 2]
    (folder / "config.json").write_text("{")
    assert "valid JSON" in faults(config(folder, rows), tmp_path)[0]
    (folder / "config.json").unlink()
    assert "config.json" in faults(config(folder, rows), tmp_path)[0]
    assert "an existing checkpoint" in faults(config(tmp_path / "none", rows), tmp_path)[0]


def test_unknown_family_says_where_it_was_read(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    folder = hf_folder()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (line,) = faults(config(folder, rows), tmp_path)
    assert "config.json): model_type: 'gpt2'; rule: a supported family" in line


def test_base_model_without_chat_template(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    folder = hf_folder()
    (folder / "tokenizer_config.json").write_text("{}")
    (line,) = faults(config(folder, rows), tmp_path)
    assert line.startswith("data.chat_template: true; rule: ")
    off = config(folder, rows).model_dump()
    off["data"]["chat_template"] = False
    assert faults(RunConfig.model_validate(off), tmp_path) == []


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ('{"question": "1"', "rule: one JSON object per line"),
        ("[1]", "rule: a JSON object"),
        ('{"question": "1"}', "no field 'answer'; rule: has the field of data.answer_field"),
        ('{"q": "1", "answer": "2"}', "fix: set data.prompt_field to one of: q, answer"),
        ('{"question": "", "answer": "2"}', "field 'question' is \"\"; rule: non-empty text"),
        ('{"question": 3, "answer": "2"}', "field 'question' is 3; rule: non-empty text"),
        ('{"question": "1", "answer": null}', "field 'answer' is null; rule: text or a number"),
        ('{"question": "1", "answer": true}', "field 'answer' is true; rule: text or a number"),
    ],
)
@pytest.mark.parametrize("key", ["data", "eval"])
def test_bad_row_names_file_line_and_field(
    hf_folder: MakeFolder, rows: Path, tmp_path: Path, row: str, part: str, key: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "1", "answer": "2"}\n\n' + row + "\n")
    cfg = config(hf_folder(), bad) if key == "data" else config(hf_folder(), rows, eval={"path": str(bad)})
    (line,) = faults(cfg, tmp_path)
    assert line.startswith(f"{bad}:3: ")
    assert part in line


def test_many_bad_rows_are_counted(hf_folder: MakeFolder, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n" * 12)
    found = faults(config(hf_folder(), bad), tmp_path)
    assert len(found) == 6
    assert "correct 7 more rows" in found[-1]


def test_absent_and_empty_data(hf_folder: MakeFolder, tmp_path: Path) -> None:
    folder, empty = hf_folder(), tmp_path / "empty.jsonl"
    assert "an existing JSONL file" in faults(config(folder, empty), tmp_path)[0]
    empty.write_text("\n")
    assert "at least one row" in faults(config(folder, empty), tmp_path)[0]
    empty.write_bytes(b"\xff\xfe\n")
    assert "UTF-8" in faults(config(folder, empty), tmp_path)[0]


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        ("gsm8k", True),
        ("my_pkg.rewards:score", True),
        ("mod:fn", True),
        ("exact", False),
        ("a b:c", False),
        ("m:", False),
    ],
)
def test_reward_kind(hf_folder: MakeFolder, rows: Path, tmp_path: Path, kind: str, good: bool) -> None:
    found = faults(config(hf_folder(), rows, reward={"kind": kind}), tmp_path)
    assert (found == []) == good
    assert good or found[0].startswith(f'reward.kind: "{kind}"; rule: one of exact_match')


def test_run_dir_and_staging_dir(hf_folder: MakeFolder, rows: Path, tmp_path: Path) -> None:
    cfg = config(hf_folder(), rows, sync={"staging_dir": str(tmp_path / "absent")})
    found = faults(cfg, rows / "run")
    assert [f.split(":")[0] for f in found] == ["run_dir", "sync.staging_dir"]
    assert f"{rows} is a file" in found[0]


def test_unwritable_run_dir(hf_folder: MakeFolder, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is replaced, because root (in CI) may write everywhere."""
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and real(path, mode))
    (line,) = faults(config(hf_folder(), rows), closed / "a" / "run")
    assert (
        line == f"run_dir: {closed / 'a' / 'run'}; rule: writable, but {closed} is not; fix: choose another --run-dir"
    )


def raw_safetensors(path: Path, entries: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Writes dtypes that numpy lacks: header by the format's specification, zero data."""
    sizes = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}
    header, offset = {}, 0
    for name, (dtype, shape) in entries.items():
        size = sizes[dtype]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
