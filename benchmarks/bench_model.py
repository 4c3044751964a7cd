"""Block, model, training step, memory and weight sync: Megatron-Core with our FP8 operators against stock bf16.

Stock is the transformers model of the same shape (Qwen3, SDPA attention) in bf16, on the same tokens, measured in turns
in one process. One device: `--backend triton|deep_gemm` on a GPU, e.g. `--shape 14B --layers 2 --sequences 4 --length
2048`; emulated on a CPU, where only the ratio of small shapes means something. Our optimizer is Megatron's Adam with
fp32 masters (Transformer Engine's or Apex's fused one where installed); stock has none, so it is reported alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from support import SHAPES, qwen3_config, random_qwen3, write_results
from torch import Tensor

from jetrl_megatron.config import ModelDims
from jetrl_megatron.config.schema import OptimizerConfig, ParallelConfig, SyncConfig
from jetrl_megatron.fp8 import Fp8Recipe
from jetrl_megatron.fp8.backends import use_backend
from jetrl_megatron.megatron.groups import initialize, shutdown
from jetrl_megatron.megatron.linear import LinearPrecision
from jetrl_megatron.megatron.model import Policy, build_policy
from jetrl_megatron.megatron.optimizer import Trainable, make_trainable
from jetrl_megatron.megatron.step import MicroBatch, compute_logprobs, pack
from jetrl_megatron.rollout.engine import EngineSpec
from jetrl_megatron.rollout.sglang_engine import EnginePool
from jetrl_megatron.sync.weight_sync import SyncReport, WeightSync

START_TIMEOUT_S, REQUEST_TIMEOUT_S = 600.0, 600.0
Work = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Row:
    """Medians over the rounds. ratio: stock's time over ours, above 1 is faster; peak: bytes above rest, GPU only."""

    what: str
    ours_ms: float
    stock_ms: float | None
    ratio: float | None
    ours_peak: int | None
    stock_peak: int | None


def make_ours(config: dict[str, Any], args: argparse.Namespace) -> Trainable:
    parallel = ParallelConfig(tp_invariant=args.backend == "emulated")
    precision = LinearPrecision(True, Fp8Recipe(), parallel.tp_invariant)
    policy = build_policy(ModelDims.from_hf(config), parallel, initialize(parallel, seed=0), precision)
    with torch.no_grad():
        for rule, parameter, _ in policy.named_rules():
            parameter.fill_(1.0) if "norm" in rule.megatron_name else parameter.normal_(std=0.02)
    return make_trainable(policy, OptimizerConfig(), num_updates=1000)


def work_of_ours(trainable: Trainable, ids: Tensor) -> Work:
    batch = pack([(row, 1) for row in ids.tolist()], 1.0, 1)
    policy, layer = trainable.policy, trainable.policy.models[0].decoder.layers[0]
    sequences = batch.sequences.to(policy.device)
    x = torch.randn(batch.num_tokens, 1, policy.dims.hidden_size, device=policy.device).bfloat16().requires_grad_()

    def block() -> Tensor:
        y: Tensor = layer(x, attention_mask=None, packed_seq_params=sequences)[0]
        return y

    return {
        "block, forward": no_grad(block),
        "block, forward + backward": lambda: block().float().sum().backward(),
        "log-probs": lambda: compute_logprobs(policy, [batch]),
        "gradients": lambda: trainable.accumulate([batch], mean),
        "optimizer": trainable.apply,
    }


def mean(logprobs: Tensor, _batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
    return logprobs.mean(), {}


def work_of_stock(config: dict[str, Any], ids: Tensor, device: torch.device) -> Work:
    model = random_qwen3(config).to(device)
    model.config.use_cache = False
    ids = ids.to(device)
    x = torch.randn(*ids.shape, config["hidden_size"], device=device).bfloat16().requires_grad_()
    angles = model.model.rotary_emb(x, torch.arange(ids.shape[1], device=device)[None])

    def block() -> Tensor:
        y = model.model.layers[0](x, position_embeddings=angles, attention_mask=None)
        return y[0] if isinstance(y, tuple) else y

    def logprobs() -> Tensor:
        logits = model(ids).logits[:, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])

    def gradients() -> None:
        model.zero_grad()
        logprobs().mean().backward()

    return {
        "block, forward": no_grad(block),
        "block, forward + backward": lambda: block().float().sum().backward(),
        "log-probs": no_grad(logprobs),
        "gradients": gradients,
    }


def no_grad(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return function()

    return call


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, int | None]:
    """(milliseconds, bytes allocated at most above rest) of one call."""
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    function()
    if on_gpu:
        torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3
    return ms, torch.cuda.max_memory_allocated() - before if on_gpu else None


def rows(ours: Work, stock: Work, rounds: int, device: torch.device) -> Iterator[Row]:
    """Both sides in turns, after one round that warms up."""
    for what, function in ours.items():
        mine, theirs = [], []
        for number in range(rounds + 1):
            sides = [(mine, function)] + ([(theirs, stock[what])] if what in stock else [])
            for times, call in sides:
                measured = timed(call, device)
                if number:
                    times.append(measured)
        ours_ms = statistics.median(ms for ms, _ in mine)
        if not theirs:
            yield Row(what, ours_ms, None, None, mine[0][1], None)
            continue
        ratio = statistics.median(b / a for (a, _), (b, _) in zip(mine, theirs, strict=True))
        yield Row(what, ours_ms, statistics.median(ms for ms, _ in theirs), ratio, mine[0][1], theirs[0][1])


def measure_sync(policy: Policy, config: dict[str, Any], args: argparse.Namespace, work: Path) -> SyncReport:
    """The second update of a real engine on the same device, which the trainer waits for."""
    folder = work / "engine_model"
    folder.mkdir()
    quantization = {
        "quant_method": "jetrl_fp8",
        "granularity": "block",
        "scale_format": "fp32",
        "tp_invariant": policy.precision.tp_invariant,
        "backend": args.backend,
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    spec = EngineSpec(
        model_dir=folder,
        method="jetrl_fp8",
        tensor_parallel=1,
        max_running_requests=8,
        max_total_tokens=8192,
        chunked_prefill_tokens=2048,
        mem_fraction_static=0.3,
        num_threads=1,
        port=0,
        log_file=work / "engine.log",
        first_gpu=None if args.backend == "emulated" else 0,
    )
    pool = EnginePool([spec], START_TIMEOUT_S, REQUEST_TIMEOUT_S, max_restarts=0)
    sync = WeightSync(policy, pool, SyncConfig(), work, fp8=True)
    try:
        first = policy.precision.version.value + 1
        sync.publish(first)
        return sync.publish(first + 1)
    finally:
        sync.close()
        pool.shutdown()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("emulated", "triton", "deep_gemm"), default="emulated")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if (args.backend == "emulated") == torch.cuda.is_available():
        raise SystemExit(
            f"--backend: {args.backend} with CUDA {'' if torch.cuda.is_available() else 'not '}available; "
            "rule: triton or deep_gemm on a GPU, emulated without; fix: --backend"
        )
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    use_backend(args.backend)
    store = torch.distributed.HashStore()
    on_gpu = args.backend != "emulated"
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    config = qwen3_config(args.shape, args.layers, args.length)
    torch.manual_seed(0)
    ids = torch.randint(SHAPES[args.shape][-1], (args.sequences, args.length))
    trainable = make_ours(config, args)
    device = trainable.policy.device
    stock = work_of_stock(config, ids, device)
    measured = list(rows(work_of_ours(trainable, ids), stock, args.rounds, device))
    del stock
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()  # the engine takes its share of what is free
    with tempfile.TemporaryDirectory() as folder:
        report = measure_sync(trainable.policy, config, args, Path(folder))
    show(args, measured, report)
    hardware = {"device": torch.cuda.get_device_name() if on_gpu else "cpu"}
    results = {**hardware, **vars(args), "rows": [asdict(row) for row in measured], "sync": asdict(report)}
    write_results(f"model_{args.shape}_{args.backend}", results)
    shutdown()


def show(args: argparse.Namespace, measured: list[Row], report: SyncReport) -> None:
    title = f"{args.shape}, {args.layers} layers, {args.sequences} x {args.length} tokens, {args.backend}"
    table = Table("what", "ours (ms)", "stock bf16 (ms)", "stock / ours", "peak, ours (MiB)", "stock", title=title)
    for row in measured:
        peaks = (None if peak is None else peak / 2**20 for peak in (row.ours_peak, row.stock_peak))
        numbers = (row.ours_ms, row.stock_ms, row.ratio, *peaks)
        table.add_row(row.what, *("" if number is None else f"{number:.2f}" for number in numbers))
    console = Console()
    console.print(table)
    seconds = report.quantize_s + report.transfer_s
    console.print(
        f"sync: {report.num_bytes / 1e6:.1f} MB in {seconds:.3f} s ({report.num_bytes / seconds / 1e9:.2f} GB/s): "
        f"quantize {report.quantize_s:.3f} s, gather, write, load {report.transfer_s:.3f} s"
    )


if __name__ == "__main__":
    main()
