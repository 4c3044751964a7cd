"""The Triton backend: quantizers and GEMM of this package, for NVIDIA GPUs with FP8 tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jetrl_megatron.fp8 import quantize as torch_form
from jetrl_megatron.fp8.backends import TRITON_CAPABILITY, GroupLoops, gpu_unusable, joined
from jetrl_megatron.fp8.format import Fp8Format, Fp8Tensor
from jetrl_megatron.fp8.gemm import Fp8Experts, PreparedWeight, contraction_order
from jetrl_megatron.fp8.gpu import columns, quantize
from jetrl_megatron.fp8.gpu.gemm import gemm_nt, grouped_gemm_nt, routed_gemm_nt
from jetrl_megatron.fp8.gpu.launch import interpreting, reachable


class TritonQuantizer(GroupLoops):
    """What GPU backends share of `backends.Backend`: the quantizers (scales MN-major for TMA, rows of x^T padded to 128
    tokens), and FProp on top of their GEMM."""

    def quantize_weight(
        self,
        weight: Tensor,
        fmt: Fp8Format,
        slices: Sequence[torch_form.GridSlice] | None,
        share_amax: Callable[[Tensor], Tensor] | None,
    ) -> Fp8Tensor:
        """In torch where blocks are shared between ranks, or where the weight is not on a GPU yet: the same bytes."""
        if share_amax is not None or not reachable(weight):
            return torch_form.quantize_weight(weight, fmt, slices, share_amax)
        order = None if slices is None else contraction_order(slices).to(weight.device)
        return quantize.quantize_weight(weight.contiguous(), fmt, order)

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
        return self.matmul(quantized, weight, dtype), quantized

    def fprop_grouped(
        self,
        x: Sequence[Tensor],
        weights: Sequence[PreparedWeight],
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        check_one_chain(num_segments)
        if quantized is None:
            quantized = self.quantize_rows(joined(x), weights[0].format)
        groups = quantized.split([len(rows) for rows in x])
        return self.matmul_grouped(groups, weights, dtype), groups


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

    def matmul(self, a: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        return gemm_nt((a.data, a.scale), (weight.codes, weight.scale.t()), dtype)

    def fprop_routed(
        self,
        x: Tensor,
        experts: Fp8Experts,
        offsets: Tensor,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        """Numbers of rows stay on the device."""
        check_one_chain(num_segments)
        weights = experts.quantized
        if quantized is None:
            quantized = self.quantize_rows(x, weights.format)
        y = routed_gemm_nt((quantized.data, quantized.scale), (weights.data, weights.scale), offsets, dtype)
        return y, [quantized]

    def wgrad(self, dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor | None) -> Tensor:
        out = torch.float32 if main_grad is None else main_grad
        return gemm_nt((dy_t.data, dy_t.scale), (x_t.data, x_t.scale), out)

    def matmul_grouped(self, a: Sequence[Fp8Tensor], weights: Sequence[PreparedWeight], dtype: torch.dtype) -> Tensor:
        if len(a) == 1:  # a lone group needs no table of GEMMs, which the host would copy to the device
            return super().matmul_grouped(a, weights, dtype)
        num_rows = [len(rows.data) for rows in a]
        out = torch.empty(sum(num_rows), weights[0].num_rows, dtype=dtype, device=a[0].data.device)
        grouped_gemm_nt(
            [(rows.data, rows.scale) for rows in a],
            [(weight.codes, weight.scale.t()) for weight in weights],
            out.split(num_rows),
        )
        return out

    def wgrad_grouped(
        self, dy_t: Sequence[Fp8Tensor], x_t: Sequence[Fp8Tensor], main_grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        if len(dy_t) == 1:
            return super().wgrad_grouped(dy_t, x_t, main_grads)
        shape, device = (len(dy_t[0].data), len(x_t[0].data)), dy_t[0].data.device
        new = [grad is None for grad in main_grads]
        assert all(new) or not any(new)
        out = [torch.zeros(shape, dtype=torch.float32, device=device) if grad is None else grad for grad in main_grads]
        grouped_gemm_nt(
            [(rows.data, rows.scale) for rows in dy_t],
            [(rows.data, rows.scale) for rows in x_t],
            out,
            add=not any(new),
        )
        return out


BACKEND = TritonBackend()
