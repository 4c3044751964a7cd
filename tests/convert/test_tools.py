"""inspect, verify and the scripts of tools/convert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from jetrl_megatron.cli import convert
from jetrl_megatron.cli.main import app
from jetrl_megatron.megatron.convert import hf_to_megatron, megatron_to_hf
from jetrl_megatron.weights.convert.layout import Layout
from jetrl_megatron.weights.convert.precision import bf16_to_fp8, fp8_to_bf16
from jetrl_megatron.weights.convert.ranks import hf_to_shards
from tests.convert.conftest import Models
from tests.convert.support import assert_same

TOOLS = Path(__file__).parents[2] / "tools" / "convert"
SCRIPTS = sorted(TOOLS.glob("*.py"))


def call(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a command."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments), "--json"])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


def test_every_format_is_equal_to_its_source(tmp_path: Path, models: Models) -> None:
    """torch_dist equals HF; FP8 shards equal the FP8 checkpoint; FP8 equals BF16 within the stated tolerance, with
    logits that are close but not the same."""
    for family in ("qwen2", "qwen3_moe"):
        source, work = models(family), tmp_path / family
        hf_to_megatron(source, work / "dist", Layout(2)).run()
        hf_to_shards(source, work / "shards", Layout(2, 2)).run()
        bf16_to_fp8(source, work / "fp8").run()
        fp8_to_bf16(work / "fp8", work / "bf16").run()
        for a, b in (("dist", source), ("shards", work / "fp8"), ("fp8", source), ("shards", work / "bf16")):
            code, report = call("verify", work / a, b)
            assert (code, report["equal"], report["differences"]) == (0, True, []), (a, report)
        code, report = call("verify", source, work / "dist", "--logits")
        assert (code, report["logits"]) == (0, {"max_abs": 0.0, "top1": 1.0, "kl": 0.0})
        code, report = call("verify", source, work / "fp8", "--logits")
        assert code == 0
        assert 0 < report["logits"]["kl"] < 0.1
        code, report = call("verify", work / "bf16", source)  # both BF16: only equal bits are equal
        assert (code, report["equal"]) == (1, False)


def test_logits_are_those_of_transformers(tmp_path: Path, models: Models) -> None:
    """verify's logits of a Megatron checkpoint are those that transformers computes after loading the HF folder."""
    from transformers import AutoModelForCausalLM

    from jetrl_megatron.cli.checkpoints import open_checkpoint
    from jetrl_megatron.weights.convert.compare import _logits

    hf_to_megatron(models("qwen3_moe"), tmp_path / "m", Layout(2)).run()
    opened, ids = open_checkpoint(tmp_path / "m"), torch.arange(40).view(2, 20)
    model = AutoModelForCausalLM.from_pretrained(models("qwen3_moe"), dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(_logits(opened.tensors, opened.config, ids), model(ids).logits, rtol=0, atol=0)


def test_verify_names_what_differs(tmp_path: Path, models: Models) -> None:
    """One changed element of BF16, one changed code, one changed scale, other tensors altogether."""
    source = models("llama")
    name, scale = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"
    bf16_to_fp8(source, tmp_path / "fp8").run()
    for kind, tensor, folder in (
        ("bf16", name, source),
        ("code", name, tmp_path / "fp8"),
        ("scale", scale, tmp_path / "fp8"),
    ):
        changed = tmp_path / kind
        changed.mkdir()
        for file in folder.iterdir():
            (changed / file.name).write_bytes(file.read_bytes())
        held = load_file(folder / "model.safetensors")
        held[tensor][0, 0] = held[tensor][0, 0].float() * 2
        save_file(held, changed / "model.safetensors")
        code, report = call("verify", folder, changed)
        (found,) = report["differences"]
        assert (code, found["name"], found["num"] > 0, found["max_abs"] > 0) == (1, name, True, True)
        assert kind == "scale" or found["num"] == 1
    code, report = call("verify", tmp_path / "code", source)
    assert (code, [item["name"] for item in report["differences"]]) == (1, [name])
    code, report = call("verify", source, models("qwen3"))
    assert code == 1
    assert {item["what"] for item in report["differences"]} >= {"only in B", "bfloat16"}
    assert CliRunner().invoke(app, ["convert", "verify", str(source), str(tmp_path / "absent")]).exit_code == 2


def test_inspect_by_hand(tmp_path: Path, models: Models) -> None:
    """Blocks, shards and cuts of a tiny llama at TP 1, 2, 4, 8, in every format."""
    source = models("llama")
    hf_to_megatron(source, tmp_path / "dist", Layout(2)).run()
    hf_to_shards(source, tmp_path / "shards", Layout(2)).run()
    bf16_to_fp8(source, tmp_path / "fp8").run()
    seen = {}
    for folder in (source, tmp_path / "dist", tmp_path / "shards", tmp_path / "fp8"):
        code, found = call("inspect", folder)
        assert code == 0
        seen[found["format"]] = found
    assert list(seen) == [
        "Hugging Face, unquantized",
        "Megatron torch_dist, any layout",
        "FP8 shards, TP 2, PP 1, EP 1",
        "Hugging Face, block FP8",
    ]
    for found in seen.values():
        quantized = "FP8" in found["format"]
        assert found["dtypes"] == ({"BF16": 11, "F8_E4M3": 28} if quantized else {"BF16": 39})
        assert (found["family"], found["dims"]["head_dim"]) == ("llama", 64)
        linears = {linear["name"]: linear for linear in found["linears"]}
        assert linears["mlp.down_proj"]["blocks"] == [2, 5]
        four = linears["mlp.down_proj"]["layouts"]["4"]
        assert (four["shard"], four["blocks"], four["cut"]) == ([256, 160], [2, 2], True)
        assert found["tensor_parallel"]["1"] == {"works": True, "cut": [], "why": ""}
        assert found["tensor_parallel"]["2"]["cut"] == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        assert not found["tensor_parallel"]["8"]["works"]
    text = CliRunner().invoke(app, ["convert", "inspect", str(source), "--tp", "2,8"]).stdout
    assert "640x256" in text
    assert "must divide num_key_value_heads (4)" in text
    assert CliRunner().invoke(app, ["convert", "inspect", str(source), "--tp", "a"]).exit_code == 2


def test_scripts_are_the_commands() -> None:
    """Every command has its script, and the flags that are promised."""
    commands = {command.callback.__name__ for command in convert.app.registered_commands if command.callback}
    assert {script.stem for script in SCRIPTS} == commands
    flags = {
        "hf-to-megatron": ("--hf", "--out", "--tp", "--pp", "--ep", "--dtype"),
        "megatron-to-hf": ("--megatron", "--out", "--hf-config"),
        "bf16-to-fp8": ("--hf", "--out", "--scale-format", "--workers"),
        "fp8-to-bf16": ("--hf", "--out"),
        "reshard": ("--megatron", "--out", "--tp", "--pp", "--ep"),
        "inspect": ("--tp", "--json"),
        "verify": ("--logits", "--json"),
    }
    for command, names in flags.items():
        text = CliRunner().invoke(app, ["convert", command, "--help"], env={"COLUMNS": "200"}).stdout
        assert "Example: " in text
        assert all(name in text for name in names), text


def test_a_script_runs(tmp_path: Path, models: Models) -> None:
    """As a user starts it: exit codes 0 and 2, one line on stderr besides the progress bar."""
    command = [sys.executable, str(TOOLS / "bf16_to_fp8.py"), "--hf", str(models("llama")), "--out"]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("wrote ")) == (0, True), done.stderr
    again = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert next(line for line in again.stderr.splitlines() if line.startswith("error: ")).count("; ") == 2


@pytest.mark.slow
def test_smollm2(tmp_path: Path, smollm2_dir: Path) -> None:
    """SmolLM2-135M (tied, 576 = 4.5 blocks, 9 heads): TP 3 PP 2 and back, FP8 shards, FP8 there and back."""
    hf_to_megatron(smollm2_dir, tmp_path / "m", Layout(3, 2)).run()
    megatron_to_hf(tmp_path / "m", tmp_path / "hf").run()
    assert_same(tmp_path / "hf", smollm2_dir)
    bf16_to_fp8(smollm2_dir, tmp_path / "fp8").run()
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "bf16").run()
    bf16_to_fp8(tmp_path / "bf16", tmp_path / "again").run()
    assert_same(tmp_path / "again", tmp_path / "fp8")
    hf_to_shards(smollm2_dir, tmp_path / "shards", Layout(3, 2)).run()
    code, report = call("verify", tmp_path / "shards", tmp_path / "fp8")
    assert (code, report["equal"]) == (0, True)
    code, report = call("verify", tmp_path / "fp8", smollm2_dir, "--logits")
    assert code == 0
    assert report["logits"]["kl"] < 0.2  # the prompts are random tokens: 0.064 was seen
