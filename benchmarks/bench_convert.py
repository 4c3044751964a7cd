"""Conversion speed and memory: ours against `cp` of the same bytes, transformers' and mbridge's load and save.

A checkpoint with the layers of Qwen3-8B is generated (random bf16 weights; --size-gb decides how many layers). It is in
the page cache when the measurements start. Every measurement runs from a process of its own that has imported torch,
`cp` too: on a virtual machine the pages that such a process leaves for the page cache can cost more than the copy. Peak
resident memory is taken from the kernel (VmHWM). Ours flush their files to disk; `cp` is measured without and with
that. CPU seconds stand beside the wall time: other work on the machine disturbs them less. `--dry-run` prints plan,
sizes and the memory bound of a 32B model without touching a tensor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mbridge_copy import mbridge_copy, prepare_mbridge
from rich.console import Console
from rich.table import Table
from support import ROOT, in_fresh_process, kernel_sets, write_results
from torch import Tensor

from jetrl_megatron.config import ModelDims
from jetrl_megatron.fp8 import Fp8Format, quantize_weight
from jetrl_megatron.megatron.convert import hf_to_megatron, megatron_to_hf
from jetrl_megatron.weights.convert.hf_files import finish_hf, hf_parts, write_safetensors
from jetrl_megatron.weights.convert.job import Job, Output
from jetrl_megatron.weights.convert.layout import Layout
from jetrl_megatron.weights.convert.memory import Memory
from jetrl_megatron.weights.convert.precision import bf16_to_fp8, fp8_to_bf16
from jetrl_megatron.weights.convert.ranks import hf_to_shards
from jetrl_megatron.weights.convert.source import row_chunks
from jetrl_megatron.weights.plan import ConversionPlan, layer_of

GIB = 1 << 30
TARGETS = {"of_cp": 0.6, "quantization": 3.0}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
QWEN3_32B = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "vocab_size": 151936,
}


@dataclass(frozen=True)
class RandomTensor:
    """bf16 noise."""

    name: str
    shape: tuple[int, ...]

    def outputs(self) -> Sequence[Output]:
        return (Output(self.name, torch.bfloat16, self.shape),)

    def chunks(self, _memory: Memory) -> Iterator[tuple[int, Tensor]]:
        row = self.shape[1] if len(self.shape) > 1 else 1
        for first, last in row_chunks(self.shape, 2 * row):
            yield 0, (0.02 * torch.randn((last - first, row))).bfloat16()


def generate(out: Path, size_gb: float) -> int:
    """Returns the bytes of the tensors."""
    fixed, layer = (_plan(layers).size_bytes for layers in (1, 2))
    num_layers = max(round((size_gb * 1e9 - (2 * fixed - layer)) / (layer - fixed)), 1)
    plan = _plan(num_layers)
    parts = hf_parts([RandomTensor(name, shape) for name, shape in plan.tensors.items()], 1)
    config = {**QWEN3_8B, "num_hidden_layers": num_layers}
    Job(out, parts, write_safetensors, finish_hf(parts, config, out), {"tool": "generate"}).run()
    return plan.size_bytes


@dataclass(frozen=True)
class Sizes:
    tensors: dict[str, tuple[int, ...]]
    size_bytes: int


def _plan(num_layers: int) -> Sizes:
    plan = ConversionPlan(ModelDims.from_hf({**QWEN3_8B, "num_hidden_layers": num_layers}))
    tensors = {hf.name: hf.shape for rule in plan.rules for hf in rule.hf}
    return Sizes(tensors, sum(2 * torch.Size(shape).numel() for shape in tensors.values()))


# ---------------------------------------------------------------- measured, each in a process of its own
def peak_bytes() -> int:
    """Peak resident memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Cost(NamedTuple):
    """Wall and CPU seconds, peak memory (0: not measured)."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def cost_of(function: Callable[[], object]) -> Cost:
    """Of a call in this process and in the processes that it starts, whose memory does not count."""
    start, before = time.perf_counter(), os.times()
    function()
    took, after = time.perf_counter() - start, os.times()
    return Cost(took, sum(after[:4]) - sum(before[:4]), peak_bytes())


def convert(make: Callable[..., Job], *arguments: Any) -> Cost:
    return cost_of(lambda: make(*arguments).run())


def script(workers: int, source: Path, out: Path) -> Cost:
    """The command as a user starts it, with the imports of every process."""
    command = [sys.executable, str(ROOT / "tools/convert/bf16_to_fp8.py"), "--workers", str(workers)]
    command += ["--hf", str(source), "--out", str(out)]
    return cost_of(lambda: subprocess.run(command, check=True, capture_output=True))._replace(peak_bytes=0)


def transformers_copy(source: Path, out: Path) -> Cost:
    from transformers import AutoModelForCausalLM

    def load_and_save() -> None:
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(out)
        flush(out)

    return cost_of(load_and_save)


def mbridge_load_and_save(source: Path, out: Path) -> Cost:
    prepare_mbridge()
    return cost_of(lambda: (mbridge_copy(source, out), flush(out)))


def copy(source: Path, out: Path, flushed: bool) -> Cost:
    def run() -> None:
        subprocess.run(["cp", "-r", str(source), str(out)], check=True)
        if flushed:
            flush(out)

    return cost_of(run)._replace(peak_bytes=0)


def flush(out: Path) -> None:
    subprocess.run(["sync", "-f", str(out)], check=True)


def quantization_ratio() -> dict[str, float]:
    """Our quantizer over the usual torch code of converters (per_block_cast_to_fp8), one thread, [4096, 12288]."""
    torch.set_num_threads(1)
    weight = (0.02 * torch.randn(4096, 12288)).bfloat16()

    def usual() -> None:
        blocks = weight.float().view(32, 128, 96, 128)
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
        (blocks * (448.0 / amax)).to(torch.float8_e4m3fn).view(4096, 12288)

    def ours() -> None:
        for first, last in row_chunks(tuple(weight.shape), 2 * 12288):
            quantize_weight(weight[first:last], Fp8Format())

    times: dict[str, list[float]] = {"usual_s": [], "ours_s": []}
    for _ in range(6):
        for name, function in (("usual_s", usual), ("ours_s", ours)):
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {**medians, "ratio": medians["usual_s"] / medians["ours_s"]}


def measure(work: Path, size_gb: float, rounds: int) -> dict[str, Any]:
    source = work / "source"
    num_bytes = generate(source, size_gb)
    kernels = kernel_sets()[0]
    fp8, dist = work / "fp8", work / "dist"
    for make, out, *rest in ((bf16_to_fp8, fp8), (hf_to_megatron, dist, Layout(2))):
        make(source, out, *rest).run()
    runs: dict[str, Callable[[Path], Cost]] = {
        "cp": lambda out: in_fresh_process(kernels, copy, source, out, False),
        "cp and flush": lambda out: in_fresh_process(kernels, copy, source, out, True),
        "transformers load + save": lambda out: in_fresh_process(kernels, transformers_copy, source, out),
        "mbridge load + save": lambda out: in_fresh_process(kernels, mbridge_load_and_save, source, out),
        "bf16_to_fp8": lambda out: in_fresh_process(kernels, convert, bf16_to_fp8, source, out),
        "fp8_to_bf16": lambda out: in_fresh_process(kernels, convert, fp8_to_bf16, fp8, out),
        "hf_to_megatron --tp 2": lambda out: in_fresh_process(kernels, convert, hf_to_megatron, source, out, Layout(2)),
        "hf_to_megatron --tp 2 --dtype fp8": lambda out: in_fresh_process(
            kernels, convert, hf_to_shards, source, out, Layout(2)
        ),
        "megatron_to_hf": lambda out: in_fresh_process(kernels, convert, megatron_to_hf, dist, out),
        "bf16_to_fp8.py, started as a command": lambda out: in_fresh_process(kernels, script, 1, source, out),
        "bf16_to_fp8.py --workers 2, the same": lambda out: in_fresh_process(kernels, script, 2, source, out),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for _ in range(rounds):  # in turn, so that other work on the machine meets all of them
        for name, function in runs.items():
            os.sync()
            costs[name].append(function(work / "out"))
            shutil.rmtree(work / "out")
    largest = max(_layer_bytes(QWEN3_8B | {"num_hidden_layers": 1}))
    return {
        "num_bytes": num_bytes,
        "largest_layer_bytes": largest,
        "memory_bound_bytes": 2 * largest + GIB,
        "wall_s": {name: [round(cost.wall_s, 3) for cost in found] for name, found in costs.items()},
        "cpu_s": {name: [round(cost.cpu_s, 3) for cost in found] for name, found in costs.items()},
        "peak_bytes": {name: max(cost.peak_bytes for cost in found) for name, found in costs.items()},
        "quantization": in_fresh_process(kernels, quantization_ratio),
    }


def _layer_bytes(config: dict[str, Any]) -> list[int]:
    """bf16 bytes of every layer, embedding and lm_head."""
    plan = ConversionPlan(ModelDims.from_hf(config))
    sizes: dict[object, int] = {}
    for rule in plan.rules:
        layer = layer_of(rule)
        key = rule.megatron_name if layer is None else layer
        sizes[key] = sizes.get(key, 0) + sum(2 * torch.Size(hf.shape).numel() for hf in rule.hf)
    return list(sizes.values())


def show(results: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print the table; returns the targets and whether they are met."""
    num_bytes, bound = results["num_bytes"], results["memory_bound_bytes"]
    wall, cpu = (
        {name: statistics.median(values) for name, values in results[kind].items()} for kind in ("wall_s", "cpu_s")
    )
    columns = ("wall s", "of cp", "of cp and flush", "CPU s", "of cp, CPU", "peak GB")
    table = Table("what", *columns, title=f"{num_bytes / 1e9:.2f} GB of bf16, one process")
    targets = {}
    for name, took in wall.items():
        ratios = [wall["cp"] / took, wall["cp and flush"] / took, cpu["cp"] / cpu[name]]
        peak = results["peak_bytes"][name]
        cells = (took, *ratios[:2], cpu[name], ratios[2])
        table.add_row(name, *(f"{cell:.2f}" for cell in cells), f"{peak / 1e9:.2f}" if peak else "")
        if "_to_" in name and ".py" not in name:
            targets[name] = {
                **dict(zip(("of_cp", "of_cp_and_flush", "of_cp_cpu"), (round(r, 3) for r in ratios), strict=True)),
                "met": {"speed": ratios[1] >= TARGETS["of_cp"], "memory": peak <= bound},
            }
    console.print(table)
    quantization = results["quantization"]["ratio"]
    console.print(f"memory bound: {bound / 1e9:.2f} GB; quantization {quantization:.1f}x of the usual torch code")
    targets["quantization"] = {
        "ratio": round(quantization, 2),
        "met": {"speed": quantization >= TARGETS["quantization"]},
    }
    return targets


def dry_run(console: Console) -> None:
    """Sizes of a 32B conversion, from shapes alone."""
    plan = ConversionPlan(ModelDims.from_hf(QWEN3_32B))
    layers = _layer_bytes(QWEN3_32B)
    weights = [(rule, torch.Size(hf.shape)) for rule in plan.rules for hf in rule.hf]
    bf16 = sum(2 * shape.numel() for _, shape in weights)
    fp8 = sum(shape.numel() + 4 * -(-shape[0] // 128) * -(-shape[1] // 128) for r, shape in weights if r.quantized)
    fp8 += sum(2 * shape.numel() for rule, shape in weights if not rule.quantized)
    largest = max(2 * sum(torch.Size(hf.shape).numel() for hf in rule.hf) for rule in plan.rules)
    console.print(
        f"Qwen3-32B: {len(weights)} HF tensors, {len(plan.rules)} Megatron parameters, {bf16 / 1e9:.1f} GB bf16"
    )
    console.print(f"block FP8: {fp8 / 1e9:.1f} GB; torch_dist: {len(layers)} files, {bf16 / 1e9:.1f} GB bf16")
    for tp in (1, 2, 4, 8):
        Layout(tp, 4).check(plan)
        console.print(f"TP {tp}, PP 4: works; FP8 shards: {4 * tp} files of about {fp8 / 4 / tp / 1e9:.2f} GB")
    console.print(f"largest parameter {largest / 1e9:.2f} GB, largest layer {max(layers) / 1e9:.2f} GB")
    console.print(f"memory: at most {(2 * max(layers) + GIB) / 1e9:.2f} GB per process, whatever the number of layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size-gb", type=float, default=1.0, help="of the generated checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="on the disk to measure; default: the system's temporary folder")
    parser.add_argument("--dry-run", action="store_true", help="plan and memory of a 32B model, nothing is converted")
    args = parser.parse_args()
    console = Console(width=120)
    if args.dry_run:
        dry_run(console)
        return
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        results = measure(Path(folder), args.size_gb, args.rounds)
    results["targets"] = show(results, console)
    write_results("convert", results)


if __name__ == "__main__":
    main()
