"""FP8 data: block formats, the one quantizer, the exact GEMM and the linear's three GEMMs (FProp, DGrad, WGrad)."""

from jetrl_megatron.fp8.format import BLOCK, E4M3, E4M3_MAX, Fp8Format, Fp8Recipe, Fp8Tensor, dequantize
from jetrl_megatron.fp8.gemm import (
    Fp8Experts,
    gemm_nt,
    num_segments_for,
    ordered_add,
    prepare_weight,
    tree_add,
    whole,
)
from jetrl_megatron.fp8.linear import (
    Fp8Weight,
    accumulate_main_grad,
    fp8_grouped_linear,
    fp8_linear,
    fp8_matmul,
    fp8_routed_linear,
    quantize_weight,
)
from jetrl_megatron.fp8.quantize import (
    GridSlice,
    compact_weight_scale,
    expand_weight_scale,
    quantize_columns,
    quantize_rows,
)

__all__ = [
    "BLOCK",
    "E4M3",
    "E4M3_MAX",
    "Fp8Experts",
    "Fp8Format",
    "Fp8Recipe",
    "Fp8Tensor",
    "Fp8Weight",
    "GridSlice",
    "accumulate_main_grad",
    "compact_weight_scale",
    "dequantize",
    "expand_weight_scale",
    "fp8_grouped_linear",
    "fp8_linear",
    "fp8_matmul",
    "fp8_routed_linear",
    "gemm_nt",
    "num_segments_for",
    "ordered_add",
    "prepare_weight",
    "quantize_columns",
    "quantize_rows",
    "quantize_weight",
    "tree_add",
    "whole",
]
