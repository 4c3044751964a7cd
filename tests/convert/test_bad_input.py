"""Every fault of a checkpoint is one line that names it, with exit code 2, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from jetrl_megatron.cli.main import app
from jetrl_megatron.weights.convert.precision import bf16_to_fp8
from jetrl_megatron.weights.io import HfCheckpoint, write_hf
from tests.convert.conftest import Models

Q = "model.layers.0.self_attn.q_proj.weight"
SCALE = Q + "_scale_inv"
Change = Callable[[Path], None]


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and what was said on stderr."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, result.stderr


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """A change of the tensors of a single-file checkpoint."""

    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file({name: t.contiguous() for name, t in held.items()}, folder / "model.safetensors")

    return apply


def config(**values: Any) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def set_nan(held: dict[str, torch.Tensor]) -> None:
    held[SCALE][0, 0] = torch.nan


def set_inf(held: dict[str, torch.Tensor]) -> None:
    held[Q][3, 3] = torch.inf


BF16_FAULTS: dict[str, tuple[Change, str]] = {
    "truncated": (truncate, "model.safetensors: not a readable safetensors file"),
    "missing": (tensors(lambda t: t.pop(Q)), f"missing {Q}, unused none"),
    "extra": (tensors(lambda t: t.update(extra=torch.ones(1))), "missing none, unused extra"),
    "dtype": (tensors(lambda t: t.update({Q: t[Q].to(torch.float64)})), f"{Q}: dtype F64"),
    "shape": (tensors(lambda t: t.update({Q: t[Q][:-1]})), f"{Q}: shape [511, 256]; rule: expected [512, 256]"),
    "untied": (tensors(lambda t: t.pop("lm_head.weight")), "missing lm_head.weight"),
    "tied": (config(tie_word_embeddings=True), "lm_head.weight: differs from model.embed_tokens.weight although tie"),
    "architecture": (config(model_type="gpt9"), "use one of ['llama', 'qwen2', 'qwen3', 'qwen3_moe']"),
    "vocabulary": (config(vocab_size=512), "model.embed_tokens.weight: shape [509, 256]; rule: expected [512, 256]"),
    "inf": (tensors(set_inf), f"{Q}: 0 NaN and 1 Inf"),
    "quantization": (
        config(quantization_config={"quant_method": "gptq"}),
        "quantization_config: {'quant_method': 'gptq'",
    ),
}
FP8_FAULTS: dict[str, tuple[Change, str]] = {
    "scale shape": (tensors(lambda t: t.update({SCALE: t[SCALE][:1]})), f"{SCALE}: F32 [1, 2]; rule: F32, BF16 or F8"),
    "nan scale": (tensors(set_nan), f"{SCALE}: 1 of 8 scales are NaN, infinite or not positive"),
    "no scale": (tensors(lambda t: t.pop(SCALE)), f"{SCALE}: missing"),
    "lone scale": (tensors(lambda t: t.update({Q: t[Q].bfloat16()})), f"{SCALE}: scale of a tensor that is not FP8"),
    "blocks": (config(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}), "[64, 64]"),
    "no config": (config(quantization_config=None), "quantization_config: missing"),
}


@pytest.mark.parametrize("fault", BF16_FAULTS)
def test_bf16_faults(tmp_path: Path, models: Models, fault: str) -> None:
    folder, (change, message) = shutil.copytree(models("llama"), tmp_path / "hf"), BF16_FAULTS[fault]
    change(folder)
    code, said = run("bf16-to-fp8", "--hf", folder, "--out", tmp_path / "out")
    assert (code, message in said) == (2, True), said
    assert "; rule: " in said
    assert "; fix: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_fp8_faults(tmp_path: Path, models: Models, fault: str) -> None:
    folder, (change, message) = tmp_path / "hf", FP8_FAULTS[fault]
    bf16_to_fp8(models("llama"), folder).run()
    change(folder)
    code, said = run("fp8-to-bf16", "--hf", folder, "--out", tmp_path / "out")
    assert (code, message in said) == (2, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_index_faults(tmp_path: Path, models: Models) -> None:
    """A tensor missing from the index, and a shard missing from the folder."""
    source = HfCheckpoint(models("llama"))
    folder = tmp_path / "hf"
    write_hf(folder, ((name, source.tensor(name)) for name in source.names()), source.config, max_shard_bytes=1 << 20)
    index = folder / "model.safetensors.index.json"
    whole = index.read_text()
    entries = json.loads(whole)
    del entries["weight_map"][Q]
    index.write_text(json.dumps(entries))
    code, said = run("bf16-to-fp8", "--hf", folder, "--out", tmp_path / "out")
    assert (code, f"does not match its shards for ['{Q}']" in said) == (2, True), said
    index.write_text(whole)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    code, said = run("bf16-to-fp8", "--hf", folder, "--out", tmp_path / "out")
    assert (code, f"{shard.name}: missing" in said) == (2, True), said


def test_wrong_direction_and_layouts(tmp_path: Path, models: Models) -> None:
    """Quantizing twice, dequantizing BF16, more TP than kv heads, stages and experts that do not divide."""
    source, fp8, out = models("llama"), tmp_path / "fp8", tmp_path / "out"
    bf16_to_fp8(source, fp8).run()
    for arguments, message in (
        (("bf16-to-fp8", "--hf", fp8), "is FP8 already"),
        (("fp8-to-bf16", "--hf", source), "has no FP8 weights"),
        (("hf-to-megatron", "--hf", source, "--tp", 8), "must divide num_key_value_heads (4)"),
        (("hf-to-megatron", "--hf", source, "--pp", 3, "--dtype", "fp8"), "pp: 3; rule: divides num_hidden_layers (4)"),
        (("hf-to-megatron", "--hf", source, "--ep", 2), "ep: 2; rule: divides num_experts (1)"),
        (("hf-to-megatron", "--hf", tmp_path / "absent"), "absent: no such directory"),
        (("megatron-to-hf", "--megatron", source), "hf/config.json: missing; rule: the model's config.json"),
        (("reshard", "--megatron", source, "--hf-config", source), ".metadata: missing"),
    ):
        code, said = run(*arguments, "--out", out)
        assert (code, message in said) == (2, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]


def test_stacked_fp8_experts(tmp_path: Path, models: Models) -> None:
    """Experts stacked in one FP8 tensor, with one scale tensor for all of them."""
    folder = tmp_path / "hf"
    bf16_to_fp8(models("qwen3_moe"), folder).run()
    held = load_file(folder / "model.safetensors")
    experts = "model.layers.0.mlp.experts"
    for kind, stacked in (("weight", f"{experts}.down_proj"), ("weight_scale_inv", f"{experts}.down_proj_scale_inv")):
        parts = [held.pop(f"{experts}.{i}.down_proj.{kind}").view(torch.uint8) for i in range(8)]
        dtype = torch.float8_e4m3fn if kind == "weight" else torch.float32
        held[stacked] = torch.stack(parts).view(dtype)
    save_file(held, folder / "model.safetensors")
    code, said = run("fp8-to-bf16", "--hf", folder, "--out", tmp_path / "out")
    assert code == 2, said
    assert f"{experts}.0.down_proj.weight_scale_inv: missing" in said
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
