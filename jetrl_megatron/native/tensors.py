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


def quantize(x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """x [M, K] -> E4M3 codes [M, K] and 1x128 scales [M, ceil(K/128)]."""
    x = x.float().contiguous()
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, -(-k // 128), dtype=torch.float32)
    call("quantize", x, rows, k, int(pow2), codes, scale)
    return codes, scale


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of x [M, K] under given row-expanded scales [M, ceil(K/128)]."""
    x = x.float().contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    call("encode", x, x.shape[0], x.shape[1], scale.contiguous(), codes)
    return codes


def group_amax(x: Tensor) -> Tensor:
    """max |x| of every 1x128 group, fp32."""
    x = x.float().contiguous()
    amax = torch.empty(x.shape[0], -(-x.shape[1] // 128), dtype=torch.float32)
    call("amax", x, x.shape[0], x.shape[1], amax)
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
