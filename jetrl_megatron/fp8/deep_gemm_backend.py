"""The DeepGEMM backend: Triton's quantizers, DeepGEMM's GEMMs, on Hopper GPUs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jetrl_megatron.fp8 import deep_gemm
from jetrl_megatron.fp8.backends import DEEP_GEMM_CAPABILITY, gpu_unusable
from jetrl_megatron.fp8.format import Fp8Tensor
from jetrl_megatron.fp8.gemm import PreparedWeight
from jetrl_megatron.fp8.gpu.backend import TritonQuantizer


class DeepGemmBackend(TritonQuantizer):
    """See `backends.Backend`."""

    def unusable(self) -> str | None:
        reason = gpu_unusable(DEEP_GEMM_CAPABILITY, (10, 0), "the deep_gemm backend")
        if reason is not None:
            return reason
        if not has_nvcc():
            return "DeepGEMM compiles its kernels with nvcc, and there is no CUDA toolkit here (CUDA_HOME)"
        try:
            deep_gemm.library()
        except ValueError as error:
            return str(error)
        return None

    def dgrad(self, dy: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        grid = weight.grid if dtype == torch.bfloat16 else None
        y = deep_gemm.execute(deep_gemm.prepare_gemm(dy, weight.codes, weight.scale.t(), grid))
        if y is None:
            return torch.empty(0, weight.num_rows, dtype=dtype, device=dy.data.device)
        return y.to(dtype)

    def wgrad(self, dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor | None) -> Tensor:
        if main_grad is None:
            shape = (len(dy_t.data), len(x_t.data))
            main_grad = torch.zeros(shape, dtype=torch.float32, device=dy_t.data.device)
        deep_gemm.execute(deep_gemm.prepare_wgrad(dy_t, x_t, main_grad))
        return main_grad


def has_nvcc() -> bool:
    """Whether CUDA's compiler, which DeepGEMM needs at run time, is where torch and DeepGEMM look for it."""
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None and (Path(CUDA_HOME) / "bin" / "nvcc").is_file()


BACKEND = DeepGemmBackend()
