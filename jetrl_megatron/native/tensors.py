"""The compiled kernels on torch tensors. Callers check `native()` first; everything here is CPU and contiguous."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.native import LEVELS, native


def call(name: str, *arguments: Any) -> None:
    """Call `jetrl_NAME`: tensors become pointers, integers int64, floats float."""
    found = native()
    assert found is not None
    getattr(found.library, f"jetrl_{name}")(*map(_argument, arguments))


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.device.type == "cpu"
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


def usable(*tensors: Tensor) -> bool:
    """Whether the compiled kernels can take these tensors."""
    return all(t.device.type == "cpu" for t in tensors) and native() is not None


def use_threads(count: int) -> None:
    """Threads of the compiled kernels (their results do not depend on it)."""
    found = native()
    if found is not None:
        found.library.jetrl_use_threads(ctypes.c_int(count))


def _typed(x: Tensor) -> tuple[Tensor, int]:
    """Contiguous x and whether it is bf16; anything else becomes fp32."""
    return (x.contiguous(), 1) if x.dtype == torch.bfloat16 else (x.float().contiguous(), 0)


def fp8_buffers(rows: int, k: int) -> tuple[Tensor, Tensor]:
    """E4M3 codes [rows, K] and scales [rows, ceil(K/128)], to be filled."""
    return torch.empty(rows, k, dtype=torch.float8_e4m3fn), torch.empty(rows, -(-k // 128), dtype=torch.float32)


def quantize(x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """x [M, K] -> E4M3 codes [M, K] and 1x128 scales [M, ceil(K/128)]."""
    made = fp8_buffers(*x.shape)
    call("quantize", *_typed(x), *x.shape, int(pow2), *made)
    return made


def quantize_columns(x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """x [T, K] -> E4M3 codes [K, T] and scales [K, ceil(T/128)] of its transpose."""
    made = fp8_buffers(x.shape[1], x.shape[0])
    call("quantize_columns", *_typed(x), *x.shape, int(pow2), *made)
    return made


def quantize_blocks(x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """Whole weight [N, K] -> E4M3 codes and its 128x128 grid as scales [N, ceil(K/128)]."""
    made = fp8_buffers(*x.shape)
    call("quantize_blocks", *_typed(x), *x.shape, int(pow2), *made)
    return made


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of x [M, K] under given row-expanded scales [M, ceil(K/128)]."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    call("encode", *_typed(x), x.shape[0], x.shape[1], scale.contiguous(), codes)
    return codes


def dequantize(codes: Tensor, scale: Tensor, rows_per_scale: int, dtype: torch.dtype) -> Tensor:
    """E4M3 codes [N, K] times scale [ceil(N/rows_per_scale), ceil(K/128)] -> [N, K] in bf16 or fp32."""
    out = torch.empty(codes.shape, dtype=dtype)
    shape = (rows_per_scale, *codes.shape, int(dtype == torch.bfloat16))
    call("dequantize", codes.contiguous(), scale.contiguous(), *shape, out)
    return out


def group_amax(x: Tensor) -> Tensor:
    """max |x| of every 1x128 group, fp32."""
    amax = torch.empty(x.shape[0], -(-x.shape[1] // 128), dtype=torch.float32)
    call("amax", *_typed(x), x.shape[0], x.shape[1], amax)
    return amax


def pack_fp8(codes: Tensor) -> Tensor:
    """E4M3 [N, K] -> uint16 panels for `fp8_gemm`, 2 bytes per weight."""
    n, k = codes.shape
    packed = torch.empty(-(-n // 16) * -(-k // 128) * 128 * 16, dtype=torch.uint16)
    call("pack_fp8", codes.contiguous(), n, k, packed)
    return packed


def has_tiles() -> bool:
    """Whether the active instruction set has int8 matrix tiles (AMX)."""
    found = native()
    return found is not None and int(found.library.jetrl_level()) == LEVELS.index("amx")


def pack_digits(codes: Tensor) -> Tensor:
    """E4M3 [N, K] -> int8 tiles for `fp8_gemm_digits`, 3 bytes per weight."""
    n, k = codes.shape
    packed = torch.empty(-(-n // 16) * -(-k // 128) * 6 * 1024, dtype=torch.int8)
    call("pack_digits", codes.contiguous(), n, k, packed)
    return packed


def fp8_gemm_digits(codes: Tensor, scale: Tensor, packed: Tensor, weight_scale: Tensor, num_segments: int) -> Tensor:
    """`fp8_gemm` on matrix tiles, same bits: codes [M, K] -> fp32 [M, N]."""
    (m, k), n = codes.shape, weight_scale.shape[1]
    out = torch.empty(m, n, dtype=torch.float32)
    call("fp8_gemm_digits", codes.contiguous(), scale.contiguous(), packed, weight_scale, out, m, n, k, num_segments)
    return out


def fp8_gemm(codes: Tensor, scale: Tensor, packed: Tensor, weight_scale: Tensor, num_segments: int) -> Tensor:
    """codes [M, K], scale [M, G], packed weight, weight_scale [G, N] -> fp32 [M, N]."""
    (m, k), n = codes.shape, weight_scale.shape[1]
    out = torch.empty(m, n, dtype=torch.float32)
    call("fp8_gemm", codes.contiguous(), scale.contiguous(), packed, weight_scale, out, m, n, k, num_segments)
    return out


def fp8_linear(codes: Tensor, scale: Tensor, packed: Tensor, weight_scale: Tensor, num_segments: int) -> Tensor:
    """`fp8_gemm` with its rounding: codes [M, K] and scale [M, G] -> bf16 [M, N]."""
    (m, k), n = codes.shape, weight_scale.shape[1]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    call("fp8_linear", codes.contiguous(), scale.contiguous(), packed, weight_scale, out, m, n, k, num_segments)
    return out


def quantized_fp8_linear(
    x: Tensor, pow2: bool, packed: Tensor, weight_scale: Tensor, num_segments: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizer, GEMM and rounding in one call: bf16 x [M, K] -> bf16 [M, N], and the codes and scales of x."""
    (m, k), n = x.shape, weight_scale.shape[1]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    codes, scale = fp8_buffers(m, k)
    x = x.contiguous()
    call("quantized_fp8_linear", x, int(pow2), packed, weight_scale, out, codes, scale, m, n, k, num_segments)
    return out, codes, scale
