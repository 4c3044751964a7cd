"""Rollout tokens/s: real SGLang with our exact FP8 operators, in both kernel sets, against stock SGLang in bf16.

The work of one step of configs/smollm2_gsm8k_cpu.yaml: 4 prompts (new ones every round), 4 samples each, decoded in one
batch of 16, with log-probs of the sampled tokens, at temperature 1 and without early stop. Both engines are started and
asked in turn; an idle engine sleeps. A first short round warms both up. Besides the wall time, the CPU time of the
engines' processes is measured, which other load on the machine disturbs less.

With `--backend triton|deep_gemm` on a GPU: GPU 0, one engine after the other, each with most of the memory; stock
SGLang with its defaults (attention, overlapped scheduling, CUDA graphs); e.g.
`--shape 8B --prompts 512 --samples 1 --concurrent 128 --prompt-tokens 512 --new-tokens 4096`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from stock_engine import StockEngine
from support import SHAPES, SMOLLM2, kernel_sets, qwen3_config, random_llama, random_qwen3, using_kernels, write_results
from torch import Tensor

from jetrl_megatron.config import ModelDims
from jetrl_megatron.fp8 import Fp8Format, compact_weight_scale, quantize_weight
from jetrl_megatron.rollout.engine import EngineSpec, Request, Sampling
from jetrl_megatron.rollout.sglang_engine import SglangEngine
from jetrl_megatron.weights.bundle import Bundle, write_bundle
from jetrl_megatron.weights.io import HfCheckpoint
from jetrl_megatron.weights.plan import ConversionPlan

TARGET_RATIOS = {"compiled": 1.0, "torch": 0.3}
OURS, STOCK = "jetrl fp8, {}", "stock bf16"
WARM_UP_TOKENS = 2
TEMPERATURE = 1.0
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 600.0, 4 * 3600.0
GPU_FRACTION = 0.85
SPARE_TOKENS = 2  # of the context that SGLang keeps back from a request
QUANTIZATION = {"quant_method": "jetrl_fp8", "granularity": "block", "scale_format": "fp32"}
EMULATED = "emulated"

Engine = SglangEngine | StockEngine


@dataclass
class Rounds:
    """Per round, warm-up left out: wall and CPU seconds of one engine."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = args.model or a_model(work, args)
        measured = measure(model, work, args)
    tokens, stock = args.prompts * args.samples * args.new_tokens, measured[STOCK]
    title = f"{model.name}: {args.prompts} x {args.samples} samples, {args.new_tokens} new tokens"
    table = Table("engine", "tokens/s", "tokens per CPU-second", "of stock, wall", "of stock, CPU", title=title)
    ratios = {}
    for name, rounds in measured.items():
        rates = (" ".join(f"{tokens / s:.1f}" for s in times) for times in (rounds.wall_s, rounds.cpu_s))
        ratios[name] = {
            "wall": round(median_ratio(stock.wall_s, rounds.wall_s), 3),
            "cpu": round(median_ratio(stock.cpu_s, rounds.cpu_s), 3),
        }
        table.add_row(name, *rates, *(f"{ratio:.2f}" for ratio in ratios[name].values()))
    console = Console()
    console.print(table)
    targets = {}
    for kernels in args.kernels if args.backend == EMULATED else ():
        name, at_least = OURS.format(kernels), TARGET_RATIOS[kernels]
        met = ratios[name]["wall"] >= at_least
        console.print(f"{name}: target >= {at_least}x of stock: {'met' if met else 'MISSED'}")
        targets[name] = {"ratio": ratios[name]["wall"], "at_least": at_least, "met": met}
    results = {
        "model": model.name,
        "backend": args.backend,
        "prompts": args.prompts,
        "samples": args.samples,
        "concurrent": args.concurrent,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "targets": targets,
        "ratios_to_stock": ratios,
        "seconds": {name: asdict(rounds) for name, rounds in measured.items()},
    }
    suffix = "" if args.backend == EMULATED else f"_{args.backend}_{args.new_tokens}"
    write_results(f"rollout_{model.name}{suffix}", results)


def a_model(work: Path, args: argparse.Namespace) -> Path:
    if args.shape is None:
        return SMOLLM2 if SMOLLM2.is_dir() else random_llama(work / "random_llama")
    folder = work / f"random_qwen3_{args.shape}"
    length = args.prompt_tokens + args.new_tokens + SPARE_TOKENS
    random_qwen3(qwen3_config(args.shape, args.layers, length)).save_pretrained(folder)
    return folder


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="HF folder; default: SmolLM2 under runs/models, else a random Llama")
    parser.add_argument("--shape", choices=SHAPES, help="a random Qwen3 of this shape instead")
    parser.add_argument("--layers", type=int, default=36, help="of --shape")
    parser.add_argument("--kernels", nargs="+", default=kernel_sets(), help="kernel sets to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--concurrent", type=int, help="requests decoded together (default: all)")
    parser.add_argument("--backend", choices=(EMULATED, "triton", "deep_gemm"), default=EMULATED)
    args = parser.parse_args()
    args.concurrent = args.concurrent or args.prompts * args.samples
    if args.backend != EMULATED:
        args.kernels = [args.backend]
    return args


def measure(model: Path, work: Path, args: argparse.Namespace) -> dict[str, Rounds]:
    """By engine: ours in every kernel set, and stock. On a CPU all are up and take turns; a GPU's memory is for one."""
    torch.set_num_threads(1)
    checkpoint = HfCheckpoint(model)
    bundle = write_bundle(work / "bundle", 1, fp8_tensors(checkpoint), 1 << 28)
    specs = {kernels: start_spec(checkpoint, work, kernels, args) for kernels in args.kernels}
    starts: dict[str, Callable[[], Engine]] = {
        OURS.format(kernels): partial(start_ours, spec, kernels, bundle) for kernels, spec in specs.items()
    }
    stock = stock_args(next(iter(specs.values())), checkpoint, work)
    starts[STOCK] = lambda: StockEngine(stock, open(work / "stock.log", "wb"))  # noqa: SIM115
    vocab_size = checkpoint.config["vocab_size"]
    together = [list(starts)] if args.backend == EMULATED else [[name] for name in starts]
    results: dict[str, Rounds] = {}
    for names in together:
        with contextlib.ExitStack() as started:
            engines = {}
            for name in names:
                engines[name] = starts[name]()
                started.callback(engines[name].shutdown)
            results |= take_turns(engines, vocab_size, args)
    return results


def start_ours(spec: EngineSpec, kernels: str, bundle: Bundle) -> SglangEngine:
    with using_kernels(kernels):
        engine = SglangEngine(spec, START_TIMEOUT_S, REQUEST_TIMEOUT_S)
    engine.load_weights(bundle)
    return engine


def take_turns(engines: dict[str, Engine], vocab_size: int, args: argparse.Namespace) -> dict[str, Rounds]:
    results = {name: Rounds() for name in engines}
    for number in range(args.rounds + 1):
        count = args.new_tokens if number else WARM_UP_TOKENS
        prompts = random_prompts(number, vocab_size, args)
        for name, engine in engines.items():
            pids = engine.child_pids()
            cpu, start = cpu_seconds(pids), time.perf_counter()
            counts = generate(engine, prompts, count)
            wall_s, cpu_s = time.perf_counter() - start, cpu_seconds(pids) - cpu
            assert set(counts) == {count}, counts
            if number:
                results[name].wall_s.append(round(wall_s, 3))
                results[name].cpu_s.append(round(cpu_s, 3))
    return results


def generate(engine: Engine, prompts: list[list[int]], count: int) -> list[int]:
    """Number of generated tokens per prompt."""
    if isinstance(engine, StockEngine):
        sampling = {"temperature": TEMPERATURE, "max_new_tokens": count, "ignore_eos": True}
        return engine.generate(prompts, sampling)
    requests = [Request(tuple(ids), Sampling(TEMPERATURE, 1.0, -1, count, ()), seed=i) for i, ids in enumerate(prompts)]
    return [len(done.token_ids) for done in engine.generate(requests)]


def start_spec(checkpoint: HfCheckpoint, work: Path, kernels: str, args: argparse.Namespace) -> EngineSpec:
    """Our engine, as `jetrl train` starts it; a model without end-of-sequence id never stops early."""
    folder = work / f"engine_model_{kernels}"
    folder.mkdir()
    emulated = args.backend == EMULATED
    quantization = {**QUANTIZATION, "tp_invariant": emulated, "backend": args.backend}
    config = {**checkpoint.config, "eos_token_id": None, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return EngineSpec(
        model_dir=folder,
        method="jetrl_fp8",
        tensor_parallel=1,
        max_running_requests=args.concurrent,
        max_total_tokens=max(8192, args.concurrent * (args.prompt_tokens + args.new_tokens)),
        chunked_prefill_tokens=2048,
        mem_fraction_static=0.3 if emulated else GPU_FRACTION,
        num_threads=1,
        port=0,
        log_file=work / f"engine_{kernels}.log",
        first_gpu=None if emulated else 0,
        cuda_graphs=not emulated,
    )


def stock_args(spec: EngineSpec, checkpoint: HfCheckpoint, work: Path) -> dict[str, Any]:
    """The same server, without anything of ours: no quantization, SGLang's own sampler, and on a CPU torch's
    attention; on a GPU SGLang's defaults but for the share of the memory and the number of requests."""
    folder = work / "stock_model"
    folder.mkdir()
    for file in checkpoint.path.glob("*.safetensors*"):
        (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, "eos_token_id": None}))
    ours_only = {"load_format", "custom_weight_loader", "quantization", "enable_deterministic_inference"}
    args = spec.server_args() | {"model_path": str(folder), "attention_backend": "torch_native"}
    if spec.first_gpu is not None:
        ours_only |= {key for key in args if key.startswith("cuda_graph")}
        ours_only |= {"attention_backend", "sampling_backend", "disable_overlap_schedule", "sleep_on_idle"}
        ours_only |= {"chunked_prefill_size", "max_total_tokens"}
    return {key: value for key, value in args.items() if key not in ours_only}


def fp8_tensors(checkpoint: HfCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """A whole weight bundle from the checkpoint: FP8 linears with their scale grids, the rest in bf16."""
    plan = ConversionPlan(ModelDims.from_hf(checkpoint.config))
    quantized_names = set(plan.quantized_hf_names())
    for name in plan.hf_names():
        tensor = checkpoint.tensor(name).bfloat16()
        if name in quantized_names:
            quantized = quantize_weight(tensor, Fp8Format())
            yield name, quantized.data
            yield f"{name}_scale_inv", compact_weight_scale(quantized.scale)
        else:
            yield name, tensor


def random_prompts(seed: int, vocab_size: int, args: argparse.Namespace) -> list[list[int]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(10, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    return [prompt for prompt in prompts for _ in range(args.samples)]


if __name__ == "__main__":
    main()
