"""Real SGLang engines for tests, started from a policy's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.config.schema import OptimizerConfig
from jetrl_megatron.ops.precision_flow import Graph
from jetrl_megatron.rollout.engine import Completion, EngineSpec, Request, Sampling
from jetrl_megatron.rollout.sglang_engine import EnginePool
from jetrl_megatron.weights.bundle import Bundle, write_bundle

CHUNK = 64


@contextmanager
def engine(
    model_dir: Path, work_dir: Path, precision: str = "fp8", backend: str = "emulated", **spec: Any
) -> Iterator[EnginePool]:
    """A pool of one engine without weights. spec: fields of EngineSpec to override."""
    config = json.loads((model_dir / "config.json").read_text())
    quantization = {
        "quant_method": f"jetrl_{precision}",
        "granularity": "block",
        "scale_format": "fp32",
        "tp_invariant": backend == "emulated",
        "backend": backend,
    }
    folder = work_dir / "engine_model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    fields: dict[str, Any] = {
        "model_dir": folder,
        "method": f"jetrl_{precision}",
        "tensor_parallel": 1,
        "max_running_requests": 32,
        "max_total_tokens": 8192,
        "chunked_prefill_tokens": CHUNK,
        "mem_fraction_static": 0.3,
        "num_threads": 1,
        "port": 0,
        "log_file": work_dir / "engine.log",
    }
    pool = EnginePool([EngineSpec(**{**fields, **spec})], start_timeout_s=240, request_timeout_s=600, max_restarts=1)
    try:
        yield pool
    finally:
        pool.shutdown()


def publish(policy: Any, folder: Path, version: int, fp8: bool = True) -> Bundle:
    """The policy's weights as a bundle."""
    from jetrl_megatron.megatron.gather import export_bf16, export_fp8

    tensors = export_fp8(policy) if fp8 else export_bf16(policy)
    return write_bundle(folder / f"version-{version}", version, tensors, bucket_bytes=1 << 20)


def prompts(vocab_size: int, count: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 4 to `longest` tokens; every third begins with the same 48 tokens (prefix-cache hits)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(3, vocab_size, (length,), generator=generator).tolist()

    shared = draw(48)
    made = []
    for i in range(count):
        tail = draw(int(torch.randint(4, longest + 1, (1,), generator=generator)))
        made.append(tuple(shared + tail if i % 3 == 0 else tail))
    return made


def requests(
    token_ids: Sequence[tuple[int, ...]], temperature: float, top_p: float = 1.0, max_new_tokens: int = 40
) -> list[Request]:
    sampling = Sampling(temperature, top_p, -1, max_new_tokens, stop_token_ids=(0,))
    return [Request(ids, sampling, seed=1000 + i) for i, ids in enumerate(token_ids)]


def trainer_logprobs(
    policy: Any, token_ids: Sequence[tuple[int, ...]], completions: Sequence[Completion], temperature: float
) -> torch.Tensor:
    """fp32 log-probs of all completions' tokens by the training forward, packed eight to a micro-batch."""
    from jetrl_megatron.megatron.step import compute_logprobs, pack

    pairs = [([*ids, *c.token_ids], len(ids)) for ids, c in zip(token_ids, completions, strict=True)]
    batches = [pack(pairs[i : i + 8], temperature, pad_multiple=1) for i in range(0, len(pairs), 8)]
    return torch.cat(compute_logprobs(policy, batches))


def engine_logprobs(completions: Sequence[Completion]) -> torch.Tensor:
    return torch.tensor([value for c in completions for value in c.logprobs], dtype=torch.float32)


def training_flow(policy: Any) -> list[Graph]:
    """Precision-flow graphs of the policy's forward and backward on a few tokens, one per rank."""
    from jetrl_megatron.megatron.flow import record_training
    from jetrl_megatron.megatron.optimizer import make_trainable

    return record_training(make_trainable(policy, OptimizerConfig(), 1), num_tokens=8, temperature=1.0)


def rollout_flow(pool: EnginePool) -> list[Graph]:
    """Prefill and decode graphs of every engine rank."""
    request = Request(tuple(range(3, 11)), Sampling(1.0, 1.0, -1, 3, ()), seed=1)
    return pool.record_flow(request)
