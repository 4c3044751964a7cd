"""`python -m jetrl_megatron.ops.gpu check|bench [--out FILE]`: needs torch, triton, an NVIDIA GPU, and no network.

Exit status 1 when something differs, or when nothing could be checked. With TRITON_INTERPRET=1 and `--device cpu` the
same code runs in Triton's interpreter on small shapes, which checks the check, not a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.fp8.backends import unusable


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jetrl_megatron.ops.gpu", description=__doc__)
    parser.add_argument("what", choices=("check", "bench"))
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: in Triton's interpreter")
    given = parser.parse_args(arguments)
    reason = unusable("triton")
    if reason is None and given.device == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no NVIDIA GPU"
    if reason is not None:
        print(f"error: {reason}; nothing was checked", file=sys.stderr)
        return 1
    results = {"machine": machine(given.device)}
    print(" | ".join(f"{key}: {value}" for key, value in results["machine"].items()))
    ok = check(given.device, results) if given.what == "check" else True
    bench(given.device, results)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print("all equal" if ok and given.what == "check" else "" if ok else "FAILED: see above")
    return 0 if ok else 1


def machine(device: str) -> dict[str, Any]:
    """What the results depend on besides the code."""
    from jetrl_megatron.fp8.gpu.launch import triton_version

    interpreter = "CPU, Triton's interpreter: no GPU was involved"
    name = interpreter if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "triton": triton_version(), "cuda": str(torch.version.cuda)}


def backends() -> tuple[list[str], str]:
    """GPU backends that run here, and what to say about DeepGEMM."""
    reason = unusable("deep_gemm")
    if reason is None:
        return ["triton", "deep_gemm"], "DeepGEMM: present"
    return ["triton"], f"DeepGEMM: not checked: {reason}"


def check(device: str, results: dict[str, Any]) -> bool:
    """Kernels byte for byte, GEMMs within their tolerance. Prints tables, fills `results`, says whether all is well."""
    from jetrl_megatron.ops.gpu import attention
    from jetrl_megatron.ops.gpu.compare import compare_all, compare_gemms
    from jetrl_megatron.ops.gpu.linears import (
        EXPERTS,
        SHAPES,
        SMALL_EXPERTS,
        SMALL_SHAPES,
        check_bf16_linear,
        check_experts,
        check_linear,
        check_masked,
        check_routed_linear,
        check_row_parallel,
    )

    names, note = backends()
    comparisons = [*compare_all(device), *(c for name in names for c in compare_gemms(name, device))]
    by_kernel = defaultdict(list)
    for comparison in comparisons:
        by_kernel[comparison.kernel].append(comparison)
    summary = [
        (name, len(cases), sum(c.num_values for c in cases), sum(c.num_different for c in cases))
        for name, cases in by_kernel.items()
    ]
    rows = [tuple(str(cell) for cell in row) for row in summary]
    table(("kernel against the torch reference", "cases", "values", "different"), rows)
    bad = [c for c in comparisons if not c.equal]
    for comparison in bad[:20]:
        print(f"  {comparison.kernel}: {comparison.case}: {comparison.num_different} differ, first {comparison.first}")
    shapes = SHAPES if device == "cuda" else SMALL_SHAPES
    agreements = [a for name in names for shape in shapes for a in check_linear(name, device, shape)]
    for shape in shapes:
        agreements += [*check_bf16_linear(device, shape), *check_row_parallel(device, shape)]
    attended = attention.SHAPES if device == "cuda" else attention.SMALL_SHAPES
    agreements += [a for shape in attended for a in attention.check_attention(device, shape)]
    agreements += attention.check_splits(device)
    attended = attention.SHAPES if device == "cuda" else attention.SMALL_BACKWARD_SHAPES
    agreements += [a for shape in attended for a in attention.check_attention_backward(device, shape)]
    experts = EXPERTS if device == "cuda" else SMALL_EXPERTS
    agreements += [a for name in names for a in check_experts(name, device, *experts)]
    agreements += list(check_routed_linear(device, *experts))
    if "deep_gemm" in names:
        agreements += check_masked(device, *experts)
    rows = [
        (a.backend, a.gemm, a.case, f"{a.error:.2e}", f"{a.bound:.1e}", "" if a.passed else "FAILED")
        for a in agreements
    ]
    table(("backend", "property", "case", "error", "bound", ""), rows)
    print(note)
    columns = ("kernel", "cases", "values", "different")
    results["kernels"] = [dict(zip(columns, row, strict=True)) for row in summary]
    results["different"] = [asdict(c) for c in bad]
    results["gemms"] = [{**asdict(a), "passed": a.passed} for a in agreements]
    results["deep_gemm"] = note
    return bool(comparisons) and not bad and all(a.passed for a in agreements)


def bench(device: str, results: dict[str, Any]) -> None:
    """Print and keep the times; small shapes in the interpreter, where they mean nothing."""
    from jetrl_megatron.ops.gpu.bench import MODELS, SMALL_MODELS, TOKENS, attentions, bandwidths, speeds

    small = device == "cpu"
    moved = list(bandwidths(device, ((9, 256),) if small else None))
    rows = [(b.kernel, b.shape, f"{b.ms:.3f}", f"{b.gb_per_s:.0f}", f"{b.percent_of_copy:.0f} %") for b in moved]
    table(("kernel", "shape", "ms", "GB/s", "of a copy"), rows)
    names, note = backends()
    models = SMALL_MODELS if small else MODELS
    timed = [s for name in names for s in speeds(name, device, models, (130,) if small else TOKENS)]
    lines = [(s.backend, s.model, s.shape, s.direction, f"{s.ms:.3f}", f"{s.ratio:.2f}x") for s in timed]
    table(("backend", "model", "linear", "", "ms", "against BF16"), lines)
    print(note)
    attended = list(attentions(device, ((1, 150, 2, 1, 16),) if small else None))
    rows_attention = [(a.what, a.shape, f"{a.ms:.3f}", f"{a.ratio:.2f}x") for a in attended]
    table(("attention", "shape", "ms", "against torch's BF16"), rows_attention)
    results["bandwidth"] = [asdict(b) for b in moved]
    results["linears"] = [{**asdict(s), "ratio": s.ratio} for s in timed]
    results["attention"] = [{**asdict(a), "ratio": a.ratio} for a in attended]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns, left-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


if __name__ == "__main__":
    sys.exit(main())
