"""Negative controls on one real engine: unequal precision flows are named, and every unshared operator shows.

The engine generates once; the trainer is then altered, one thing at a time, and scores the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Tensor, emulated, gemm_nt, quantize_rows
from jetrl_megatron.fp8.gemm import PreparedWeight
from jetrl_megatron.ops.precision_flow import Graph, describe
from jetrl_megatron.rollout.engine import Completion
from jetrl_megatron.trainer.precision_flow import judge
from tests.support.engines import (
    engine,
    engine_logprobs,
    prompts,
    publish,
    requests,
    rollout_flow,
    trainer_logprobs,
    training_flow,
)
from tests.support.models import tiny_model
from tests.support.trainer import load_policy

pytestmark = pytest.mark.slow
TEMPERATURE = 0.8
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
FP8 = "float8_e4m3fn 128x128 fp32 amax448-rne"


@dataclass(frozen=True)
class Rollout:
    """What the FP8 engine did: its graphs, and completions of prompts by the weights of `model_dir`."""

    model_dir: Path
    graphs: list[Graph]
    token_ids: list[tuple[int, ...]]
    completions: list[Completion]

    def mismatch(self, policy: Any) -> float:
        """max |dlogp| over all response tokens."""
        ours = trainer_logprobs(policy, self.token_ids, self.completions, TEMPERATURE)
        theirs = engine_logprobs(self.completions)
        assert len(theirs) > 300
        return float((ours - theirs).abs().max())


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    return _roll_out(tiny_model(tmp_path_factory, "qwen3"), tmp_path_factory.mktemp("engine"), "fp8")


def _roll_out(model_dir: Path, work_dir: Path, precision: str) -> Rollout:
    policy = load_policy(model_dir, fp8=precision == "fp8")
    ids = prompts(policy.dims.vocab_size, count=16, longest=100)
    with engine(model_dir, work_dir, precision) as pool:
        pool.load_weights(publish(policy, work_dir, version=0, fp8=precision == "fp8"))
        completions = pool.generate(requests(ids, TEMPERATURE))
        graphs = rollout_flow(pool)
        again = pool.generate(requests(ids, TEMPERATURE))
    assert not (work_dir / "engine.flow").exists()
    assert [c.logprobs for c in again] == [c.logprobs for c in completions]  # recording changed nothing
    return Rollout(model_dir, graphs, ids, completions)


def test_graphs_of_a_real_engine(rollout: Rollout) -> None:
    """Prefill and decode run every operator of every layer once; with one recipe on both sides, rollout is a subgraph
    and training has more: saved activations and the backward."""
    assert [graph.side for graph in rollout.graphs] == ["prefill", "decode"]
    for graph in rollout.graphs:
        assert {node.phase for node in graph.nodes} == {"forward"}
        assert [node.operator for node in graph.forward()["model.layers.1.self_attn"]] == ["rope", "rope", "attention"]
        assert [node.operator for node in graph.forward()["model.layers.1"]] == ["residual_add", "residual_add"]
        assert sum(node.operator == "fp8_linear" for node in graph.nodes) == 2 * len(LINEARS)
        assert not any(node.operator.startswith("stock") for node in graph.nodes)
    (training,) = training_flow(load_policy(rollout.model_dir, fp8=True))
    assert describe(judge([training], rollout.graphs)) == []
    modules = {node.module for node in training.nodes if node.phase == "backward"}
    assert {f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS} <= modules
    assert all(node.edges_of("saved") for node in training.forward()["model.layers.0.mlp.down_proj"])


@pytest.mark.parametrize(
    ("fp8", "fmt", "found"),
    [
        (
            False,
            Fp8Format(),
            f"linear or fp8_linear: weight entering is bfloat16 in training, {FP8} in prefill and decode",
        ),
        (
            True,
            Fp8Format("channel"),
            "fp8_linear: x inside is float8_e4m3fn row fp32 amax448-rne in training, "
            "float8_e4m3fn 1x128 fp32 amax448-rne in prefill and decode",
        ),
        (
            True,
            Fp8Format("block", "pow2"),
            f"fp8_linear: weight entering is float8_e4m3fn 128x128 pow2 amax448-rne in training, {FP8} in prefill and "
            "decode",
        ),
    ],
    ids=["bf16-training", "granularity", "scale-format"],
)
def test_unequal_recipes_are_named(rollout: Rollout, fp8: bool, fmt: Fp8Format, found: str) -> None:
    """A trainer of another precision, granularity or scale format against the FP8 engine: every linear is named,
    nothing but linears is, and the log-probs do differ."""
    policy = load_policy(rollout.model_dir, fp8, Fp8Recipe(fmt))
    lines = describe(judge(training_flow(policy), rollout.graphs))
    for name in LINEARS:
        assert f"model.layers.*.{name} (layers 0-1): {found}" in lines
    assert {line.split(" ")[0] for line in lines} == {f"model.layers.*.{name}" for name in LINEARS}
    assert rollout.mismatch(policy) > 1e-4


# ------------------------------------------------------------------------------------------------ unshared operators
Patch = Callable[[pytest.MonkeyPatch], None]


def _operator(name: str, stock: Callable[..., Tensor]) -> Patch:
    return lambda patch: patch.setattr(ops, name, stock)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float, _fmt: object = None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rope(x: Tensor, positions: Tensor, table: ops.RopeTable) -> Tensor:
    """Hugging Face: cos and sin rounded to bf16, products in bf16."""
    cos, sin = (torch.cat([t, t], -1).to(x.dtype).unsqueeze(-2) for t in table.lookup(positions))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _swiglu(gate_up: Tensor, _fmt: object = None) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], scale: float) -> Tensor:
    parts = []
    for start, end in pairwise(cu_seqlens):
        heads = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
        o = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(o[0].transpose(0, 1))
    return torch.cat(parts)


def _lm_head(x: Tensor, master: Tensor, _weight: Any) -> Tensor:
    return F.linear(x.float(), master.float())


def _logprob(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits / temperature, -1).gather(-1, targets[:, None]).squeeze(-1)


def _fp32_linear(x: Tensor, _master: Tensor, weight: Any, *_how: Any, **_ranks: Any) -> Tensor:
    """The same FP8 bytes and scales, multiplied in fp32 by BLAS in an order of its own."""
    quantized = quantize_rows(x.flatten(0, -2), weight.quantized.format)
    y = F.linear(quantized.dequantize(), weight.quantized.dequantize())
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def _other_order(patch: pytest.MonkeyPatch) -> None:
    """One chain over all of K instead of the segment tree."""
    ours = ops.fp8_linear
    patch.setattr(ops, "fp8_linear", lambda x, master, weight, recipe, *_, **_ranks: ours(x, master, weight, recipe))


def _other_quantizer(patch: pytest.MonkeyPatch) -> None:
    """x / scale instead of x * RN(1 / scale), as vLLM and DeepSeek-V3 do."""

    def divide(x: Tensor, b: PreparedWeight, num_segments: int, dtype: torch.dtype, _found: Fp8Tensor | None) -> Any:
        made = quantize_rows(x, b.format)
        scale = made.scale.repeat_interleave(128, dim=1)[:, : x.shape[1]]
        data = (x.float() / scale).clamp(-448, 448).to(made.data.dtype)
        quantized = replace(made, data=data, quantizer="divide")
        return gemm_nt(quantized, b, num_segments).to(dtype), quantized

    patch.setattr(emulated, "quantized_matmul", divide)


# name: (alteration of the trainer, modules that the graph must name, largest mismatch that it may cause). Seen: logprob
# 4.8e-7, lm_head 9.5e-7, order of a sum 0.11, the others .16 to .36.
UNSHARED: dict[str, tuple[Patch, tuple[str, ...], float]] = {
    "rmsnorm": (_operator("rmsnorm", _rmsnorm), ("model.layers.*.input_layernorm", "model.norm"), 1.0),
    "rope": (_operator("rope", _rope), ("model.layers.*.self_attn",), 1.0),
    "attention": (_operator("packed_attention", _attention), ("model.layers.*.self_attn",), 1.0),
    "swiglu": (_operator("swiglu", _swiglu), ("model.layers.*.mlp",), 1.0),
    "lm_head": (_operator("lm_head", _lm_head), ("lm_head",), 1e-4),
    "logprob": (_operator("logprob", _logprob), ("lm_head",), 1e-5),
    "fp8_linear": (_operator("fp8_linear", _fp32_linear), tuple(f"model.layers.*.{n}" for n in LINEARS), 1.0),
    "quantizer": (_other_quantizer, tuple(f"model.layers.*.{n}" for n in LINEARS), 1.0),
    "order of a sum": (_other_order, (), 1.0),  # no edge differs: only the log-probs tell
}


@pytest.mark.parametrize("name", UNSHARED)
def test_unsharing_one_operator_breaks_exactness(rollout: Rollout, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Shared, the mismatch is exactly 0.0. With one operator in stock torch, or one rule changed, it is not, and the
    graph names the modules, wherever what differs is a precision or an operator."""
    policy = load_policy(rollout.model_dir, fp8=True)
    assert rollout.mismatch(policy) == 0.0
    alter, modules, largest = UNSHARED[name]
    alter(monkeypatch)
    assert 0.0 < rollout.mismatch(policy) < largest
    lines = describe(judge(training_flow(policy), rollout.graphs))
    assert set(modules) <= {line.split(" ")[0].rstrip(":") for line in lines}
    assert bool(lines) == bool(modules)


def test_unsharing_the_bf16_linear_breaks_exactness(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BF16 on both sides, too: stock F.linear instead of the exact one."""
    dims = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model_dir = tiny_model(tmp_path_factory, "qwen2", **dims)
    rollout = _roll_out(model_dir, tmp_path_factory.mktemp("engine"), "bf16")
    policy = load_policy(model_dir, fp8=False)
    assert rollout.mismatch(policy) == 0.0
    assert describe(judge(training_flow(policy), rollout.graphs)) == []
    monkeypatch.setattr(ops, "linear", lambda x, master, *_: F.linear(x, master))
    assert 0.0 < rollout.mismatch(policy) < 1.0
    lines = describe(judge(training_flow(policy), rollout.graphs))
    where = "model.layers.*.self_attn.qkv_proj (layers 0-1)"
    assert f"{where}: the operator is absent in training, linear in prefill and decode" in lines
