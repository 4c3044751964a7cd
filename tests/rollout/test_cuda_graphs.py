"""Decoding through CUDA graphs, without CUDA: SGLang's graph runner replays a recorded decode step of our operators on
the Triton kernel set, in Triton's interpreter (`graphed.py`, `tests/support/recorded_graph.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.fp8 import Fp8Format, compact_weight_scale, quantize_weight
from jetrl_megatron.rollout.engine import EngineSpec
from jetrl_megatron.rollout.environment import engine_environment
from jetrl_megatron.weights.bundle import write_bundle
from jetrl_megatron.weights.io import HfCheckpoint
from jetrl_megatron.weights.plan import ConversionPlan
from tests.support.models import tiny_model
from tests.support.recorded_graph import CaptureError, RecordedGraph

ROOT = Path(__file__).parents[2]
DIMS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1100,  # three segments of keys: decode is split
}
MOE_DIMS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def bundle_tensors(model_dir: Path, fp8: bool) -> Iterator[tuple[str, Tensor]]:
    checkpoint = HfCheckpoint(model_dir)
    plan = ConversionPlan(ModelDims.from_hf(checkpoint.config))
    quantized = set(plan.quantized_hf_names()) if fp8 else set()
    for name in plan.hf_names():
        tensor = checkpoint.tensor(name)
        if name not in quantized:
            yield name, tensor
            continue
        weight = quantize_weight(tensor, Fp8Format())
        yield name, weight.data
        yield f"{name}_scale_inv", compact_weight_scale(weight.scale)


def graphed(factory: pytest.TempPathFactory, out: Path, family: str, precision: str, thorough: bool) -> dict[str, Any]:
    """What `graphed.py` found."""
    dims = {**DIMS, **(MOE_DIMS if family == "qwen3_moe" else {}), "num_hidden_layers": 2 if thorough else 1}
    models = [tiny_model(factory, family, seed, **dims) for seed in (0, 1)]
    bundles = [
        write_bundle(out / f"version-{i}", i, bundle_tensors(model, precision == "fp8"), bucket_bytes=1 << 20)
        for i, model in enumerate(models)
    ]
    quantization = {
        "quant_method": f"jetrl_{precision}",
        "granularity": "block",
        "scale_format": "fp32",
        "tp_invariant": False,
        "backend": "triton",
    }
    config = json.loads((models[0] / "config.json").read_text())
    (models[0] / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    environment = {**engine_environment(1, 1), "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)])
    script = str(Path(__file__).with_name("graphed.py"))
    command = [script, str(models[0]), f"jetrl_{precision}", *(str(bundle.path) for bundle in bundles)]
    command += [str(int(thorough)), str(out)]
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(out / "found.pt")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("qwen3", "fp8"), ("qwen3", "bf16"), ("qwen3_moe", "fp8")])
def test_a_replayed_decode_step_is_the_eager_one(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str, precision: str
) -> None:
    """One captured step, replayed with other tokens, positions, lengths, slots, requests and numbers of padded rows,
    gives the eager logits bit for bit, after a weight update too; the update moved no tensor that a step reads. While
    operators are recorded or timed the graph is not used. Controls: a lookup that reads a length is refused in the
    capture, and weights prepared in other memory are not seen by a replay (thorough, with keys in two segments)."""
    thorough = (family, precision) == ("qwen3", "fp8")
    found = graphed(tmp_path_factory, tmp_path, family, precision, thorough)
    assert set(found["steps"]) == {"3 of 4 rows", "the next tokens", "2 other rows", "new weights"}
    for name, (eager, replayed) in found["steps"].items():
        assert eager.isfinite().all()
        assert torch.equal(eager, replayed), name
    assert not torch.equal(found["steps"]["2 other rows"][0], found["steps"]["new weights"][0])
    assert found["moved"] == 0
    assert found["num_inputs"] > 15
    assert found["num_operations"] > 30
    for used, operators in found["watched"].values():
        assert not used
        assert operators >= 6
    if thorough:
        assert "the host would wait for the device" in found["controls"]["a growing rope table"]
        assert not torch.equal(*found["controls"]["weights in other memory"])


@pytest.mark.parametrize(
    ("change", "backend"), [({}, "full"), ({"cuda_graphs": False}, "disabled"), ({"tensor_parallel": 2}, "full")]
)
def test_which_engines_capture(tmp_path: Path, change: dict[str, Any], backend: str) -> None:
    """Those where the run asks for graphs; prefill never. On the CPU SGLang is told nothing of graphs."""
    spec = EngineSpec(tmp_path, "jetrl_fp8", 1, 8, 1024, 64, 0.3, 1, 0, tmp_path / "log", first_gpu=0, cuda_graphs=True)
    args = replace(spec, **change).server_args()
    assert args["cuda_graph_backend_decode"] == backend
    assert args["cuda_graph_backend_prefill"] == "disabled"
    on_cpu = replace(spec, first_gpu=None, **change).server_args()
    assert not [key for key in on_cpu if "graph" in key]


X = torch.tensor([1.0, -2.0, 3.0])


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.max().item(),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.bincount(x.long().abs()),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x.long().abs()),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    ],
)
def test_the_recorder_refuses_what_a_capture_refuses(reads: Any) -> None:
    """Whatever makes the host wait for the device, or copies from it."""
    x = X.clone()
    with pytest.raises(CaptureError), RecordedGraph().capture():
        reads(x)


def test_the_recorder_does_it_again() -> None:
    """Views, in-place operators, new tensors and constants, on other values in the same memory: the results are where
    they were, and host values are those of the capture."""
    x, total, host = X.clone(), torch.zeros(3), 2.0

    def step() -> tuple[Tensor, Tensor]:
        doubled = x.view(3, 1) * host
        total.add_(doubled.squeeze(1))
        rows = torch.zeros(2, 3)
        rows[1] = doubled.flatten().flip(0) + torch.arange(3)
        return rows, rows.sum(1, keepdim=True).t()

    graph = RecordedGraph()
    with graph.capture():
        rows, sums = step()
    x.copy_(torch.tensor([5.0, 6.0, 7.0]))
    host = 100.0
    graph.replay()
    assert torch.equal(rows, torch.tensor([[0.0, 0, 0], [14, 13, 12]]))
    assert torch.equal(sums, torch.tensor([[0.0, 39]]))
    assert torch.equal(total, torch.tensor([12.0, 8, 20]))
    assert {x.untyped_storage().data_ptr(), total.untyped_storage().data_ptr()} == graph.inputs
