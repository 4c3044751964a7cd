"""One weight per group of rows: the grouped linear against the groups' own linears, bitwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl_megatron.fp8 import (
    Fp8Format,
    Fp8Recipe,
    Fp8Weight,
    GridSlice,
    backends,
    deep_gemm,
    fp8_grouped_linear,
    fp8_linear,
    quantize_weight,
    whole,
)
from tests.fp8.gpu import deep_gemm_double
from tests.fp8.gpu.test_deep_gemm import WithTorchQuantizers

NUM_ROWS = [5, 0, 70, 1]
N, K = 256, 256
Outcome = dict[str, Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def straddling() -> list[GridSlice]:
    """Two Hugging Face tensors of 100 and 156 rows: DGrad contracts blocks padded with zeros."""
    rows = torch.arange(N)
    return [GridSlice(rows[:100], 0, 100), GridSlice(rows[100:], 0, 156)]


def run(grouped: bool, recipe: Fp8Recipe, slices: list[GridSlice], main_grad: bool) -> Outcome:
    """Output and gradients of all experts."""
    masters = [torch.nn.Parameter(randn(N, K, seed=e) * 0.05) for e in range(len(NUM_ROWS))]
    if main_grad:
        for master in masters:
            master.main_grad = torch.ones(N, K)  # type: ignore[attr-defined]
    weights = [Fp8Weight.of(quantize_weight(m, recipe.format, slices), slices) for m in masters]
    x = randn(sum(NUM_ROWS), K).requires_grad_()
    if grouped:
        y = fp8_grouped_linear(x, NUM_ROWS, masters, weights, recipe, dtype=torch.bfloat16)
    else:
        groups = zip(x.split(NUM_ROWS), masters, weights, strict=True)
        y = torch.cat([fp8_linear(*group, recipe, dtype=torch.bfloat16) for group in groups])
    y.backward(randn(sum(NUM_ROWS), N, seed=9) * 1e-3)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    for e, master in enumerate(masters):
        gradient = master.main_grad if main_grad else master.grad  # type: ignore[attr-defined]
        assert gradient is not None
        found[f"dw{e}"] = gradient
    return found


RECIPES = {
    "fp8": Fp8Recipe(),
    "columnwise": Fp8Recipe(saved_activation="columnwise"),
    "bf16 activation": Fp8Recipe(saved_activation="bf16"),
    "bf16 dgrad": Fp8Recipe(dgrad="bf16"),
    "bf16 wgrad": Fp8Recipe(wgrad="bf16"),
    "pow2": Fp8Recipe(Fp8Format(scale_format="pow2")),
    "per tensor": Fp8Recipe(Fp8Format("tensor")),
}


@pytest.mark.parametrize(("name", "main_grad"), [*((name, True) for name in RECIPES), ("fp8", False)])
def test_grouped_equals_one_after_the_other(name: str, main_grad: bool) -> None:
    """Outputs, input and weight gradients of the emulated backend, an expert without rows among them."""
    for slices in (whole(N), straddling()):
        expected = run(False, RECIPES[name], slices, main_grad)
        found = run(True, RECIPES[name], slices, main_grad)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("name", "main_grad"), [("fp8", True), ("fp8", False), ("bf16 dgrad", True)])
def test_deep_gemm_grouped_calls(name: str, main_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deep_gemm backend gives the emulated bits through the library's grouped functions (a stand-in that computes
    what they document), one call each for FProp, DGrad and WGrad; FProp takes the dense function where a weight's
    blocks lie off the 128 grid."""
    called: list[str] = []

    class Library:
        def __getattr__(self, function: str) -> object:
            called.append(function)
            return getattr(deep_gemm_double, function)

    for slices, dense in ((whole(N), False), (straddling(), True)):
        expected = run(True, RECIPES[name], slices, main_grad)
        with monkeypatch.context() as patch:
            patch.setattr(deep_gemm, "library", Library)
            patch.setattr(backends, "_active", [("deep_gemm", WithTorchQuantizers())])
            called.clear()
            found = run(True, RECIPES[name], slices, main_grad)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert called.count("k_grouped_fp8_gemm_nt_contiguous") == 1
        grouped = (not dense) + (name == "fp8")  # FProp and DGrad, which contracts the blocks, whatever their rows
        assert called.count("m_grouped_fp8_gemm_nt_contiguous") == grouped
        assert ("fp8_gemm_nt" in called) == dense
