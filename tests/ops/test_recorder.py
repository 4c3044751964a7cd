"""The precision-flow recorder writes down what really ran."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Weight, quantize_weight, whole
from jetrl_megatron.ops.kernels import kernels
from jetrl_megatron.ops.recorder import Edge, attach, record, recording

BF16, FP32 = Edge("bfloat16"), Edge("float32")


class Block(nn.Module):
    """A norm, an FP8 linear and a stranger inside, named as our model would."""

    def __init__(self, fmt: Fp8Format) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 128).bfloat16())
        self.norm = nn.Module()
        self.norm.forward = lambda x: ops.rmsnorm(x, torch.ones(128, dtype=x.dtype), 1e-6)  # type: ignore[method-assign]
        self.helper = nn.Module()
        self.helper.forward = self._linear  # type: ignore[method-assign]
        self.recipe = Fp8Recipe(fmt)

    def _linear(self, x: Tensor) -> Tensor:
        fp8 = Fp8Weight.of(quantize_weight(self.weight, self.recipe.format), whole(32))
        return ops.fp8_linear(x, self.weight, fp8, self.recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(self.norm(x))


def test_records_operators_modules_and_edges() -> None:
    """Each call has its operator, the canonical path of the nearest named module, and dtype edges; FP8 weights carry
    granularity and scale format."""
    root = nn.Module()
    root.block = Block(Fp8Format("channel", "pow2"))
    names = {"block": "model.layers.0", "block.norm": "model.layers.0.input_layernorm"}
    handles = attach(root, names.get)
    with record() as calls:
        root.block(torch.randn(3, 128).bfloat16())
        ops.lm_head(torch.ones(1, 128).bfloat16(), root.block.weight, ops.ExactWeight.of(root.block.weight))
    assert [(c.operator, c.module) for c in calls] == [
        ("rmsnorm", "model.layers.0.input_layernorm"),
        ("fp8_linear", "model.layers.0"),  # helper has no canonical name: the enclosing module's
        ("lm_head", ""),
    ]
    assert Edge("float8_e4m3fn", "channel", "pow2") in calls[1].inputs
    assert calls[1].inputs[0] == BF16
    assert calls[1].outputs == (BF16,)
    assert calls[2].outputs == (FP32,)
    assert {c.kernels for c in calls} == {kernels().__name__.rsplit(".", 1)[-1]}
    for handle in handles:
        handle.remove()
    with record() as after:
        root.block(torch.randn(3, 128).bfloat16())
    assert {c.module for c in after} == {""}


def test_off_by_default_and_nested() -> None:
    """Nothing is kept outside `record()`; nested recordings both see the calls inside."""
    x, w = torch.randn(2, 8).bfloat16(), torch.ones(8).bfloat16()
    assert not recording()
    ops.rmsnorm(x, w, 1e-6)
    with record() as outer:
        ops.swiglu(x)
        with record() as inner:
            ops.rmsnorm(x, w, 1e-6)
    ops.swiglu(x)
    assert [c.operator for c in outer] == ["swiglu", "rmsnorm"]
    assert [c.operator for c in inner] == ["rmsnorm"]
    assert not recording()


def test_a_module_that_raises_leaves_the_stack_clean() -> None:
    """After an exception inside a module later calls are not attributed to it."""
    root = nn.Module()
    root.bad = nn.Module()

    def fail(_x: Tensor) -> Tensor:
        raise RuntimeError("inside")

    root.bad.forward = fail  # type: ignore[method-assign]
    attach(root, {"bad": "model.bad"}.get)
    with record() as calls:
        try:
            root.bad(torch.ones(1))
        except RuntimeError:
            ops.swiglu(torch.ones(1, 4).bfloat16())
    assert [c.module for c in calls] == [""]


def test_every_precision_is_told_apart() -> None:
    """Negative control: recordings of FP8, another granularity, another scale format and BF16 all differ."""
    x, w = torch.randn(2, 128).bfloat16(), torch.randn(8, 128).bfloat16()
    seen = []
    for fmt in (Fp8Format(), Fp8Format("channel"), Fp8Format("block", "pow2"), None):
        with record() as calls:
            if fmt is None:
                ops.linear(x, w, ops.ExactWeight.of(w))
            else:
                ops.fp8_linear(x, w, Fp8Weight.of(quantize_weight(w, fmt), whole(8)), Fp8Recipe(fmt))
        seen.append(tuple(calls))
    assert len(set(seen)) == 4
    assert not any(edge.dtype.startswith("float8") for edge in seen[3][0].inputs)
