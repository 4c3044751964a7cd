"""The precision-flow recorder writes down what really ran."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Weight, quantize_weight, whole
from jetrl_megatron.fp8.format import QUANTIZER
from jetrl_megatron.ops.kernels import kernels
from jetrl_megatron.ops.recorder import Edge, Node, attach, record, recording

FORMATS = (Fp8Format(), Fp8Format("channel"), Fp8Format("block", "pow2"))


class Block(nn.Module):
    """A norm, an FP8 linear and a stock linear inside, named as our model would."""

    def __init__(self, fmt: Fp8Format) -> None:
        super().__init__()
        self.norm = Applied(lambda x, w: ops.rmsnorm(x, w[0], 1e-6))
        self.helper = nn.Sequential(Applied(self._linear), nn.Identity())
        self.stock = nn.Linear(32, 8, dtype=torch.bfloat16)
        self.recipe = Fp8Recipe(fmt)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        fp8 = Fp8Weight.of(quantize_weight(weight, self.recipe.format), whole(32))
        return ops.fp8_linear(x, weight, fp8, self.recipe)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stock(self.helper(self.norm(x)))
        return y


class Applied(nn.Module):
    """function(x, weight) with a weight [32, 128] of its own."""

    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 128).bfloat16())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x, self.weight)
        return y


def fp8_linear(x: Tensor, w: Tensor, recipe: Fp8Recipe) -> Tensor:
    return ops.fp8_linear(x, w, Fp8Weight.of(quantize_weight(w, recipe.format), whole(len(w))), recipe)


def test_records_operators_modules_and_edges() -> None:
    """Each node has its operator, the canonical path of the nearest named module, and the precision of what enters,
    what is multiplied and what leaves; a module that runs none of our operators is named after its class."""
    root = nn.Module()
    root.block = Block(Fp8Format("block", "pow2"))
    names = {"block": "model.layers.0", "block.norm": "model.layers.0.input_layernorm", "block.helper.0": "qkv"}
    with attach(root, names.get), record() as nodes, torch.no_grad():
        root.block(torch.randn(3, 128).bfloat16())
        ops.lm_head(torch.ones(1, 128).bfloat16(), torch.ones(4, 128).bfloat16(), _exact(torch.ones(4, 128).bfloat16()))
    assert [(n.operator, n.module) for n in nodes] == [
        ("rmsnorm", "model.layers.0.input_layernorm"),
        ("fp8_linear", "qkv"),
        ("stock Linear", "block.stock"),  # no canonical name: its own path, so that it cannot hide
        ("lm_head", ""),
    ]
    assert nodes[1].edges == (
        Edge("x", "input", "bfloat16"),
        Edge("weight", "input", "float8_e4m3fn", "128x128", "pow2", QUANTIZER),
        Edge("x", "internal", "float8_e4m3fn", "1x128", "pow2", QUANTIZER),
        Edge("accumulator", "internal", "float32"),
        Edge("y", "output", "bfloat16"),
    )
    assert nodes[3].edges_of("output") == (Edge("y", "output", "float32"),)
    assert {n.kernels for n in nodes} == {kernels().__name__.rsplit(".", 1)[-1], "stock"}
    with record() as after, torch.no_grad():
        root.block(torch.randn(3, 128).bfloat16())
    assert {n.module for n in after} == {""}


def _exact(weight: Tensor) -> ops.ExactWeight:
    return ops.ExactWeight.of(weight)


def test_off_by_default_and_nested() -> None:
    """Nothing is kept outside `record()`; nested recordings both see the nodes inside."""
    x, w = torch.randn(2, 8).bfloat16(), torch.ones(8).bfloat16()
    assert not recording()
    ops.rmsnorm(x, w, 1e-6)
    with record() as outer:
        ops.swiglu(x)
        with record() as inner:
            ops.rmsnorm(x, w, 1e-6)
    ops.swiglu(x)
    assert [n.operator for n in outer] == ["swiglu", "rmsnorm"]
    assert [n.operator for n in inner] == ["rmsnorm"]
    assert not recording()


def test_a_module_that_raises_leaves_the_stack_clean() -> None:
    """After an exception inside a module later operators are not attributed to it, and the failed one is no node."""

    def fail(x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(x, weight, None)  # type: ignore[arg-type]

    root = nn.Module()
    root.bad = Applied(fail)
    with attach(root, {"bad": "model.bad"}.get), record() as nodes:
        with pytest.raises(AttributeError):
            root.bad(torch.ones(7).bfloat16())
        ops.swiglu(torch.ones(1, 4).bfloat16())
    assert [(n.operator, n.module) for n in nodes] == [("swiglu", "")]


def test_every_precision_is_told_apart() -> None:
    """Negative control: recordings of FP8, another granularity, another scale format and BF16 all differ."""
    x, w = torch.randn(2, 128).bfloat16(), torch.randn(8, 128).bfloat16()
    seen = []
    for fmt in (*FORMATS, None):
        with record() as nodes:
            if fmt is None:
                ops.linear(x, w, _exact(w))
            else:
                fp8_linear(x, w, Fp8Recipe(fmt))
        seen.append(tuple(nodes))
    assert len(set(seen)) == 4
    assert not any(edge.dtype.startswith("float8") for edge in seen[3][0].edges)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_backward_of_a_linear(precision: str) -> None:
    """DGrad and WGrad are recorded with what they multiply; the saved activation at its forward node; gradients at the
    module of the forward, though no module runs any more."""
    fp8 = precision == "fp8"
    recipe = Fp8Recipe(dgrad=precision, wgrad=precision, saved_activation="columnwise" if fp8 else "bf16")  # type: ignore[arg-type]
    root = nn.Module()
    root.linear = Applied(lambda x, w: fp8_linear(x, w, recipe))
    root.linear.weight.main_grad = torch.zeros(32, 128)
    x = torch.randn(128, 128).bfloat16().requires_grad_()
    with record() as nodes:
        with attach(root, {"linear": "model.linear"}.get):
            y = root.linear(x)
        y.sum().backward()
    forward, backward = nodes
    assert (backward.operator, backward.module, backward.phase) == ("fp8_linear", "model.linear", "backward")
    quantized = ("float8_e4m3fn", "1x128", "fp32", QUANTIZER)
    bf16 = ("bfloat16", None, None, None)
    (saved,) = forward.edges_of("saved")
    assert (saved.tensor, saved.precision) == (("x along tokens", quantized) if fp8 else ("x", bf16))
    inside = {edge.tensor: edge.precision for edge in backward.edges_of("internal")}
    weight = ("float8_e4m3fn", "128x128", "fp32", QUANTIZER)
    operands = ("dy of DGrad", "dy of WGrad", "x of WGrad")
    assert inside == {**dict.fromkeys(operands, quantized if fp8 else bf16), "weight of DGrad": weight if fp8 else bf16}
    outputs = {edge.tensor: edge.dtype for edge in backward.edges_of("output")}
    assert outputs == {"dx": "bfloat16", "dweight": "float32"}


def test_recomputed_forward_is_its_own_phase() -> None:
    """Activation recompute runs the forward again inside backward: marked, so that the forward graph stays one pass."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 8).bfloat16().requires_grad_()
    with record() as nodes:
        checkpoint(ops.swiglu, x, use_reentrant=True).sum().backward()
    assert [(n.operator, n.phase) for n in nodes] == [
        ("swiglu", "forward"),
        ("swiglu", "recompute"),
        ("swiglu", "backward"),
    ]
    assert [bool(n.edges_of("saved")) for n in nodes] == [False, True, False]


def test_sequences_of_weights_are_one_node() -> None:
    """Experts: an operator that takes a list of FP8 weights has each precision once, and its masters are no edge."""
    from jetrl_megatron.ops.recorder import operator

    @operator("grouped")
    def grouped(x: Tensor, masters: list[Tensor], weights: list[Fp8Weight]) -> Tensor:
        parts = [fp8_linear(x, master, Fp8Recipe()) for master in masters]
        return torch.cat(parts)

    w = torch.randn(8, 128).bfloat16()
    quantized = [Fp8Weight.of(quantize_weight(w, Fp8Format()), whole(8))] * 3
    with record() as nodes:
        grouped(torch.randn(2, 128).bfloat16(), [w] * 3, quantized)
    node: Node = nodes[-1]
    assert [(e.tensor, e.granularity) for e in node.edges_of("input")] == [("x", None), ("weights", "128x128")]
