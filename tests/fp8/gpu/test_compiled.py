"""Every Triton kernel compiled for sm_90 on this machine without a GPU, and its PTX."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from jetrl_megatron.fp8 import Fp8Format
from jetrl_megatron.fp8.gpu import launch
from jetrl_megatron.fp8.gpu.compiled import Expectation, expectations
from jetrl_megatron.fp8.gpu.fused import plan_swiglu
from jetrl_megatron.fp8.gpu.quantize import plan_rows

EXPECTATIONS = {e.name: e for e in expectations()}
pytestmark = pytest.mark.skipif(launch.interpreting(), reason="TRITON_INTERPRET is set: nothing is compiled")


@pytest.fixture(scope="module", autouse=True)
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile anew: a cached result would not show what this compiler makes."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTATIONS)
def test_kernels_compile_for_hopper(name: str) -> None:
    """PTX and a cubin; IEEE division, square root and rounding, hardware E4M3 conversion, 16-byte loads and stores
    where shapes allow; nothing approximate, flushing or atomic;
    no fma outside the GEMM, which has wgmma on E4M3 and fma."""
    expectation = EXPECTATIONS[name]
    compiled = expectation.plan.compile()
    assert expectation.faults(compiled.asm["ptx"]) == []
    assert len(compiled.asm["cubin"]) > 1000
    assert ".target sm_90" in compiled.asm["ptx"]


REPRESENTATIVE = (
    "quantize 1x128 fp32 8192x4096",
    "quantize both ways pow2 257x1411",
    "requantize along tokens fp32 8192x4096",
    "RMSNorm + quantize fp32 1x1",
    "residual + RMSNorm + quantize fp32 8192x4096",
    "RMSNorm of heads",
    "SwiGLU 257x1411",
    "rope 8192x32x128",
    "sum over experts 8192x4096",
    "sum of exp 8192x151936",
    "quantize 128x128 of a fused weight fp32 8192x4096",
    "BF16 linear",
    "GEMM of one row",
    "grouped GEMM FProp",
    "grouped GEMM WGrad",
    "routed GEMM",
    "routed BF16 linear",
    "GEMM WGrad",
    "attention",
    "attention, split decode",
    "attention, merge of segments",
    "attention backward, dq",
    "attention backward, dk and dv",
)
LARGE = ("attention", "attention backward, dk and dv")  # two fp32 tiles besides the scores: all 255 registers


class HopperDriver:
    """What Triton's launcher asks of a driver before it launches, answered as on a Hopper GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the driver")
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_what_is_checked_is_what_is_launched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launcher, given the launch's arguments up to the point where a GPU is needed, compiles the PTX that
    the tests above read: same specialisation, same options, no fp fusion."""
    plan = EXPECTATIONS[name].plan
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())
    plan.kernel.device_caches.clear()
    try:
        launched = plan.kernel.run(grid=plan.grid, warmup=True, **plan.arguments, **plan.constants, **plan.options)
    finally:
        plan.kernel.device_caches.clear()
    assert launched.metadata.enable_fp_fusion is False
    assert launched.asm["ptx"] == plan.compile().asm["ptx"]


def assemble(name: str, folder: Path) -> tuple[Path, str]:
    """The kernel's cubin in the folder, and the assembler's report."""
    source, cubin = folder / "kernel.ptx", folder / "cubin"
    source.write_text(EXPECTATIONS[name].plan.compile().asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--fmad=false", "--gpu-name=sm_90a", str(source), "-o", str(cubin)]
    return cubin, subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("name", [name for name in REPRESENTATIVE if name not in LARGE])
def test_no_spills(name: str, tmp_path: Path) -> None:
    """Registers suffice: the assembler reports no spills and no stack."""
    _, report = assemble(name, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report


def innermost_loops(instructions: list[str]) -> list[list[str]]:
    """Bodies of the loops of disassembled code that hold no other loop."""
    labels, loops = {}, []
    for i, line in enumerate(instructions):
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = i
        elif (branch := re.search(r"BRA.*\((\.L\w+)\)", line)) and branch[1] in labels:
            loops.append((labels[branch[1]], i))
    inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    return [instructions[a:b] for a, b in inner]


@pytest.mark.parametrize("name", LARGE)
def test_no_spills_in_loops(name: str, tmp_path: Path) -> None:
    """Where registers do not suffice, what is spilled waits outside the loop over keys or queries (the only innermost
    loop with tensor-core products), which neither stores nor loads it."""
    cubin, report = assemble(name, tmp_path)
    spilled = re.search(r"(\d+) bytes stack frame", report)
    assert spilled is not None
    assert int(spilled[1]) <= 80
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (loop,) = [body for body in innermost_loops(listing) if any("HGMMA" in line for line in body)]
    assert not [line for line in loop if re.search(r"\b(STL|LDL)\b", line)]


def test_both_forms_of_attention_loop_alike() -> None:
    """One program per tile and split over keys: the loop over keys is the same sequence of arithmetic instructions."""
    loops = []
    for name in ("attention", "attention, decode", "attention, split decode"):
        lines = EXPECTATIONS[name].plan.compile().asm["ptx"].splitlines()
        found = [
            re.match(r"\s*(?:@!?%\w+\s+)?((?:wgmma\.mma|ex2|mul\.rn|add\.rn|sub\.rn|max|shfl)[\w.:]*)", x)
            for x in lines
        ]
        names = [match[1] for match in found if match is not None]
        first = next(i for i, x in enumerate(names) if x.startswith("wgmma"))
        last = max(i for i, x in enumerate(names) if x.startswith("wgmma"))
        loops.append(names[first : last + 1])
    assert loops[0] == loops[1] == loops[2]
    assert sum(x.startswith("ex2") for x in loops[0]) == 34  # 32 weights of a thread, its two rows' rescaling


def test_fusion_is_caught() -> None:
    """Control: with Triton's fp fusion on, SwiGLU's polynomial becomes fma and multiplies lose their rounding mark."""
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    plan = plan_swiglu(x, Fp8Format())
    faults = Expectation("control", plan, ()).faults(plan.compile(enable_fp_fusion=True).asm["ptx"])
    assert any(fault.startswith("fma.") for fault in faults)


@triton.jit
def _sloppy_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, LENGTH: tl.constexpr) -> None:
    i = tl.arange(0, LENGTH)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.exp(x) / (tl.sqrt(x) + 448.0))


def test_approximations_are_caught() -> None:
    """Control: `/`, `tl.exp` and `tl.sqrt` compile to approximations, and the search finds all three."""
    x = torch.empty(128, dtype=torch.float32, device="meta")
    plan = launch.Plan(_sloppy_kernel, (1,), {"x_ptr": x, "out_ptr": x}, {"LENGTH": 128}, x)
    faults = " ".join(Expectation("control", plan, ("div.rn.f32",)).faults(plan.compile().asm["ptx"]))
    assert "div.rn.f32 is missing" in faults
    for instruction in ("div.full", "ex2.approx", "sqrt.approx"):
        assert instruction in faults, faults


def test_every_kernel_is_in_the_list() -> None:
    """A kernel of the package that the list above does not compile would go unchecked."""
    folder = Path(launch.__file__).parent
    kernels = {
        line.removeprefix("def ").partition("(")[0]
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.partition("(")[0].endswith("_kernel")
    }
    assert {e.plan.kernel.__name__ for e in EXPECTATIONS.values()} == kernels


def test_launches_refuse_what_they_cannot_do() -> None:
    """A CPU tensor without the interpreter, a granularity without kernels, an integer matrix, 3-D inputs: ValueError
    in words, before anything is launched."""
    x = torch.ones(2, 128)
    with pytest.raises(ValueError, match="x_ptr: on cpu; rule: Triton kernels run on a CUDA device"):
        plan_rows(x, Fp8Format()).run()
    with pytest.raises(ValueError, match="granularity: tensor"):
        plan_rows(x, Fp8Format("tensor"))
    with pytest.raises(ValueError, match=r"x: int32 \(2, 128\)"):
        plan_rows(x.int(), Fp8Format())
    with pytest.raises(ValueError, match="rule: a matrix of bfloat16 or float32"):
        plan_rows(x[None], Fp8Format())


def test_empty_inputs_launch_nothing() -> None:
    """No rows: the result has the right shape, and no kernel is launched (a launch would need a GPU)."""
    plan = plan_rows(torch.empty(0, 256, device="meta"), Fp8Format())
    quantized = replace(plan, arguments={}).run()
    assert quantized.data.shape == (0, 256)
    assert quantized.scale.shape == (0, 2)
