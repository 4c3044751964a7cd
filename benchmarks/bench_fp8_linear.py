"""Exact FP8 linear (FProp with activation quantization) against stock fp32 and bf16 `F.linear`, for both kernel sets.

Our weight is quantized and prepared once per weight version, outside the timed region, as in training and rollout. The
competitors are called in turn, so that other load on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from support import in_fresh_process, kernel_sets, write_results
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format, Fp8Recipe, Fp8Weight, quantize_weight, whole

SIZES_M = (1, 16, 64, 256, 512)
TARGET_M, TARGET_RATIO = 256, 6.0
N = K = 1024


def competitors(m: int) -> dict[str, Callable[[], Tensor]]:
    """Linears of the same x [M, K] and weight [N, K], by name."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, K, generator=generator).bfloat16()
    weight = (torch.randn(N, K, generator=generator) * 0.02).bfloat16()
    recipe = Fp8Recipe(Fp8Format())
    fp8 = Fp8Weight.of(quantize_weight(weight, recipe.format), whole(N))
    x32, weight32 = x.float(), weight.float()
    return {
        "fp8_exact": lambda: ops.fp8_linear(x, weight, fp8, recipe),
        "fp32": lambda: F.linear(x32, weight32),
        "bf16": lambda: F.linear(x, weight),
    }


def interleaved_ms(functions: dict[str, Callable[[], Tensor]], budget_s: float) -> dict[str, list[float]]:
    """Milliseconds of each call, the functions taking turns until the budget is spent (5 rounds at least)."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times["fp32"]) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def measure(budget_s: float) -> list[dict[str, float]]:
    """One row per size M, with the kernel set of this process."""
    torch.set_num_threads(1)
    rows = []
    with torch.no_grad():
        for m in SIZES_M:
            times = interleaved_ms(competitors(m), budget_s)
            ms = {name: statistics.median(values) for name, values in times.items()}
            row = {"m": m, "rounds": len(times["fp32"]), "ratio_to_fp32": round(ms["fp8_exact"] / ms["fp32"], 2)}
            row["ratio_of_minima"] = round(min(times["fp8_exact"]) / min(times["fp32"]), 2)
            row |= {f"{name}_ms": round(value, 4) for name, value in ms.items()}
            row |= {f"{name}_min_ms": round(min(values), 4) for name, values in times.items()}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="time per size M and kernel set")
    budget_s = parser.parse_args().seconds
    results = {kernels: in_fresh_process(kernels, measure, budget_s) for kernels in kernel_sets()}
    columns = ("kernels", "M", "exact FP8 (ms)", "fp32 (ms)", "bf16 (ms)", "FP8 / fp32", "of the minima")
    table = Table(*columns, title=f"N = K = {K}, 1 thread, medians")
    for kernels, rows in results.items():
        for row in rows:
            times = (f"{row[f'{name}_ms']:.3f}" for name in ("fp8_exact", "fp32", "bf16"))
            table.add_row(
                kernels, str(row["m"]), *times, f"{row['ratio_to_fp32']:.2f}", f"{row['ratio_of_minima']:.2f}"
            )
    reached = next(row["ratio_to_fp32"] for row in results["torch"] if row["m"] == TARGET_M)
    met = reached <= TARGET_RATIO
    console = Console()
    console.print(table)
    console.print(f"torch, M={TARGET_M}: {reached}x of fp32; target <= {TARGET_RATIO}x: {'met' if met else 'MISSED'}")
    target = {"kernels": "torch", "m": TARGET_M, "ratio": reached, "at_most": TARGET_RATIO, "met": met}
    write_results("fp8_linear", {"n": N, "k": K, "num_threads": 1, "target": target, "rows": results})


if __name__ == "__main__":
    main()
