"""The DeepGEMM adapter on the CPU: what it prepares, given to a stand-in that computes what DeepGEMM documents, must
give the bits of the emulated backend; mistakes must be refused in our words."""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.fp8 import (
    E4M3,
    Fp8Experts,
    Fp8Format,
    Fp8Recipe,
    Fp8Tensor,
    Fp8Weight,
    GridSlice,
    backends,
    compact_weight_scale,
    deep_gemm,
    fp8_linear,
    quantize_columns,
    quantize_rows,
    quantize_weight,
    whole,
)
from jetrl_megatron.fp8.deep_gemm_backend import DeepGemmBackend
from jetrl_megatron.fp8.emulated import Emulated
from tests.fp8.gpu import deep_gemm_double
from tests.support.recorded_graph import RecordedGraph

FMT = Fp8Format()
WHEEL = "sgl-deep-gemm==0.2.3.post2"  # the version that pyproject.toml pins


class WithTorchQuantizers(DeepGemmBackend):
    """The backend with the emulated quantizers instead of Triton's, which give the same bytes but need a GPU."""

    quantize_rows = Emulated.quantize_rows  # type: ignore[assignment]
    quantize_columns = Emulated.quantize_columns  # type: ignore[assignment]
    quantize_both = Emulated.quantize_both  # type: ignore[assignment]
    requantize_columns = Emulated.requantize_columns  # type: ignore[assignment]
    quantize_weight = Emulated.quantize_weight  # type: ignore[assignment]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "library", lambda: deep_gemm_double)


@pytest.fixture
def on_deep_gemm(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_active", [("deep_gemm", WithTorchQuantizers())])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def train(w: Tensor, slices: list[GridSlice], t: int, recipe: Fp8Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, main_grad) of two micro-batches."""
    weight = Fp8Weight.of(quantize_weight(w, recipe.format, slices), slices)
    master = torch.nn.Parameter(w.clone())
    master.main_grad = torch.zeros(w.shape)  # type: ignore[attr-defined]
    outputs = []
    for seed in (1, 2):
        x = randn(t, w.shape[1], seed=seed).requires_grad_()
        y = fp8_linear(x, master, weight, recipe, dtype=torch.bfloat16)
        y.backward(randn(t, len(w), seed=seed + 10) * 1e-3)
        assert x.grad is not None
        outputs.append((y.detach(), x.grad))
    return torch.cat([y for y, _ in outputs]), torch.cat([dx for _, dx in outputs]), master.main_grad  # type: ignore[attr-defined]


def straddling() -> list[GridSlice]:
    """q of 192 rows and k of 64: the grid of k starts in the middle of a 128-row block of the fused weight."""
    return [GridSlice(torch.arange(192), 0, 192), GridSlice(torch.arange(192, 256), 0, 64)]


@pytest.mark.parametrize("saved", ["rowwise", "columnwise", "bf16"])
@pytest.mark.parametrize(("shape", "t"), [((264, 400), 150), ((128, 256), 1), ("fused", 130)])
def test_a_linear_has_the_bits_of_the_emulated_one(
    shape: Any, t: int, saved: str, double: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FProp, DGrad and WGrad into main_grad over two micro-batches, ragged rows, features and tokens, a fused weight
    whose parts straddle blocks, all saved activations: bitwise."""
    recipe = Fp8Recipe(FMT, saved_activation=saved)  # type: ignore[arg-type]
    w = randn(256, 384) if shape == "fused" else randn(*shape)
    if shape == "fused":
        w[192:] *= 30
    slices = straddling() if shape == "fused" else whole(len(w))
    expected = train(w, slices, t, recipe)
    monkeypatch.setattr(backends, "_active", [("deep_gemm", WithTorchQuantizers())])
    for name, got, want in zip(("y", "dx", "main_grad"), train(w, slices, t, recipe), expected, strict=True):
        assert torch.equal(got, want), name


def test_straddling_blocks_take_the_rowwise_recipe() -> None:
    """A weight on one 128-row grid goes to the 128x128 recipe with that grid; a fused one with parts elsewhere has none
    and goes to the 1x128 recipe, into fp32 zeros."""
    w = randn(256, 384)
    w[192:] *= 30
    x = quantize_rows(randn(3, 384), FMT)
    recipes = []
    for slices in (whole(256), straddling()):
        prepared = Fp8Weight.of(quantize_weight(w, FMT, slices), slices).fprop
        call = deep_gemm.prepare_gemm(x, prepared.codes, prepared.scale.t(), prepared.grid)
        assert call is not None
        recipes.append((call.keywords["recipe"], call.out.dtype))
    assert recipes == [((1, 128, 128), torch.bfloat16), ((1, 1, 128), torch.float32)]


def experts(counts: list[int], n: int = 264, k: int = 400) -> tuple[Tensor, list[Fp8Tensor], Tensor, Tensor]:
    """x, weights, stacked codes, stacked grids."""
    weights = [quantize_weight(randn(n, k, seed=e), FMT) for e in range(len(counts))]
    grids = torch.stack([compact_weight_scale(w.scale) for w in weights])
    return randn(sum(counts), k), weights, torch.stack([w.data.view(torch.uint8) for w in weights]).view(E4M3), grids


COUNTS = [[130, 0, 1, 128], [0, 5], [3]]


@pytest.mark.parametrize("counts", COUNTS)
def test_experts_are_padded_and_come_back(counts: list[int], double: None) -> None:
    """Grouped contiguous and masked: every row gets its own expert's dense result, bitwise, whatever the others are."""
    x, weights, codes, grids = experts(counts)
    emulated = Emulated()
    dense = torch.cat(
        [
            emulated.fprop(rows, Fp8Weight.of(w, whole(264)).fprop, 1, torch.bfloat16)[0]
            for rows, w in zip(x.split(counts), weights, strict=True)
        ]
    )
    quantized = quantize_rows(x, FMT)
    call, layout = deep_gemm.prepare_grouped(quantized, counts, codes, grids)
    y = deep_gemm.execute(call)
    assert y is not None
    assert torch.equal(y[layout.places], dense)
    masked, places = deep_gemm.prepare_masked(quantized, counts, codes, grids, max_rows=132)
    y = deep_gemm.execute(masked)
    assert y is not None
    assert torch.equal(y.view(-1, 264)[places], dense)


@pytest.mark.parametrize("counts", COUNTS)
def test_experts_whose_rows_only_the_device_counts(counts: list[int], double: None) -> None:
    """The backend's routed FProp: every row gets its own expert's dense result, bitwise, rows of no expert zeros; the
    operands are prepared without a read on the host."""
    _, weights, codes, _ = experts(counts)
    stacked = Fp8Experts(Fp8Tensor(codes, torch.stack([w.scale for w in weights]), FMT), whole(264))
    x = randn(sum(counts) + 5, 400)
    dense = [
        Emulated().fprop(rows, Fp8Weight.of(w, whole(264)).fprop, 1, torch.bfloat16)[0]
        for rows, w in zip(x[:-5].split(counts), weights, strict=True)
    ]
    expected = torch.cat([*dense, torch.zeros(5, 264, dtype=torch.bfloat16)])
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    y, _ = WithTorchQuantizers().fprop_routed(x, stacked, offsets, 1, torch.bfloat16)
    assert torch.equal(y, expected)
    quantized = quantize_rows(x, FMT)
    assert stacked.grid is not None
    with RecordedGraph().capture():
        deep_gemm.prepare_routed(quantized, offsets, codes, stacked.grid)


def test_an_update_moves_nothing(double: None) -> None:
    """What the library is given of a weight, dense on the 128x128 grid or off it and stacked, is where it was after new
    bytes were written into the weight's memory, and says what these say."""
    for slices in (whole(256), straddling()):
        old, new = (quantize_weight(randn(256, 384, seed=seed), FMT, slices) for seed in (0, 1))
        weight, fresh = Fp8Weight.of(old, slices), Fp8Weight.of(new, slices)
        held = [weight.fprop.codes, weight.fprop.scale, *([weight.fprop.grid] if weight.fprop.grid is not None else [])]
        assert len(held) == (3 if slices[0].total == 256 else 2)
        old.data.view(torch.uint8).copy_(new.data.view(torch.uint8))
        old.scale.copy_(new.scale)
        weight.refresh()
        wanted = [fresh.fprop.codes, fresh.fprop.scale, fresh.fprop.grid]
        now = [weight.fprop.codes, weight.fprop.scale, weight.fprop.grid]
        for before, after, value in zip(held, now, wanted, strict=False):
            assert after is not None
            assert value is not None
            assert after.data_ptr() == before.data_ptr()
            assert torch.equal(after.view(torch.uint8), value.view(torch.uint8))
        x = quantize_rows(randn(5, 384), FMT)
        for dtype in (torch.bfloat16, torch.float32):
            got, want = (WithTorchQuantizers().matmul(x, w.fprop, dtype) for w in (weight, fresh))
            assert torch.equal(got, want)


def test_an_update_of_stacked_experts_moves_nothing(double: None) -> None:
    """The same of experts: codes, grids, and each expert's own form where a backend made it."""
    stacks = []
    for seed in (0, 10):
        weights = [quantize_weight(randn(256, 384, seed=seed + e), FMT) for e in range(3)]
        codes = torch.stack([w.data.view(torch.uint8) for w in weights]).view(E4M3)
        stacks.append(Fp8Experts(Fp8Tensor(codes, torch.stack([w.scale for w in weights]), FMT), whole(256)))
    old, new = stacks
    assert old.grid is not None
    assert new.grid is not None
    grid, each = old.grid, [(w.scale, w.scale.data_ptr()) for w in old.each]
    old.quantized.data.view(torch.uint8).copy_(new.quantized.data.view(torch.uint8))
    old.quantized.scale.copy_(new.quantized.scale)
    assert not torch.equal(grid, new.grid)
    old.refresh()
    assert old.grid is grid
    assert torch.equal(grid, new.grid)
    for prepared, (scale, address), fresh in zip(old.each, each, new.each, strict=True):
        assert prepared.scale is scale
        assert scale.data_ptr() == address
        assert torch.equal(scale, fresh.scale)
    x, offsets = randn(9, 384), torch.tensor([0, 4, 4, 9])
    got, want = (Emulated().fprop_routed(x, w, offsets, 1, torch.bfloat16)[0] for w in (old, new))
    assert torch.equal(got, want)


def test_a_weight_has_a_grid_by_its_layout() -> None:
    """Whether a weight has a 128x128 grid follows from where its rows lie, not from its scales: in heads of 128 rows
    in any order it has, also where all scales are equal it has none if parts end inside a block."""
    heads = [
        GridSlice(torch.cat([torch.arange(0, 128), torch.arange(256, 384)]), 0, 256),
        GridSlice(torch.arange(128, 256), 0, 128),
    ]
    shard = [GridSlice(torch.arange(128), 64, 256)]
    ones = torch.ones(384, 128).bfloat16()
    for slices, rows, expected in ((heads, 384, True), (straddling(), 256, False), (shard, 128, False)):
        weight = Fp8Weight.of(quantize_weight(ones[:rows], FMT), slices)
        assert (weight.fprop.grid is not None) == expected


def test_padded_rows() -> None:
    """3, 0 and 130 rows in blocks of 128: sources, groups and places, written out."""
    layout = deep_gemm.pad_groups([3, 0, 130], 128)
    assert layout.group.dtype == torch.int32
    assert layout.group.tolist() == [0] * 3 + [-1] * 125 + [2] * 130 + [-1] * 126
    assert layout.source.tolist() == [0, 1, 2] + [-1] * 125 + list(range(3, 133)) + [-1] * 126
    assert layout.places.tolist() == [0, 1, 2, *range(128, 258)]
    assert deep_gemm.pad_groups([0, 0], 128).source.tolist() == []


@pytest.mark.parametrize("counts", COUNTS)
def test_experts_weight_gradients(counts: list[int], double: None) -> None:
    """k-grouped WGrad adds to each expert's main_grad what its dense WGrad adds, bitwise; an expert without tokens
    keeps its gradient."""
    x, dy = randn(sum(counts), 400).split(counts), (randn(sum(counts), 264, seed=3) * 1e-3).split(counts)
    main_grad = torch.randn(len(counts), 264, 400, generator=torch.Generator().manual_seed(0))
    expected = main_grad.clone()
    for e, (rows_dy, rows_x) in enumerate(zip(dy, x, strict=True)):
        if len(rows_x):
            Emulated().wgrad(quantize_columns(rows_dy, FMT), quantize_columns(rows_x, FMT), expected[e])
    along = [[quantize_columns(rows, FMT) for rows in groups] for groups in (dy, x)]
    deep_gemm.execute(deep_gemm.prepare_grouped_wgrad(*along, main_grad))
    assert torch.equal(main_grad, expected)


def test_nothing_to_do() -> None:
    """No rows, no tokens, no tokens for any expert: no call at all, and main_grad stays."""
    w = quantize_weight(randn(128, 128), FMT)
    empty = quantize_rows(randn(0, 128), FMT)
    assert deep_gemm.prepare_gemm(empty, w.data, w.scale, compact_weight_scale(w.scale)) is None
    along = quantize_columns(randn(0, 128), FMT)
    assert deep_gemm.prepare_wgrad(along, along, torch.zeros(128, 128)) is None
    _, _, codes, grids = experts([0, 0])
    assert deep_gemm.prepare_grouped(quantize_rows(randn(0, 400), FMT), [0, 0], codes, grids)[0] is None
    assert deep_gemm.prepare_grouped_wgrad([along], [along], torch.zeros(1, 128, 128)) is None
    assert deep_gemm.execute(None) is None


def test_scales_already_for_tma_are_not_copied() -> None:
    """The Triton quantizers' layout passes through; a row-major one is copied to it, values kept; 3-D likewise."""
    pitched = torch.empty_strided((6, 3), (1, 8)).normal_()
    assert deep_gemm.tma_scale(pitched) is pitched
    for shape in ((6, 3), (2, 6, 3), (1, 1), (5, 1)):
        scale = torch.randn(shape)
        laid_out = deep_gemm.tma_scale(scale)
        assert laid_out.stride(-2) == 1
        assert laid_out.stride(-1) == -(-shape[-2] // 4) * 4
        assert torch.equal(laid_out, scale)


def operand(m: int, k: int) -> Fp8Tensor:
    return quantize_rows(randn(m, k), FMT)


def mistakes() -> Iterator[tuple[str, Any, str]]:
    """(name, call, words of the message)."""
    w = operand(128, 256)
    yield (
        "K of 200",
        lambda: deep_gemm.prepare_gemm(operand(2, 200), operand(128, 200).data, operand(128, 200).scale, None),
        "A: K = 200; rule: DeepGEMM reads rows of FP8 that start at multiples of 16 bytes",
    )
    yield (
        "N of 4",
        lambda: deep_gemm.prepare_gemm(operand(2, 256), operand(4, 256).data, operand(4, 256).scale, None),
        "N: 4; rule: .* multiple of 8",
    )
    yield (
        "two Ks",
        lambda: deep_gemm.prepare_gemm(operand(2, 128), w.data, w.scale, None),
        "K: 128 and 256; rule: operands contract the same K",
    )
    yield (
        "scales of one block too many",
        lambda: deep_gemm.prepare_gemm(operand(2, 256), w.data, operand(128, 384).scale, None),
        r"B: scales .*\(128, 3\); rule: fp32 \(128, 2\)",
    )
    yield "not FP8", lambda: deep_gemm.prepare_gemm(operand(2, 256), w.data.float(), w.scale, None), "B: torch.float32"
    yield (
        "bf16 main_grad",
        lambda: deep_gemm.prepare_wgrad(operand(8, 128), operand(16, 128), torch.zeros(8, 16).bfloat16()),
        "main_grad: torch.bfloat16",
    )
    yield (
        "main_grad of other shape",
        lambda: deep_gemm.prepare_wgrad(operand(8, 128), operand(16, 128), torch.zeros(16, 8)),
        r"main_grad: .*\(16, 8\); rule: contiguous fp32 \(8, 16\)",
    )
    x, _, codes, grids = experts([3, 4])
    rows = quantize_rows(x, FMT)
    yield (
        "a row too many",
        lambda: deep_gemm.prepare_grouped(rows, [3, 3], codes, grids),
        "num_rows: 6 in all; rule: every one of the 7 rows",
    )
    yield "an expert too many", lambda: deep_gemm.prepare_grouped(rows, [3, 3, 1], codes, grids), "num_rows: 3 experts"
    yield (
        "more rows than room",
        lambda: deep_gemm.prepare_masked(rows, [3, 4], codes, grids, 3),
        "max_rows: 3; rule: at least the 4 rows",
    )


MISTAKES = {name: (call, words) for name, call, words in mistakes()}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_in_words(name: str) -> None:
    """Shapes and alignments that DeepGEMM would refuse with a failed assertion, or not at all."""
    call, words = MISTAKES[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed: a ValueError that names the package and how to get it."""
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    deep_gemm.library.cache_clear()
    with pytest.raises(ValueError, match=r"deep_gemm: cannot be imported .* fix: pip install 'jetrl-megatron\[gpu\]'"):
        deep_gemm.execute(deep_gemm.Call("fp8_gemm_nt", (), torch.empty(0)))


FUNCTIONS = (
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "k_grouped_fp8_gemm_nt_contiguous",
)


@pytest.mark.slow
def test_the_stand_in_has_the_signatures_of_the_wheel(tmp_path: Path) -> None:
    """Names, order and defaults of the parameters, read from the sources in the pinned wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no {WHEEL}: {done.stderr.strip()[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("deep_gemm/__init__.py"))
    definitions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    aliases = {
        target.id: node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name in FUNCTIONS:
        arguments = definitions[aliases.get(name, name)].args
        defaults = [ast.literal_eval(default) for default in arguments.defaults]
        ours = inspect.signature(getattr(deep_gemm_double, name)).parameters.values()
        assert [p.name for p in ours] == [a.arg for a in arguments.args], name
        assert [p.default for p in ours if p.default is not p.empty] == defaults, name
