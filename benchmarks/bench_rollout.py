"""Rollout tokens/s: real SGLang with our exact FP8 operators against stock SGLang in bf16.

Both engines are started, then asked in turn for the same prompts (new ones every round, so that no prefix cache helps),
with log-probs of the sampled tokens, as RL needs them. An idle engine sleeps. The first round warms both up.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
BATCH = 16
TEMPERATURE = 1.0
START_TIMEOUT_S = 300.0
QUANTIZATION = {"quant_method": "jetrl_fp8", "granularity": "block", "scale_format": "fp32", "tp_invariant": True}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = args.model or (SMOLLM2 if SMOLLM2.is_dir() else random_llama(work / "random_llama"))
        seconds = measure(model, work, args.rounds, args.prompt_tokens, args.new_tokens)
    tokens = BATCH * args.new_tokens
    rates = {name: [tokens / value for value in values] for name, values in seconds.items()}
    per_s = {name: statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(ours / stock for ours, stock in zip(*rates.values(), strict=True))
    title = f"{model.name}, batch {BATCH}, {args.new_tokens} new tokens"
    table = Table("engine", "tokens/s (median)", "rounds", title=title)
    for engine, value in per_s.items():
        table.add_row(engine, f"{value:.1f}", " ".join(f"{rate:.1f}" for rate in rates[engine]))
    console = Console()
    console.print(table)
    met = ratio >= TARGET_RATIO
    console.print(f"ours / stock: {ratio:.2f}x; target >= {TARGET_RATIO}x: {'met' if met else 'MISSED'}")
    results = {
        "model": model.name,
        "batch": BATCH,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "tokens_per_s": {engine: [round(rate, 2) for rate in values] for engine, values in rates.items()},
        "target": {"ratio": round(ratio, 3), "at_least": TARGET_RATIO, "met": met},
    }
    write_results(f"rollout_{model.name}", results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="HF folder; default: SmolLM2 under runs/models, else a random Llama")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    return parser.parse_args()


def measure(model: Path, work: Path, rounds: int, prompt_tokens: int, new_tokens: int) -> dict[str, list[float]]:
    """Seconds per round of either engine, warm-up left out."""
    torch.set_num_threads(1)
    checkpoint = HfCheckpoint(model)
    spec = start_spec(checkpoint, work)
    ours = SglangEngine(spec, START_TIMEOUT_S, request_timeout_s=3600.0)
    try:
        with open(work / "stock.log", "wb") as log:
            stock = StockEngine(stock_args(spec, checkpoint, work), log)
        try:
            ours.load_weights(write_bundle(work / "bundle", 1, fp8_tensors(checkpoint), 1 << 28))
            seconds: dict[str, list[float]] = {"jetrl fp8": [], "stock bf16": []}
            sampling = Sampling(TEMPERATURE, 1.0, -1, new_tokens, ())
            stock_sampling = {"temperature": TEMPERATURE, "max_new_tokens": new_tokens, "ignore_eos": True}
            for number in range(rounds + 1):
                prompts = random_prompts(number, checkpoint.config["vocab_size"], prompt_tokens)
                requests = [Request(tuple(ids), sampling, seed=i) for i, ids in enumerate(prompts)]
                start = time.perf_counter()
                completions = ours.generate(requests)
                middle = time.perf_counter()
                stock_counts = stock.generate(prompts, stock_sampling)
                end = time.perf_counter()
                assert {len(done.token_ids) for done in completions} == set(stock_counts) == {new_tokens}
                if number:
                    seconds["jetrl fp8"].append(middle - start)
                    seconds["stock bf16"].append(end - middle)
        finally:
            stock.shutdown()
    finally:
        ours.shutdown()
    return seconds


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
    return [[draw.randrange(10, vocab_size) for _ in range(count)] for _ in range(BATCH)]


if __name__ == "__main__":
    main()
