"""BF16 <-> FP8 of Hugging Face checkpoints: the bytes of an independent quantizer, readable by others, lossless."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from jetrl_megatron import fp8
from jetrl_megatron.weights.convert.precision import bf16_to_fp8, fp8_to_bf16
from jetrl_megatron.weights.convert.source import CHUNK_BYTES, row_chunks
from tests.convert.conftest import Models
from tests.convert.stock_sglang import sglang_environment
from tests.convert.support import assert_same, read
from tests.support.models import FAMILIES, assert_same_bits
from tests.support.oracles import codes_of, dequantize, quantize_blocks, spread

ROOT = Path(__file__).parents[2]
SCALE = "_scale_inv"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_linear(name: str) -> bool:
    return any(name.endswith(f".{linear}.weight") for linear in LINEARS)


def grid_of(scale: Tensor, num_rows: int) -> np.ndarray:
    """Block scales with one row per row of the weight."""
    return np.repeat(scale.float().numpy(), 128, axis=0)[:num_rows]


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_the_oracle(tmp_path: Path, models: Models, family: str, scale_format: str) -> None:
    """Exactly the linears are FP8; codes and scales are those of the numpy oracle; all else is copied bit for bit."""
    source = models(family)
    bf16_to_fp8(source, tmp_path / "fp8", scale_format).run()
    before, after = read(source), read(tmp_path / "fp8")
    assert after.keys() == before.keys() | {name + SCALE for name in before if is_linear(name)}
    for name, tensor in before.items():
        if not is_linear(name):
            assert_same_bits(after[name], tensor, name)
            continue
        codes, scales = quantize_blocks(tensor.float().numpy(), 128, scale_format)
        assert after[name].dtype == torch.float8_e4m3fn
        assert np.array_equal(codes_of(after[name]), codes), name
        assert np.array_equal(grid_of(after[name + SCALE], len(tensor)), scales), name


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(tmp_path: Path, models: Models, family: str) -> None:
    """FP8 -> BF16 -> FP8 gives identical bytes for fp32 scales that came from bf16, with any number of shards; config,
    generation config and tokenizer are carried over."""
    source = models(family)
    bf16_to_fp8(source, tmp_path / "fp8").run()
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "bf16", workers=3).run()
    bf16_to_fp8(tmp_path / "bf16", tmp_path / "again").run()
    assert_same(tmp_path / "again", tmp_path / "fp8")
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) >= 3
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()
    config, original = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "bf16", source))
    assert config == original


def test_there_and_back_pow2(tmp_path: Path, models: Models) -> None:
    """Power-of-two scales: at most 2 % of the blocks change code and scale together; the values stay, all of them."""
    bf16_to_fp8(models("qwen3"), tmp_path / "fp8", "pow2").run()
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "bf16").run()
    bf16_to_fp8(tmp_path / "bf16", tmp_path / "again", "pow2").run()
    first, again = read(tmp_path / "fp8"), read(tmp_path / "again")
    changed = total = 0
    for name in filter(is_linear, first):
        values = [dequantize(codes_of(t[name]), grid_of(t[name + SCALE], len(t[name]))) for t in (first, again)]
        assert np.array_equal(*values), name
        changed += int((first[name + SCALE] != again[name + SCALE]).sum())
        total += first[name + SCALE].numel()
    assert changed <= 0.02 * total


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_it(tmp_path: Path, models: Models, family: str) -> None:
    """transformers' own finegrained-fp8 loader dequantizes our FP8 checkpoint to the weights of our BF16 one."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    bf16_to_fp8(models(family), tmp_path / "fp8").run()
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "bf16").run()
    config = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=config, dtype=torch.bfloat16
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert_same_bits(theirs[name].to(tensor.dtype), tensor, name)


def test_public_checkpoints(tmp_path: Path, models: Models) -> None:
    """As found in public: scales as bf16 or UE8M0, and layers that were left in BF16 (modules_to_not_convert)."""
    bf16_to_fp8(models("qwen3"), tmp_path / "fp8", "pow2").run()
    tensors, source = read(tmp_path / "fp8"), read(models("qwen3"))
    kept = "model.layers.1.mlp.down_proj.weight"
    tensors[kept] = source[kept]
    del tensors[kept + SCALE]
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "expected").run()
    expected = read(tmp_path / "expected") | {kept: source[kept]}
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        public, out = tmp_path / f"public {dtype}", tmp_path / f"out {dtype}"
        shutil.copytree(tmp_path / "fp8", public)
        stored = {name: t.to(dtype) if name.endswith(SCALE) else t for name, t in tensors.items()}
        save_file(stored, public / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((public / "config.json").read_text())
        config["quantization_config"]["modules_to_not_convert"] += ["model.layers.1.mlp.down_proj"]
        (public / "config.json").write_text(json.dumps(config))
        fp8_to_bf16(public, out).run()
        for name, tensor in read(out).items():
            assert_same_bits(tensor, expected[name], name)


@pytest.mark.slow
@pytest.mark.multi
def test_stock_sglang_loads_it(tmp_path: Path, models: Models) -> None:
    """Stock SGLang, our plugin inactive, loads every code and scale into its FP8 linears. Not for Llama: SGLang 0.5.23
    renames the scales of that architecture and then drops them (models/llama.py, load_weights)."""
    bf16_to_fp8(models("qwen3"), tmp_path / "fp8").run()
    command = [sys.executable, "-m", "tests.convert.stock_sglang", str(tmp_path / "fp8"), str(tmp_path / "held.pt")]
    done = subprocess.run(
        command, env=sglang_environment(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    held, ours = torch.load(tmp_path / "held.pt"), read(tmp_path / "fp8")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    compared = 0
    for layer in range(4):
        for linear in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            block, _, name = linear.partition(".")
            for suffix in ("weight", "weight" + SCALE):
                parts = [ours[f"model.layers.{layer}.{block}.{p}.{suffix}"] for p in fused.get(name, (name,))]
                expected = torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
                assert_same_bits(held[f"model.layers.{layer}.{linear}.{suffix}"], expected, f"{linear}.{suffix}")
                compared += len(parts)
    assert compared == len([name for name in ours if is_linear(name) or name.endswith(SCALE)])


@pytest.mark.parametrize("shape", [(300, 200), (256, 384), (1, 1)])
def test_dequantizing_any_shape(shape: tuple[int, int]) -> None:
    """Equal to the exact product, rounded once to fp32 and once to bf16; ragged blocks included."""
    codes, scales = quantize_blocks(spread(shape, 0).numpy(), 128, "fp32")
    block_scale = torch.from_numpy(scales[::128].copy())
    ours = fp8.dequantize(torch.from_numpy(codes).view(fp8.E4M3), block_scale, fp8.BLOCK, torch.bfloat16)
    expected = torch.from_numpy(dequantize(codes, scales).astype(np.float32)).bfloat16()
    assert_same_bits(ours, expected, "values")


def test_chunks_start_on_blocks() -> None:
    """Chunks cover all rows and start on block boundaries, also where 128 rows exceed the chunk size."""
    for shape, row_bytes in (((1000, 1), 2), ((70_000, 4096), 8192), ((300, 1), CHUNK_BYTES)):
        chunks = list(row_chunks(shape, row_bytes))
        assert chunks[0][0] == 0
        assert chunks[-1][1] == shape[0]
        assert all(first % 128 == 0 for first, _ in chunks)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(chunks))
