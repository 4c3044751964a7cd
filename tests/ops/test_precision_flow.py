"""The comparison of precision-flow graphs, on graphs written by hand: each fault is caught and named, no other is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jetrl_megatron.ops.precision_flow import Edge, Graph, Node, compare, describe
from tests.support.flows import FP8, decoder, linear, node


def test_same_flow_is_a_subgraph() -> None:
    """Rollout without saved activations, recompute and backward is part of training, however the modules are ordered
    among each other."""
    training, prefill = decoder("training", backward=True), decoder("prefill")
    assert {n.phase for n in training.nodes} == {"forward", "recompute", "backward"}
    assert compare(training, prefill) == []
    assert compare(training, replace(prefill, nodes=tuple(sorted(prefill.nodes, key=lambda n: n.module)))) == []


def test_bf16_training_with_fp8_rollout() -> None:
    """Every linear is named, once for all layers, with what it multiplies on either side."""
    lines = describe(compare(decoder("training", precision=None), decoder("prefill")))
    where = "model.layers.*.mlp.down_proj (layers 0-2)"
    fp8 = "float8_e4m3fn 128x128 fp32 ours"
    assert f"{where}: the operator is linear in training, fp8_linear in prefill" in lines
    assert f"{where}: linear or fp8_linear: weight entering is bfloat16 in training, {fp8} in prefill" in lines
    assert {line.split(" ")[0] for line in lines} == {
        "model.layers.*.self_attn.qkv_proj",
        "model.layers.*.mlp.down_proj",
    }


@pytest.mark.parametrize(
    ("change", "training", "rollout"),
    [
        ({"granularity": "row"}, "float8_e4m3fn row fp32 ours", "float8_e4m3fn 1x128 fp32 ours"),
        ({"scale_format": "pow2"}, "float8_e4m3fn 1x128 pow2 ours", "float8_e4m3fn 1x128 fp32 ours"),
        ({"quantizer": "theirs"}, "float8_e4m3fn 1x128 fp32 theirs", "float8_e4m3fn 1x128 fp32 ours"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_quantization_of_the_activation(change: dict[str, str], training: str, rollout: str) -> None:
    """Granularity, scale format or quantizer of one edge of one layer: that edge is named, nothing else."""
    module = "model.layers.1.mlp.down_proj"
    changed = _with_edge(decoder("training"), module, "x", "internal", **change)
    prefill, decode = decoder("prefill"), decoder("decode")
    assert describe([*compare(changed, prefill), *compare(changed, decode)]) == [
        f"model.layers.*.mlp.down_proj (layers 1): fp8_linear: x inside is {training} in training, "
        f"{rollout} in prefill and decode"
    ]


def _with_edge(graph: Graph, module: str, tensor: str, role: str, **change: str) -> Graph:
    def edge(e: Edge) -> Edge:
        return replace(e, **change) if (e.tensor, e.role) == (tensor, role) else e  # type: ignore[arg-type]

    nodes = [replace(n, edges=tuple(map(edge, n.edges))) if n.module == module else n for n in graph.nodes]
    assert tuple(nodes) != graph.nodes
    return replace(graph, nodes=tuple(nodes))


def _replaced(graph: Graph, module: str, *nodes: Node) -> Graph:
    kept = [n for n in graph.nodes if n.module != module]
    assert len(kept) < len(graph.nodes)
    return replace(graph, nodes=(*kept, *nodes))


def test_engine_layer_left_unquantized() -> None:
    """A stock layer in the engine is named with its class."""
    module = "model.layers.2.self_attn.qkv_proj"
    stock = node("stock QKVParallelLinear", module, x="bfloat16", weight="bfloat16", out="bfloat16")
    lines = describe(compare(decoder("training"), _replaced(decoder("decode"), module, stock)))
    where = "model.layers.*.self_attn.qkv_proj (layers 2)"
    assert f"{where}: the operator is fp8_linear in training, stock QKVParallelLinear in decode" in lines
    assert all(line.startswith(where) for line in lines)


@pytest.mark.parametrize("side", ["training", "prefill"])
def test_router_quantized_by_mistake(side: str) -> None:
    """An expert router in FP8 on one side. The comparison knows nothing of routers: any module is compared."""
    module = "model.layers.1.mlp.gate"
    router = node("router", module, x="bfloat16", weight="bfloat16", out="float32")
    graphs = {s: replace(decoder(s), nodes=(*decoder(s).nodes, router)) for s in ("training", "prefill")}
    assert compare(*graphs.values()) == []
    graphs[side] = _replaced(graphs[side], module, linear(module, FP8))
    lines = describe(compare(*graphs.values()))
    operators = ("fp8_linear", "router") if side == "training" else ("router", "fp8_linear")
    where = "model.layers.*.mlp.gate (layers 1)"
    assert lines[0] == f"{where}: the operator is {operators[0]} in training, {operators[1]} in prefill"
    assert all(line.startswith(where) for line in lines)


def test_operator_that_only_one_side_runs() -> None:
    """Left out on either side, or run twice: a difference, since the functions differ."""
    training, prefill = decoder("training"), decoder("prefill")
    without = replace(prefill, nodes=tuple(n for n in prefill.nodes if n.operator != "swiglu"))
    where = "model.layers.*.mlp (layers 0-2): the operator is"
    assert describe(compare(training, without)) == [f"{where} swiglu in training, absent in prefill"]
    less = replace(training, nodes=tuple(n for n in training.nodes if n.operator != "swiglu"))
    assert describe(compare(less, prefill)) == [f"{where} absent in training, swiglu in prefill"]
    twice = replace(prefill, nodes=(*prefill.nodes, prefill.nodes[-1]))
    assert describe(compare(training, twice)) == ["lm_head: the operator is absent in training, logprob in prefill"]


def test_order_inside_a_module_matters() -> None:
    """A norm after rope instead of before it is another function."""
    a, b = (node(name, "model.layers.0.self_attn", x="bfloat16", out="bfloat16") for name in ("rmsnorm", "rope"))
    assert compare(Graph("training", (a, b)), Graph("prefill", (a, b))) == []
    assert compare(Graph("training", (a, b)), Graph("prefill", (b, a))) != []


def test_merged_pipeline_stages() -> None:
    """Stages give the graph of one rank: forward first to last, backward last to first."""
    whole = decoder("training", backward=True)
    stages = [
        Graph(
            "training",
            tuple(n for n in whole.nodes if (n.module.startswith(("model.layers.0", "model.embed"))) == first),
        )
        for first in (True, False)
    ]
    assert Graph.merged("training", stages) == whole


def test_json_round_trip() -> None:
    """The file holds the graph; another schema is refused with key, value, rule and fix."""
    graph = decoder("training", backward=True)
    data = json.loads(json.dumps(graph.to_json()))
    assert Graph.from_json(data) == graph
    with pytest.raises(ValueError, match=r"schema: 'other/9'; rule: jetrl-precision-flow/1; fix"):
        Graph.from_json({**data, "schema": "other/9"})
