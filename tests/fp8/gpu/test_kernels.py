"""The Triton kernels in Triton's interpreter: the very check that runs on a GPU, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, and other tests import triton without it; hence the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron.fp8 import E4M3
from jetrl_megatron.ops.gpu.compare import compare
from jetrl_megatron.ops.gpu.inputs import KINDS, SHAPES, fuzz_set, matrix, tie_points
from tests.support.oracles import E4M3_MIDPOINTS, E4M3_POSITIVE

ROOT = Path(__file__).resolve().parents[3]
KERNELS = {
    "quantize 1x128",
    "quantize 128x128",
    "quantize 128x128 of a fused weight",
    "quantize along tokens",
    "quantize both ways",
    "requantize along tokens",
    "dequantize",
    "residual + RMSNorm + quantize",
    "RMSNorm + quantize",
    "SwiGLU + quantize",
    "residual + RMSNorm",
    "RMSNorm",
    "SwiGLU",
    "rope",
    "sum over experts",
    "sum of exp",
    "log-prob",
    "TMA layout",
    "exp32",
    "tree_sum",
    "GEMM of integers, triton",
}
QUANTIZING = {name for name in KERNELS if "quantize" in name}


def run_python(code_or_module: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *code_or_module], capture_output=True, text=True, env=env, cwd=ROOT, timeout=500, check=False
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `make gpu-check-kernels` writes, from the interpreter."""
    out = tmp_path_factory.mktemp("gpu") / "check.json"
    command = ["-m", "jetrl_megatron.ops.gpu", "check", "--device", "cpu", "--out", str(out)]
    done = run_python(command, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all equal" in done.stdout
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.slow
def test_every_kernel_is_byte_equal(report: dict[str, Any]) -> None:
    """Codes, scales and bf16 outputs of every kernel equal the torch reference on the whole fuzz set, both scale
    formats: each quantizing kernel on every kind and shape. exp32, tree_sum, and the GEMM on integers, too."""
    assert {row["kernel"] for row in report["kernels"]} == KERNELS
    for row in report["kernels"]:
        assert row["different"] == 0, report["different"][:5]
        assert row["cases"] >= (2 * len(SHAPES) * len(KINDS) if row["kernel"] in QUANTIZING else 1)
        assert row["values"] > 0


@pytest.mark.slow
def test_the_triton_backend_agrees(report: dict[str, Any]) -> None:
    """FProp, DGrad and WGrad of the Triton backend: within tolerance of the exact GEMM, rows independent of the batch,
    equal when run twice."""
    wanted = {
        "FProp",
        "DGrad",
        "WGrad",
        "FProp alone = in the batch",
        "BF16 linear",
        "BF16 linear alone = in the batch",
        "BF16 linear over ranks, reversed",
    }
    wanted |= {"routed FProp = grouped", "routed BF16 linear = dense"}
    wanted |= {f"grouped {gemm} = dense" for gemm in ("FProp", "DGrad", "WGrad")}
    assert {row["gemm"] for row in report["gemms"]} >= wanted
    assert all(row["passed"] for row in report["gemms"])
    assert report["deep_gemm"].startswith("DeepGEMM: not checked: ")


@pytest.mark.slow
def test_attention_is_the_same_in_prefill_and_decode(report: dict[str, Any]) -> None:
    """Triton's attention over more than two segments: decode (around the ends of blocks and segments), any number of
    programs along the keys, chunks and other company give prefill's bits (the sums are the kernel's, the products
    numpy's); within tolerance of the exact reference; zeros where a query sees no key."""
    rows = [row for row in report["gemms"] if row["gemm"].startswith("attention") and "backward" not in row["gemm"]]
    assert {row["gemm"] for row in rows} == {
        "attention",
        "attention, decode = prefill",
        "attention, split = whole",
        "attention, no keys = 0",
        "attention, alone = in a batch",
        "attention, sequences reordered",
        "attention, first chunk = prefill",
        "attention, second chunk = prefill",
    }
    assert all(row["passed"] for row in rows)
    assert any("(1100, 0, 65)" in row["case"] for row in rows)


@pytest.mark.slow
def test_backward_of_attention(report: dict[str, Any]) -> None:
    """dq, dk and dv of packed sequences, heads sharing keys or not: within 5e-3 (relative Frobenius) of fp64 autograd
    of the textbook formula; no gradient on padding; two runs the same bits."""
    rows = [row for row in report["gemms"] if row["gemm"].startswith("attention backward")]
    gradients = {f"attention backward, {name}" for name in ("dq", "dk", "dv")}
    exact = {"attention backward, padding = 0", "attention backward twice"}
    assert {row["gemm"] for row in rows} == gradients | exact
    for row in rows:
        assert row["passed"]
        assert row["bound"] == (5e-3 if row["gemm"] in gradients else 0)


@pytest.mark.slow
def test_bench_rows(report: dict[str, Any]) -> None:
    """The times have a row per memory-bound kernel, per direction of a linear, per kind of attention, all positive."""
    rows = {"copy", "RMSNorm", "SwiGLU", "rope", "sum over experts", "sum of exp"}
    assert {row["kernel"] for row in report["bandwidth"]} == QUANTIZING - {"quantize 128x128 of a fused weight"} | rows
    assert {row["direction"] for row in report["linears"]} == {"forward", "backward"}
    kinds = {"decode", "decode, split as chosen", "training, forward", "training, backward"}
    assert {row["what"] for row in report["attention"]} == kinds
    assert all(row["ms"] > 0 for row in report["bandwidth"] + report["linears"] + report["attention"])
    assert "no GPU" in report["machine"]["device"]


def test_the_comparison_can_fail() -> None:
    """One flipped bit, a missing output, a wrong dtype, or the sign of a NaN code are differences; NaN payloads of fp32
    are not."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    scale = torch.tensor([1.0, float("nan"), -0.0])
    good = {"codes": codes, "scale": scale}
    assert compare("k", "c", good, good).equal
    payload = torch.tensor([0x3F800000, 0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert compare("k", "c", {"codes": codes, "scale": payload}, good).equal
    flipped = codes.view(torch.uint8).clone()
    flipped[7] ^= 1
    assert compare("k", "c", {"codes": flipped.view(E4M3), "scale": scale}, good).num_different == 1
    nan_sign = codes.view(torch.uint8).clone()
    nan_sign[0x7F] = 0xFF
    assert compare("k", "c", {"codes": nan_sign.view(E4M3), "scale": scale}, good).first == "codes[127]"
    assert compare("k", "c", {"codes": codes, "scale": scale.abs()}, good).num_different == 1
    assert compare("k", "c", {"codes": codes}, good).num_different == 3
    assert not compare("k", "c", {"codes": codes, "scale": scale.double()}, good).equal
    assert not compare("k", "c", {}, {}).equal


def test_a_wrong_kernel_is_caught() -> None:
    """The fuzz set tells wrong quantizers apart: scale by multiplication with RN(1/448), dividing by the scale,
    rounding half away, flushing subnormals, dropping NaN each differ from the reference somewhere."""
    from jetrl_megatron.fp8 import Fp8Format, quantize_rows

    wrong: dict[str, bool] = {}
    for _, x in fuzz_set():
        padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).view(len(x), -1, 128)
        amax = padded.abs().amax(-1)
        good = quantize_rows(x, Fp8Format())
        scale = good.scale.unsqueeze(-1)
        codes = torch.nn.functional.pad(good.data.view(torch.uint8), (0, -x.shape[1] % 128)).view(padded.shape)
        by_product = (amax * (1 / 448)).clamp_min(2.0**-126)
        real = torch.isfinite(amax) & (amax > 0)
        wrong["product"] = wrong.get("product", False) or bool((by_product != good.scale)[real].any())
        divided = (padded / scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
        wrong["divided"] = wrong.get("divided", False) or bool((divided != codes)[real].any())
        scaled = padded * (1 / scale)
        away = (scaled * (1 + 2.0**-20)).clamp(-448, 448).to(E4M3).view(torch.uint8)
        wrong["half away"] = wrong.get("half away", False) or bool((away != codes)[real].any())
        flushed = torch.where(padded.abs() < 2.0**-126, 0.0, padded) * (1 / scale)
        flushed = flushed.clamp(-448, 448).to(E4M3).view(torch.uint8)
        wrong["flushed"] = wrong.get("flushed", False) or bool((flushed != codes)[real].any())
        wrong["NaN"] = wrong.get("NaN", False) or bool(amax.isnan().any())
    assert all(wrong.values()), wrong


def test_tie_points_are_complete() -> None:
    """The ties hold every E4M3 value and midpoint of the oracle, and neighbours on both sides, in both dtypes."""
    wanted = {float(v) for v in (*E4M3_POSITIVE, *E4M3_MIDPOINTS) if v <= 448}
    for dtype in (torch.bfloat16, torch.float32):
        points = tie_points(dtype)
        assert wanted <= {abs(float(p)) for p in points}
        assert torch.equal(points.to(dtype).float(), points)
        assert len(points.abs().unique()) > 2.9 * len(wanted)


def test_inputs_are_what_they_say() -> None:
    """Every kind has the numbers it is named after, and is the same when made again."""
    shape = (130, 300)
    made = {kind: matrix(kind, shape, torch.bfloat16).float() for kind in KINDS}
    assert all(
        torch.equal(matrix(kind, shape, torch.bfloat16).float().nan_to_num(), x.nan_to_num())
        for kind, x in made.items()
    )
    assert (made["zeros"].view(torch.int32) == -(2**31)).any()
    assert (made["zeros"] != 0).sum() == 1
    assert made["tiny"].abs().max() < 2.0**-110
    assert (made["tiny"].abs() < 2.0**-126).any()
    assert made["huge"].abs().max() > 3e38
    assert made["not finite"].isnan().any()
    assert made["not finite"].isinf().any()


def test_without_a_gpu_nothing_is_checked() -> None:
    """`check` and `bench` without a GPU: exit status 1, the reason, and that nothing was checked; no report."""
    for what in ("check", "bench"):
        done = run_python(["-m", "jetrl_megatron.ops.gpu", what], TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 1
        assert "nothing was checked" in done.stderr
        assert "GPU" in done.stderr
        assert done.stdout == ""


def test_a_bare_machine_can_import_the_check() -> None:
    """torch and triton are enough: with the rest of a full installation blocked, the check's modules import."""
    blocked = ("pydantic", "yaml", "typer", "rich", "safetensors", "sglang", "megatron", "transformers", "matplotlib")
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import jetrl_megatron.ops.gpu.__main__, jetrl_megatron.ops.gpu.bench, jetrl_megatron.ops.gpu.compare
import jetrl_megatron.ops.gpu.linears, jetrl_megatron.fp8.gpu.backend, jetrl_megatron.fp8.gpu.compiled
import jetrl_megatron.fp8.deep_gemm_backend
print("imported")
"""
    done = run_python(["-c", code])
    assert done.stdout.strip() == "imported", done.stderr[-2000:]
