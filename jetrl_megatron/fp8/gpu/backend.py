"""The Triton backend: quantizers and GEMM of this package, for NVIDIA GPUs with FP8 tensor cores."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from jetrl_megatron.fp8.backends import TRITON_CAPABILITY, gpu_unusable
from jetrl_megatron.fp8.format import Fp8Format, Fp8Tensor
from jetrl_megatron.fp8.gemm import PreparedWeight
from jetrl_megatron.fp8.gpu import columns, quantize
from jetrl_megatron.fp8.gpu.gemm import gemm_nt
from jetrl_megatron.fp8.gpu.launch import interpreting


class TritonQuantizer(ABC):
    """What GPU backends share of `backends.Backend`: the quantizers (scales MN-major for TMA, rows of x^T padded to 128
    tokens), and FProp on top of their GEMM."""

    def quantize_rows(self, x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
        return quantize.quantize_rows(x.contiguous(), fmt, "tma")

    def quantize_columns(self, x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
        return columns.quantize_columns(x.contiguous(), fmt, "tma", pad_tokens=True)

    def quantize_both(self, x: Tensor, fmt: Fp8Format) -> tuple[Fp8Tensor, Fp8Tensor]:
        return columns.quantize_both(x.contiguous(), fmt, "tma", pad_tokens=True)

    def requantize_columns(self, x: Fp8Tensor, dtype: torch.dtype) -> Fp8Tensor:
        if dtype != torch.bfloat16:
            raise ValueError(
                f"activations: {dtype}; rule: the GPU kernels requantize through bf16; fix: bf16 activations"
            )
        return columns.requantize_columns(x, "tma", pad_tokens=True)

    @abstractmethod
    def dgrad(self, dy: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        """The GEMM, for FProp's operands too."""

    def fprop(
        self,
        x: Tensor,
        weight: PreparedWeight,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, Fp8Tensor]:
        check_one_chain(num_segments)
        if quantized is None:
            quantized = self.quantize_rows(x, weight.format)
        return self.dgrad(quantized, weight, dtype), quantized


def check_one_chain(num_segments: int) -> None:
    """Raises ValueError for row-parallel sums in segments, which the GPU GEMMs do not have."""
    if num_segments != 1:
        raise ValueError(
            f"num_segments: {num_segments}; rule: GPU GEMMs add K in one chain; fix: parallel.tp_invariant: false"
        )


class TritonBackend(TritonQuantizer):
    """See `backends.Backend`."""

    def unusable(self) -> str | None:
        return None if interpreting() else gpu_unusable(TRITON_CAPABILITY, None, "the triton backend")

    def dgrad(self, dy: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        return gemm_nt((dy.data, dy.scale), (weight.codes, weight.scale.t()), dtype)

    def wgrad(self, dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor | None) -> Tensor:
        out = torch.float32 if main_grad is None else main_grad
        return gemm_nt((dy_t.data, dy_t.scale), (x_t.data, x_t.scale), out)


BACKEND = TritonBackend()
