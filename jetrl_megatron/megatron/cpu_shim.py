"""Makes Megatron-Core 0.19.2 run on a torch without CUDA (gloo). `install` does nothing where CUDA is available.

Megatron asks `torch.cuda` for the current device, streams and RNG states, and writes device="cuda" literally. This
module answers those questions for the CPU. It is the only place that patches torch or Megatron for that purpose.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SUPPORTED_MEGATRON = "0.19.2"
_CPU = torch.device("cpu")
_installed = False


class _Stream:
    """Stands for torch.cuda.Stream: everything is already in order on a CPU."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = _CPU
        self.cuda_stream = 0

    def wait_stream(self, *_args: Any) -> None: ...

    def wait_event(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" and .cuda() stay on the CPU; .type() names the cuda type that Megatron compares with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def install() -> None:
    """Patch once per process, before any Megatron module is built. Raises RuntimeError for another Megatron version."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    found = importlib.metadata.version("megatron-core")
    if found != SUPPORTED_MEGATRON:
        raise RuntimeError(f"megatron-core {found}; rule: the CPU shim knows {SUPPORTED_MEGATRON}; fix: run make setup")
    _installed = True
    _patch_torch_cuda()
    _patch_megatron()
    mode = _CudaMeansCpu()
    mode.__enter__()
    _reenter_mode_in_backward(mode)


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda.manual_seed_all = cuda.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as tp_random
    from megatron.core.transformer.moe import token_dispatcher

    tp_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tp_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes of the expert all-to-all; the stock function makes them numpy only when they come from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _reenter_mode_in_backward(mode: TorchFunctionMode) -> None:
    """Torch pops function modes while backward runs; activation recompute runs Megatron code there."""
    import torch.autograd as autograd
    import torch.autograd.graph as graph

    original = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
