"""Checkpoint files: what is written is read back, by us and by transformers; nothing half-written is left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.io import INDEX, SINGLE, HfCheckpoint, HfWriter, require_finite, write_hf
from jetrl_megatron.weights.plan import ConversionPlan
from tests.support.models import assert_same_bits, hf_model, perturb, random_bits, tiny_model

TENSORS = {f"t{i}": random_bits((8, 16), i) for i in range(5)}  # 256 bytes each
CONFIG = {"model_type": "llama"}


def files_of(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


@pytest.mark.parametrize("max_shard_bytes", [1, 512, 600, 10**9])
def test_shards_and_index(tmp_path: Path, max_shard_bytes: int) -> None:
    """Any shard size gives the same tensors back; shards respect the limit unless one tensor exceeds it."""
    out = tmp_path / "out"
    write_hf(out, TENSORS.items(), CONFIG, max_shard_bytes=max_shard_bytes)
    read = HfCheckpoint(out)
    assert read.config == CONFIG
    assert read.names() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same_bits(read.tensor(name), tensor, name)
        assert read.shape(name) == (8, 16)
    num_shards = {1: 5, 512: 3, 600: 3, 10**9: 1}[max_shard_bytes]
    assert len(list(out.glob("*.safetensors"))) == num_shards
    if num_shards == 1:
        assert files_of(out) == {SINGLE, "config.json"}
    else:
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"]["total_size"] == 5 * 256
        assert index["weight_map"].keys() == TENSORS.keys()
    assert files_of(tmp_path) == {"out"}
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1


def test_views_and_fp8_are_stored_as_their_own_data(tmp_path: Path) -> None:
    """Overlapping, transposed and FP8 tensors are written with exactly their elements."""
    base = random_bits((16, 16), 3)
    tensors = {
        "whole": base,
        "rows": base[2:6],
        "same": base[2:6],
        "alias": base,
        "turned": base.t(),
        "fp8": random_bits((4, 4), 1, torch.float8_e4m3fn),
    }
    write_hf(tmp_path / "out", tensors.items(), CONFIG)
    read = HfCheckpoint(tmp_path / "out")
    for name, tensor in tensors.items():
        assert_same_bits(read.tensor(name), tensor, name)


def test_failure_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """A writer that fails half-way leaves the old checkpoint readable and no temporary files."""
    out = tmp_path / "out"
    write_hf(out, TENSORS.items(), CONFIG)

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield "a", TENSORS["t0"]
        yield "b", TENSORS["t1"]
        assert HfCheckpoint(out).config == CONFIG
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_hf(out, interrupted(), {"new": 1}, max_shard_bytes=1)
    assert HfCheckpoint(out).names() == sorted(TENSORS)
    assert files_of(tmp_path) == {"out"}
    with pytest.raises(ValueError, match="a: written twice"):
        write_hf(out, [("a", TENSORS["t0"])] * 2, CONFIG)
    with pytest.raises(ValueError, match="no tensors"):
        write_hf(out, [], CONFIG)
    assert HfCheckpoint(out).names() == sorted(TENSORS)
    assert files_of(tmp_path) == {"out"}


def test_rewrite_in_place_from_itself(tmp_path: Path) -> None:
    """A checkpoint can be read lazily while it is rewritten: stale shards go, tokenizer files stay."""
    out = tmp_path / "out"
    write_hf(out, TENSORS.items(), CONFIG, max_shard_bytes=1)
    (out / "tokenizer.json").write_text("{}")
    old = HfCheckpoint(out)
    write_hf(out, ((name, old.tensor(name)) for name in old.names()), {"new": 1}, source_dir=out)
    assert files_of(out) == {SINGLE, "config.json", "tokenizer.json"}
    assert HfCheckpoint(out).config == {"new": 1}
    for name, tensor in TENSORS.items():
        assert_same_bits(HfCheckpoint(out).tensor(name), tensor, name)


def test_never_deletes_other_directories(tmp_path: Path) -> None:
    """A target that is not a checkpoint is refused and stays."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a checkpoint"):
        write_hf(tmp_path, TENSORS.items(), CONFIG)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    """Missing directory, weights, shard or tensor, a truncated shard and a wrong index are errors with the file."""
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="no such directory"):
        HfCheckpoint(out)
    write_hf(out, TENSORS.items(), CONFIG, max_shard_bytes=512)
    with pytest.raises(ValueError, match="absent: not in"):
        HfCheckpoint(out).tensor("absent")
    index = (out / INDEX).read_text()
    (out / INDEX).write_text(index.replace('"t0": "model-00001', '"t0": "model-00002'))
    with pytest.raises(ValueError, match=r"does not match its shards for \['t0'\]"):
        HfCheckpoint(out)
    (out / INDEX).write_text(index)
    shard = out / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors: not a readable"):
        HfCheckpoint(out)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors: missing"):
        HfCheckpoint(out)
    (out / INDEX).unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        HfCheckpoint(out)


def test_require_finite_counts() -> None:
    """NaN and Inf are counted, also NaN codes of FP8; finite and integer tensors pass through."""
    good = torch.ones(4, dtype=torch.bfloat16)
    assert require_finite("w", good) is good
    assert require_finite("i", torch.ones(2, dtype=torch.uint8)) is not None
    bad = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])
    with pytest.raises(ValueError, match="w: 1 NaN and 2 Inf of 4"):
        require_finite("w", bad)
    codes = torch.tensor([0x7F, 0x00, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="w: 2 NaN and 0 Inf of 3"):
        require_finite("w", codes)


def test_verify_and_transformers_read_it(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model that went HF -> Megatron (tp 2) -> our files gives, in transformers, bitwise the same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_model(tmp_path_factory, "qwen2", vocab_size=101)
    read = HfCheckpoint(source)
    plan = ConversionPlan(ModelDims.from_hf(read.config))
    read.verify(plan)
    with HfWriter(tmp_path / "out", read.config, source, max_shard_bytes=100_000) as writer:
        for rule in plan.rules:
            shards = rule.to_megatron([read.tensor(hf.name) for hf in rule.hf], 2)
            for hf, tensor in zip(rule.hf, rule.to_hf(shards), strict=True):
                writer.add(hf.name, tensor)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("t5 t9 t77 t100", return_tensors="pt").input_ids
    assert ids.tolist() == [[5, 9, 77, 100]]
    logits = [AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (source, tmp_path / "out")]
    assert_same_bits(logits[1], logits[0], "logits")


def test_stacked_experts_are_read_as_single_ones(tmp_path: Path) -> None:
    """A checkpoint in transformers 5's stacked layout and one with a tensor per expert hold, read tensor by tensor, the
    same bits; HF -> Megatron -> HF returns them, and transformers loads the result as the model that it was."""
    from transformers import AutoModelForCausalLM

    model = hf_model("qwen3_moe", vocab_size=101)
    perturb(model, seed=5)
    model.save_pretrained(tmp_path / "single")
    single = HfCheckpoint(tmp_path / "single")
    write_hf(tmp_path / "stacked", model.state_dict().items(), single.config)
    stacked = HfCheckpoint(tmp_path / "stacked")
    plan = ConversionPlan(ModelDims.from_hf(stacked.config))
    for read in (single, stacked):
        read.verify(plan)
    back: dict[str, Tensor] = {}
    for rule in plan.rules:
        local = rule.to_megatron([stacked.tensor(hf.name) for hf in rule.hf], 1)
        back |= dict(zip((hf.name for hf in rule.hf), rule.to_hf(local), strict=True))
    assert sorted(back) == stacked.names() == single.names()
    for name, tensor in back.items():
        assert_same_bits(tensor, single.tensor(name), name)
        assert stacked.shape(name) == tuple(tensor.shape)
    write_hf(tmp_path / "back", back.items(), single.config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    for name, tensor in model.state_dict().items():
        assert_same_bits(loaded[name], tensor, name)


def test_verify_refuses_wrong_shapes_and_untied_heads(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shapes are checked from the headers; an extra lm_head of a tied model must equal the embedding."""
    source = tiny_model(tmp_path_factory, "llama", tie_word_embeddings=True)
    read = HfCheckpoint(source)
    plan = ConversionPlan(ModelDims.from_hf(read.config))
    tensors = {name: read.tensor(name) for name in read.names()}
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    write_hf(tmp_path / "same", {**tensors, "lm_head.weight": embedding}.items(), read.config)
    HfCheckpoint(tmp_path / "same").verify(plan)
    write_hf(tmp_path / "other", {**tensors, "lm_head.weight": embedding * 2}.items(), read.config)
    with pytest.raises(ValueError, match=r"lm_head.weight: differs from model.embed_tokens.weight"):
        HfCheckpoint(tmp_path / "other").verify(plan)
    write_hf(tmp_path / "shape", {**tensors, "model.norm.weight": torch.ones(7)}.items(), read.config)
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \[7\]; rule: expected \[256\]"):
        HfCheckpoint(tmp_path / "shape").verify(plan)
