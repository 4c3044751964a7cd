"""The emulated backend: exact partial sums in fp64, equal bits on every CPU, for any batch and number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jetrl_megatron.fp8.backends import GroupLoops
from jetrl_megatron.fp8.format import Fp8Format, Fp8Tensor
from jetrl_megatron.fp8.gemm import PreparedWeight, gemm_nt, prepare_weight, quantized_matmul
from jetrl_megatron.fp8.quantize import GridSlice, quantize_columns, quantize_rows, quantize_weight


class Emulated(GroupLoops):
    """See `backends.Backend`."""

    def unusable(self) -> str | None:
        return None

    def quantize_weight(
        self,
        weight: Tensor,
        fmt: Fp8Format,
        slices: Sequence[GridSlice] | None,
        share_amax: Callable[[Tensor], Tensor] | None,
    ) -> Fp8Tensor:
        return quantize_weight(weight, fmt, slices, share_amax)

    def quantize_rows(self, x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
        return quantize_rows(x, fmt)

    def quantize_columns(self, x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
        return quantize_columns(x, fmt)

    def quantize_both(self, x: Tensor, fmt: Fp8Format) -> tuple[Fp8Tensor, Fp8Tensor]:
        return quantize_rows(x, fmt), quantize_columns(x, fmt)

    def requantize_columns(self, x: Fp8Tensor, dtype: torch.dtype) -> Fp8Tensor:
        return quantize_columns(x.dequantize(dtype), x.format)

    def fprop(
        self,
        x: Tensor,
        weight: PreparedWeight,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, Fp8Tensor]:
        return quantized_matmul(x, weight, num_segments, dtype, quantized)

    def matmul(self, a: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        return gemm_nt(a, weight).to(dtype)

    def wgrad(self, dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor | None) -> Tensor:
        dw = gemm_nt(dy_t, prepare_weight(x_t))
        return dw if main_grad is None else main_grad.add_(dw)


BACKEND = Emulated()
