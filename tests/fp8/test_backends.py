"""Which FP8 backend runs: chosen by name, refused with a reason, recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Recipe, Fp8Weight, backends, quantize_weight, whole
from jetrl_megatron.fp8.emulated import Emulated
from jetrl_megatron.fp8.gpu.backend import check_one_chain
from jetrl_megatron.ops import kernels
from jetrl_megatron.ops.recorder import record


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_active", [])


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """torch as on a machine with these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])


def test_names() -> None:
    """An unknown name lists the known ones; every known one loads without a GPU and has all methods."""
    with pytest.raises(ValueError, match=r"backend: 'cublas'; .*\['deep_gemm', 'emulated', 'triton'\]"):
        backends.load("cublas")
    methods = [name for name in vars(backends.Backend) if not name.startswith("_")]
    assert "wgrad" in methods
    for name in backends.MODULES:
        assert all(callable(getattr(backends.load(name), method)) for method in methods)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is emulated; an explicit GPU backend is refused with its reason and leaves the choice as it was."""
    gpus(monkeypatch)
    assert backends.use_backend("auto") == "emulated"
    for name in ("triton", "deep_gemm"):
        with pytest.raises(ValueError, match=f"backend: {name} cannot run here: .* needs an NVIDIA GPU"):
            backends.use_backend(name)
    assert backends.active_name() == "emulated"


@pytest.mark.parametrize(
    ("capabilities", "name", "words"),
    [
        ([(8, 0)], "triton", "compute capability 8.9, GPU 0 has 8.0"),
        ([(9, 0), (8, 6)], "triton", "GPU 1 has 8.6"),
        ([(8, 9)], "deep_gemm", "compute capability 9.0 up to 10.0, GPU 0 has 8.9"),
        ([(10, 0)], "deep_gemm", "GPU 0 has 10.0"),
        ([(9, 0)], "deep_gemm", "nvcc|deep_gemm"),
    ],
)
def test_unsuitable_gpus(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], name: str, words: str
) -> None:
    """The weakest GPU decides; DeepGEMM's kernels of this adapter are Hopper's alone and need nvcc and the package."""
    gpus(monkeypatch, *capabilities)
    reason = backends.unusable(name)
    assert reason is not None
    assert any(word in reason for word in words.split("|"))


def test_auto_takes_triton_on_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, (8, 9))
    assert backends.resolve("auto") == "triton"


def test_one_chain_only() -> None:
    """Segmented row-parallel sums exist on the emulated backend alone."""
    check_one_chain(1)
    with pytest.raises(ValueError, match=r"num_segments: 4; .* fix: parallel\.tp_invariant: false"):
        check_one_chain(4)


def test_the_recorded_graph_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of FP8 linears, forward and backward, carry the backend's name; with the emulated one the kernel set's."""

    def kernels_of_nodes() -> dict[Any, set[str]]:
        recipe = Fp8Recipe()
        w = torch.randn(128, 128).bfloat16()
        master = torch.nn.Parameter(w)
        with record() as nodes:
            x = ops.swiglu(torch.randn(3, 256).bfloat16()).requires_grad_()
            ops.fp8_linear(
                x, master, Fp8Weight.of(quantize_weight(w, recipe.format), whole(128)), recipe
            ).sum().backward()
        return {name: {n.kernels for n in nodes if n.operator == name} for name in ("swiglu", "fp8_linear")}

    before = kernels_of_nodes()
    assert before["fp8_linear"] == before["swiglu"] <= {"compiled", "reference"}
    monkeypatch.setattr(backends, "_active", [("deep_gemm", Emulated())])
    monkeypatch.setitem(kernels.KERNEL_SETS, "triton", "jetrl_megatron.ops.reference")  # which needs no GPU
    assert kernels_of_nodes() == {"swiglu": {"triton"}, "fp8_linear": {"deep_gemm"}}


def test_gpu_backends_bring_tritons_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel set follows the backend; every set has the same functions; a set may be chosen whatever the backend,
    for tests, and given back."""
    for backend in ("triton", "deep_gemm"):
        monkeypatch.setattr(backends, "_active", [(backend, Emulated())])
        assert kernels.kernels_name() == "triton"
    triton = kernels.kernels()
    for name in kernels.KERNEL_SETS:
        kernels.use_kernels(name)
        assert all(callable(getattr(kernels.kernels(), function)) for function in triton.__all__)
    kernels.use_kernels(None)
    assert kernels.kernels() is triton
    monkeypatch.setattr(backends, "_active", [])
    assert kernels.kernels_name() in ("compiled", "reference")
    with pytest.raises(ValueError, match=r"kernels: 'cuda'; .* \['compiled', 'reference', 'triton'\]"):
        kernels.use_kernels("cuda")
