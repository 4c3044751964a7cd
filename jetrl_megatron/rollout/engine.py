"""Engines as the trainer sees them: requests in, completions out, weights by bundle, death by a named error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jetrl_megatron.ops.precision_flow import Graph
from jetrl_megatron.samples import FinishReason
from jetrl_megatron.weights.bundle import Bundle


class EngineDiedError(RuntimeError):
    """An engine's process ended or stopped answering; the message carries its exit code and the end of its log."""


class EngineRefusedError(RuntimeError):
    """An engine answered with an error and lives on."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of one request. temperature 0: greedy; top_k -1: off; stop ids end a response and belong to it."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """seed: 63-bit integer that determines the draws of this request."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Completion:
    """token_ids [n] with their fp32 log-probs [n]; num_retractions: how often the scheduler took the request back;
    routed_experts: where the engine records them, ids [prompt + n - 1, layers, k] of the tokens that it ran, slots in
    the router's order."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    num_retractions: int = 0
    routed_experts: NDArray[np.int32] | None = field(default=None, compare=False)


class RolloutEngine(Protocol):
    """What the trainer needs of an engine."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests. Raises EngineDiedError."""

    def load_weights(self, bundle: Bundle) -> None:
        """Replace all weights by the bundle's, or none. Raises EngineRefusedError, EngineDiedError."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Prefill log-probs of tokens 1.. of each sequence at temperature 1."""

    def record_flow(self, request: Request) -> list[Graph]:
        """Precision-flow graphs (prefill, decode) of every rank while `request` is answered."""

    def shutdown(self) -> None:
        """Stop the engine and all its processes."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine. model_dir: folder with config.json (weights arrive by `load_weights`); expert_parallel:
    1, or all tensor_parallel ranks share the experts; record_routes: completions carry the routed experts; first_gpu:
    the engine takes tensor_parallel GPUs from there on, of those that CUDA_VISIBLE_DEVICES leaves; None: on the CPU;
    cuda_graphs: decode through CUDA graphs, where the engine has a GPU and its kernels read nothing on the host."""

    model_dir: Path
    method: str
    tensor_parallel: int
    max_running_requests: int
    max_total_tokens: int
    chunked_prefill_tokens: int
    mem_fraction_static: float
    num_threads: int
    port: int
    log_file: Path
    expert_parallel: int = 1
    record_routes: bool = False
    first_gpu: int | None = None
    cuda_graphs: bool = False

    @property
    def flow_folder(self) -> Path:
        """Exists while the engine is asked for its precision-flow graphs."""
        return self.log_file.with_suffix(".flow")

    def server_args(self) -> dict[str, Any]:
        """Keyword arguments of `sglang.Engine`."""
        args: dict[str, Any] = {
            "model_path": str(self.model_dir),
            "load_format": "dummy",
            "custom_weight_loader": ["jetrl_megatron.rollout.weight_loader.load_bundle"],
            "quantization": self.method,
            "dtype": "bfloat16",
            "attention_backend": "jetrl",
            "sampling_backend": "pytorch",
            "enable_deterministic_inference": True,
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,  # else the scheduler spins on a whole core while the trainer works
            "tp_size": self.tensor_parallel,
            "ep_size": self.expert_parallel,
            "enable_return_routed_experts": self.record_routes,
            "max_running_requests": self.max_running_requests,
            "max_total_tokens": self.max_total_tokens,
            "chunked_prefill_size": self.chunked_prefill_tokens,
            "mem_fraction_static": self.mem_fraction_static,
            "random_seed": 0,
            "log_level": "error",
            "device": "cpu" if self.first_gpu is None else "cuda",
        }
        if self.first_gpu is not None:
            args["base_gpu_id"] = self.first_gpu
            args["cuda_graph_backend_decode"] = "full" if self.cuda_graphs else "disabled"
            args["cuda_graph_backend_prefill"] = "disabled"  # prefill reads lengths on the host
        if self.port:
            args["port"] = self.port
        return args
