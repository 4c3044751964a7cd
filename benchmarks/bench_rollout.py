"""Rollout tokens/s: real SGLang with our exact FP8 operators against stock SGLang in bf16.

The work of one step of configs/smollm2_gsm8k_cpu.yaml: 4 prompts (new ones every round), 4 samples each, decoded in one
batch of 16, with log-probs of the sampled tokens, at temperature 1 and without early stop. Both engines are started and
asked in turn; an idle engine sleeps. A first short round warms both up. Besides the wall time, the CPU time of the
engines' processes is measured, which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
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
from support import SMOLLM2, random_llama, write_results
from torch import Tensor

from jetrl_megatron.config import ModelDims
from jetrl_megatron.fp8 import Fp8Format, compact_weight_scale, quantize_weight
from jetrl_megatron.rollout.engine import EngineSpec, Request, Sampling
from jetrl_megatron.rollout.sglang_engine import SglangEngine
from jetrl_megatron.weights.bundle import write_bundle
from jetrl_megatron.weights.io import HfCheckpoint
from jetrl_megatron.weights.plan import ConversionPlan

TARGET_RATIO = 0.3
NUM_PROMPTS, SAMPLES_PER_PROMPT = 4, 4
BATCH = NUM_PROMPTS * SAMPLES_PER_PROMPT
WARM_UP_TOKENS = 2
TEMPERATURE = 1.0
START_TIMEOUT_S = 300.0
QUANTIZATION = {"quant_method": "jetrl_fp8", "granularity": "block", "scale_format": "fp32", "tp_invariant": True}


@dataclass
class Rounds:
    """Per round, warm-up left out: wall and CPU seconds of one engine."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = args.model or (SMOLLM2 if SMOLLM2.is_dir() else random_llama(work / "random_llama"))
        ours, stock = measure(model, work, args.rounds, args.prompt_tokens, args.new_tokens)
    tokens = BATCH * args.new_tokens
    title = f"{model.name}: {NUM_PROMPTS} x {SAMPLES_PER_PROMPT} samples, {args.new_tokens} new tokens"
    table = Table("engine", "tokens/s, per round", "tokens per CPU-second, per round", title=title)
    for name, rounds in (("jetrl fp8", ours), ("stock bf16", stock)):
        table.add_row(name, *(" ".join(f"{tokens / s:.1f}" for s in times) for times in (rounds.wall_s, rounds.cpu_s)))
    wall, cpu = median_ratio(stock.wall_s, ours.wall_s), median_ratio(stock.cpu_s, ours.cpu_s)
    met = wall >= TARGET_RATIO
    console = Console()
    console.print(table)
    console.print(f"ours / stock: {wall:.2f}x in wall time, {cpu:.2f}x in CPU time")
    console.print(f"target >= {TARGET_RATIO}x: {'met' if met else 'MISSED'}")
    results = {
        "model": model.name,
        "batch": BATCH,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "target": {"ratio": round(wall, 3), "at_least": TARGET_RATIO, "met": met},
        "ratio_of_cpu_time": round(cpu, 3),
        "jetrl_fp8": asdict(ours),
        "stock_bf16": asdict(stock),
    }
    write_results(f"rollout_{model.name}", results)


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="HF folder; default: SmolLM2 under runs/models, else a random Llama")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    return parser.parse_args()


def measure(model: Path, work: Path, num_rounds: int, prompt_tokens: int, new_tokens: int) -> tuple[Rounds, Rounds]:
    """(ours, stock)."""
    torch.set_num_threads(1)
    checkpoint = HfCheckpoint(model)
    spec = start_spec(checkpoint, work)
    ours = SglangEngine(spec, START_TIMEOUT_S, request_timeout_s=3600.0)
    try:
        with open(work / "stock.log", "wb") as log:
            stock = StockEngine(stock_args(spec, checkpoint, work), log)
        try:
            ours.load_weights(write_bundle(work / "bundle", 1, fp8_tensors(checkpoint), 1 << 28))
            return take_turns(ours, stock, checkpoint.config["vocab_size"], num_rounds, prompt_tokens, new_tokens)
        finally:
            stock.shutdown()
    finally:
        ours.shutdown()


def take_turns(
    ours: SglangEngine, stock: StockEngine, vocab_size: int, num_rounds: int, prompt_tokens: int, new_tokens: int
) -> tuple[Rounds, Rounds]:
    results = (Rounds(), Rounds())
    for number in range(num_rounds + 1):
        count = new_tokens if number else WARM_UP_TOKENS
        prompts = random_prompts(number, vocab_size, prompt_tokens)
        sampling = Sampling(TEMPERATURE, 1.0, -1, count, ())
        requests = [Request(tuple(ids), sampling, seed=i) for i, ids in enumerate(prompts)]
        stock_sampling = {"temperature": TEMPERATURE, "max_new_tokens": count, "ignore_eos": True}
        turns: tuple[tuple[Any, Rounds, Callable[[], list[int]]], ...] = (
            (ours, results[0], partial(generate_ours, ours, requests)),
            (stock, results[1], partial(stock.generate, prompts, stock_sampling)),
        )
        for engine, rounds, generate in turns:
            pids = engine.child_pids()
            cpu, start = cpu_seconds(pids), time.perf_counter()
            counts = generate()
            wall_s, cpu_s = time.perf_counter() - start, cpu_seconds(pids) - cpu
            assert set(counts) == {count}, counts
            if number:
                rounds.wall_s.append(round(wall_s, 3))
                rounds.cpu_s.append(round(cpu_s, 3))
    return results


def generate_ours(engine: SglangEngine, requests: list[Request]) -> list[int]:
    """Number of generated tokens per request."""
    return [len(done.token_ids) for done in engine.generate(requests)]


def start_spec(checkpoint: HfCheckpoint, work: Path) -> EngineSpec:
    """Our engine, as `jetrl train` starts it; a model without end-of-sequence id never stops early."""
    folder = work / "engine_model"
    folder.mkdir()
    config = {**checkpoint.config, "eos_token_id": None, "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config))
    return EngineSpec(
        model_dir=folder,
        method="jetrl_fp8",
        tensor_parallel=1,
        max_running_requests=BATCH,
        max_total_tokens=8192,
        chunked_prefill_tokens=2048,
        mem_fraction_static=0.3,
        num_threads=1,
        port=0,
        log_file=work / "engine.log",
    )


def stock_args(spec: EngineSpec, checkpoint: HfCheckpoint, work: Path) -> dict[str, Any]:
    """The same server, without anything of ours: no quantization, torch's attention, SGLang's own sampler."""
    folder = work / "stock_model"
    folder.mkdir()
    for file in checkpoint.path.glob("*.safetensors*"):
        (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, "eos_token_id": None}))
    ours_only = ("load_format", "custom_weight_loader", "quantization", "enable_deterministic_inference")
    args = {key: value for key, value in spec.server_args().items() if key not in ours_only}
    return args | {"model_path": str(folder), "attention_backend": "torch_native"}


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


def random_prompts(seed: int, vocab_size: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(10, vocab_size) for _ in range(count)] for _ in range(NUM_PROMPTS)]
    return [prompt for prompt in prompts for _ in range(SAMPLES_PER_PROMPT)]


if __name__ == "__main__":
    main()
