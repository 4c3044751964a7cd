"""The DeepGEMM backend: Triton's quantizers, DeepGEMM's GEMMs, on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from jetrl_megatron.fp8 import deep_gemm
from jetrl_megatron.fp8.backends import DEEP_GEMM_CAPABILITY, gpu_unusable
from jetrl_megatron.fp8.format import Fp8Tensor
from jetrl_megatron.fp8.gemm import Fp8Experts, PreparedWeight
from jetrl_megatron.fp8.gpu.backend import TritonQuantizer, check_one_chain


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

    def matmul(self, a: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        grid = weight.grid if dtype == torch.bfloat16 else None
        y = deep_gemm.execute(deep_gemm.prepare_gemm(a, weight.codes, weight.scale.t(), grid))
        if y is None:
            return torch.empty(0, weight.num_rows, dtype=dtype, device=a.data.device)
        return y.to(dtype)

    def matmul_grouped(self, a: Sequence[Fp8Tensor], weights: Sequence[PreparedWeight], dtype: torch.dtype) -> Tensor:
        """One call, unless the result is fp32 or a weight has no 128x128 grid, which the grouped GEMM needs."""
        grids = [weight.grid for weight in weights]
        found = [grid for grid in grids if grid is not None]
        if dtype != torch.bfloat16 or len(found) < len(grids) or len(a) == 1:
            return super().matmul_grouped(a, weights, dtype)
        alignment = deep_gemm.library().get_mk_alignment_for_contiguous_layout()
        codes = deep_gemm.stacked([weight.codes for weight in weights])
        num_rows = [len(rows.data) for rows in a]
        call, layout = deep_gemm.prepare_grouped(
            Fp8Tensor.joined(a), num_rows, codes, deep_gemm.stacked(found), alignment
        )
        y = deep_gemm.execute(call)
        if y is None:
            return torch.empty(0, weights[0].num_rows, dtype=dtype, device=codes.device)
        return y[layout.places]

    def fprop_routed(
        self,
        x: Tensor,
        experts: Fp8Experts,
        offsets: Tensor,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        """Numbers of rows stay on the device, unless the result is fp32 or the experts have no 128x128 grid."""
        if dtype != torch.bfloat16 or experts.grid is None:
            return super().fprop_routed(x, experts, offsets, num_segments, dtype, quantized)
        check_one_chain(num_segments)
        codes = experts.quantized.data
        if quantized is None:
            quantized = self.quantize_rows(x, experts.quantized.format)
        alignment = deep_gemm.library().get_mk_alignment_for_contiguous_layout()
        call, places = deep_gemm.prepare_routed(quantized, offsets, codes, experts.grid, alignment)
        y = deep_gemm.execute(call)
        if y is None:
            return torch.empty(0, codes.shape[1], dtype=dtype, device=codes.device), [quantized]
        return torch.where((places >= 0).unsqueeze(-1), y[places.clamp_min(0)], 0.0), [quantized]

    def wgrad(self, dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor | None) -> Tensor:
        if main_grad is None:
            shape = (len(dy_t.data), len(x_t.data))
            main_grad = torch.zeros(shape, dtype=torch.float32, device=dy_t.data.device)
        deep_gemm.execute(deep_gemm.prepare_wgrad(dy_t, x_t, main_grad))
        return main_grad

    def wgrad_grouped(
        self, dy_t: Sequence[Fp8Tensor], x_t: Sequence[Fp8Tensor], main_grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The library adds to one [E, N, K]; Megatron's main_grads lie apart, so they get the products after."""
        shape = (len(dy_t), len(dy_t[0].data), len(x_t[0].data))
        products = torch.zeros(shape, dtype=torch.float32, device=dy_t[0].data.device)
        deep_gemm.execute(deep_gemm.prepare_grouped_wgrad(dy_t, x_t, products))
        return [made if grad is None else grad.add_(made) for made, grad in zip(products, main_grads, strict=True)]


def has_nvcc() -> bool:
    """Whether CUDA's compiler, which DeepGEMM needs at run time, is where torch and DeepGEMM look for it."""
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None and (Path(CUDA_HOME) / "bin" / "nvcc").is_file()


BACKEND = DeepGemmBackend()
