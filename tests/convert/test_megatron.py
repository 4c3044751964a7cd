"""HF -> torch_dist -> HF in one process, loaded by stock Megatron-Core and by our trainer's model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe
from jetrl_megatron.megatron import cpu_shim
from jetrl_megatron.megatron.convert import hf_to_megatron, megatron_to_hf, reshard
from jetrl_megatron.megatron.gather import load_hf, load_megatron
from jetrl_megatron.megatron.groups import Ranks, shutdown
from jetrl_megatron.megatron.linear import LinearPrecision
from jetrl_megatron.megatron.model import Policy, build_policy
from jetrl_megatron.megatron.torch_dist import MegatronCheckpoint
from jetrl_megatron.weights.convert.layout import Layout
from jetrl_megatron.weights.convert.precision import bf16_to_fp8, fp8_to_bf16
from jetrl_megatron.weights.io import HfCheckpoint
from jetrl_megatron.weights.plan import ConversionPlan
from tests.convert.conftest import Models
from tests.convert.support import assert_same, read
from tests.support.models import FAMILIES, assert_same_bits
from tests.weights.test_megatron_logits import stock_gpt_model

LAYOUTS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


def bytes_of(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("name", [*FAMILIES, "llama-tied"])
def test_round_trip(tmp_path: Path, models: Models, name: str, tp: int, pp: int) -> None:
    """HF -> Megatron(TP, PP, EP) -> HF is bit-identical for every layout."""
    source = models(name)
    for ep in (1, 2) if name == "qwen3_moe" else (1,):
        hf_to_megatron(source, tmp_path / f"m{ep}", Layout(tp, pp, ep)).run()
        megatron_to_hf(tmp_path / f"m{ep}", tmp_path / f"hf{ep}").run()
        assert_same(tmp_path / f"hf{ep}", source)
        size, expected = bytes_of(tmp_path / f"m{ep}", "*.distcp"), bytes_of(source, "*.safetensors")
        assert 0.9 * expected < size < 1.2 * expected  # every byte is stored once


def test_reshard(tmp_path: Path, models: Models) -> None:
    """Resharding writes, tensor by tensor, what a direct conversion to that layout writes."""
    source = models("qwen2")
    hf_to_megatron(source, tmp_path / "a", Layout(2)).run()
    reshard(tmp_path / "a", tmp_path / "b", Layout(4, 2)).run()
    hf_to_megatron(source, tmp_path / "c", Layout(4, 2)).run()
    for file in sorted(path.name for path in (tmp_path / "c").glob("*.distcp")):
        assert (tmp_path / "b" / file).stat().st_size == (tmp_path / "c" / file).stat().st_size
    assert (tmp_path / "b" / ".metadata").read_bytes() == (tmp_path / "c" / ".metadata").read_bytes()
    reshard(tmp_path / "b", tmp_path / "d", Layout()).run()
    megatron_to_hf(tmp_path / "d", tmp_path / "hf").run()
    assert_same(tmp_path / "hf", source)


def test_precisions(tmp_path: Path, models: Models) -> None:
    """fp32 holds the bf16 values; an FP8 checkpoint arrives dequantized."""
    source = models("llama")
    hf_to_megatron(source, tmp_path / "m", Layout(2), fp32=True).run()
    megatron_to_hf(tmp_path / "m", tmp_path / "fp32").run()
    for name, tensor in read(tmp_path / "fp32").items():
        assert_same_bits(tensor, read(source)[name].float(), name)
    assert HfCheckpoint(tmp_path / "fp32").config["dtype"] == "float32"
    bf16_to_fp8(source, tmp_path / "fp8").run()
    hf_to_megatron(tmp_path / "fp8", tmp_path / "n", Layout(2)).run()
    megatron_to_hf(tmp_path / "n", tmp_path / "bf16").run()
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "expected").run()
    assert_same(tmp_path / "bf16", tmp_path / "expected")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Megatron's process groups with a single rank."""
    if torch.cuda.is_available():
        pytest.skip("the stock model on CPU; with a GPU Megatron would move parts of it there")
    from megatron.core import parallel_state

    if dist.is_initialized():  # left by another test package of the same session
        shutdown()
    cpu_shim.install()
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    yield Ranks(0, 1, 0, 1, 0, 1, 0, 1)
    shutdown()


def sharded_state(model: Any) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_megatron_loads_it(tmp_path: Path, one_rank: Ranks, models: Models, family: str) -> None:
    """`dist_checkpointing.load` into stock Megatron-Core's own model, at another TP size than it was written for, and
    strict about names: every parameter has the bits that the rules give it."""
    from megatron.core import dist_checkpointing

    source = models(family)
    hf_to_megatron(source, tmp_path / "m", Layout(4, 2)).run()
    checkpoint = HfCheckpoint(source)
    plan = ConversionPlan(ModelDims.from_hf(checkpoint.config))
    model = stock_gpt_model(plan.dims).bfloat16()
    loaded = dist_checkpointing.load({"model": sharded_state(model)}, str(tmp_path / "m"), strict="raise_unexpected")
    model.load_state_dict(loaded["model"])
    for name, parameter in model.named_parameters():
        rule = plan.rule_for(name)
        expected = rule.to_megatron([checkpoint.tensor(hf.name) for hf in rule.hf], 1)[0]
        assert_same_bits(parameter.detach(), expected, name)


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3-tied"])
def test_our_model_loads_and_saves_it(tmp_path: Path, one_rank: Ranks, models: Models, name: str) -> None:
    """The trainer's model loads a converted checkpoint, with our reader and with Megatron's, to the bits that it loads
    from HF, and what Megatron's own save writes of it converts back to HF."""
    from megatron.core import dist_checkpointing

    source = models(name)
    hf_to_megatron(source, tmp_path / "m", Layout(2, 2)).run()
    checkpoint = HfCheckpoint(source)
    policy, ours, expected = (build(checkpoint, one_rank) for _ in range(3))
    load_hf(expected, checkpoint)
    load_megatron(ours, MegatronCheckpoint(tmp_path / "m"))
    loaded = dist_checkpointing.load({"model": sharded_state(policy.models[0])}, str(tmp_path / "m"))
    policy.models[0].load_state_dict(loaded["model"])
    for loaded_by in (policy, ours):
        pairs = zip(loaded_by.models[0].parameters(), expected.models[0].named_parameters(), strict=True)
        for parameter, (key, other) in pairs:
            assert_same_bits(parameter.detach(), other.detach(), key)
    (tmp_path / "saved").mkdir()
    dist_checkpointing.save({"model": sharded_state(policy.models[0])}, str(tmp_path / "saved"))
    megatron_to_hf(tmp_path / "saved", tmp_path / "hf", hf_config=source).run()
    assert_same(tmp_path / "hf", source)


def build(checkpoint: HfCheckpoint, ranks: Ranks) -> Policy:
    precision = LinearPrecision(True, Fp8Recipe())
    return build_policy(ModelDims.from_hf(checkpoint.config), ParallelConfig(), ranks, precision)


def test_bad_megatron_checkpoints_are_named(tmp_path: Path, models: Models) -> None:
    """A truncated or missing file, another vocabulary, other layers, other sizes."""
    source, good = models("qwen3"), tmp_path / "m"
    hf_to_megatron(source, good, Layout(2)).run()
    out = tmp_path / "out"
    cases = {
        ('"vocab_size": 509', '"vocab_size": 512'): r"embedding.*shape \[510, 256\]; rule: \[512, 256\]",
        ('"num_hidden_layers": 4', '"num_hidden_layers": 5'): r"input_layernorm.weight: shape \[4, 256\]; rule: \[5",
        ('"model_type": "qwen3"', '"model_type": "qwen2"'): r"k_layernorm.weight has no rule \(2 such tensors\)",
        ('"tie_word_embeddings": false', '"tie_word_embeddings": true'): r"output_layer.weight has no rule",
        ('"model_type": "qwen3"', '"model_type": "gpt9"'): r"gpt9.*use one of \['llama', 'qwen2', 'qwen3'",
    }
    for (old, new), message in cases.items():
        config = tmp_path / "config"
        shutil.copytree(good / "hf", config, dirs_exist_ok=True)
        text = (config / "config.json").read_text()
        assert old in text
        (config / "config.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            megatron_to_hf(good, out, hf_config=config)
    with pytest.raises(ValueError, match=r"tensor_parallel: 8; rule: must divide num_key_value_heads \(4\)"):
        hf_to_megatron(source, out, Layout(8)).run()
    with pytest.raises(ValueError, match=r"pp: 3; rule: divides num_hidden_layers \(4\); fix: use one of \[1, 2, 4\]"):
        reshard(good, out, Layout(1, 3)).run()
    with pytest.raises(ValueError, match=r"ep: 2; rule: divides num_experts \(1\)"):
        reshard(good, out, Layout(1, 1, 2)).run()
    file = good / "__2_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"__2_0.distcp: decoder.layers.* is not readable"):
        megatron_to_hf(good, out).run()
    file.unlink()
    with pytest.raises(ValueError, match=r"__2_0.distcp: .* is not readable"):
        megatron_to_hf(good, out).run()
    (good / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r".metadata: not readable"):
        megatron_to_hf(good, out)
    (good / ".metadata").unlink()
    with pytest.raises(ValueError, match=r".metadata: missing"):
        megatron_to_hf(good, out)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
