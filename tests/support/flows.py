"""Precision-flow graphs written by hand: a small decoder of three layers."""

from __future__ import annotations

from dataclasses import replace

from jetrl_megatron.ops.precision_flow import Edge, Graph, Node

FP8 = ("1x128", "fp32", "ours")


def node(operator: str, module: str, out: str, **inputs: str) -> Node:
    """inputs: dtype by tensor name."""
    edges = [Edge(name, "input", dtype) for name, dtype in inputs.items()]
    return Node(operator, module, "forward", "compiled", (*edges, Edge("y", "output", out)))


def linear(module: str, precision: tuple[str, str, str] | None) -> Node:
    """precision: granularity, scale format and quantizer of the activation; None: BF16."""
    if precision is None:
        return node("linear", module, x="bfloat16", weight="bfloat16", out="bfloat16")
    x, y = Edge("x", "input", "bfloat16"), Edge("y", "output", "bfloat16")
    weight = Edge("weight", "input", "float8_e4m3fn", "128x128", *precision[1:])
    inside = Edge("x", "internal", "float8_e4m3fn", *precision)
    return Node("fp8_linear", module, "forward", "compiled", (x, weight, inside, y))


def decoder(side: str, precision: tuple[str, str, str] | None = FP8, backward: bool = False) -> Graph:
    """backward: with saved activations, recompute and backward, as training records them."""
    nodes = [node("embedding", "model.embed_tokens", weight="bfloat16", out="bfloat16")]
    for i in range(3):
        layer = f"model.layers.{i}"
        nodes += [
            node("rmsnorm", f"{layer}.input_layernorm", x="bfloat16", weight="bfloat16", out="bfloat16"),
            linear(f"{layer}.self_attn.qkv_proj", precision),
            node("attention", f"{layer}.self_attn", q="bfloat16", k="bfloat16", v="bfloat16", out="bfloat16"),
            node("swiglu", f"{layer}.mlp", gate_up="bfloat16", out="bfloat16"),
            linear(f"{layer}.mlp.down_proj", precision),
            node("residual_add", layer, x="bfloat16", residual="bfloat16", out="bfloat16"),
        ]
    nodes.append(node("lm_head", "lm_head", x="bfloat16", weight="bfloat16", out="float32"))
    nodes.append(node("logprob", "lm_head", logits="float32", out="float32"))
    if backward:
        rest: list[Node] = []
        saved = [replace(n, edges=(*n.edges, Edge("x", "saved", "bfloat16"))) for n in nodes]
        for n in saved[::-1]:
            again = [replace(n, phase="recompute")] if ".mlp" in n.module else []
            rest += [*again, replace(n, phase="backward", edges=(Edge("dy", "input", "bfloat16"),))]
        nodes = [*saved, *rest]
    return Graph(side, tuple(nodes))
