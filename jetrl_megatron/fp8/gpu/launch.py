"""Launches of Triton kernels: one description from which a kernel is run, or compiled without a GPU.

Every launch sets `enable_fp_fusion=False`: Triton's default differs between versions, and a multiply and an add that
the contract rounds separately must not become one fma.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
import triton
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, Fp8Format, num_blocks

R = TypeVar("R")
ScaleLayout = Literal["row_major", "tma"]
TMA_ALIGNMENT = 4  # fp32 elements in 16 bytes
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    E4M3: "*fp8e4nv",
}


@dataclass(frozen=True)
class Plan(Generic[R]):
    """One launch. arguments: run-time arguments by name; constants: compile-time ones; result: what it fills."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    result: R
    num_warps: int = 4
    num_stages: int = 3

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}

    def run(self) -> R:
        """Launch the kernel unless the grid is empty. Raises ValueError for tensors that Triton cannot reach here."""
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                _check_device(name, value)
        if math.prod(self.grid):
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)
        return self.result

    def compile(self, capability: int = 90, **options: Any) -> Any:
        """Compile for a GPU of this compute capability (90: Hopper) without having one: `.asm["ptx"]`, `.asm["cubin"]`.

        Arguments are specialised as Triton would: integers that are 1 become constants, pointers and integers divisible
        by 16 are marked so. Tensors may be on the `meta` device."""
        from triton.backends.compiler import GPUTarget

        signature, constants, attributes = {}, dict(self.constants), {}
        for i, name in enumerate(self.kernel.arg_names):
            value = self.arguments.get(name)
            if name in constants or value is None or (isinstance(value, int) and value == 1):
                constants.setdefault(name, value)
                signature[name] = "constexpr"
                continue
            signature[name] = _type_of(value)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**self.options, **options})


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def triton_version() -> str:
    return str(triton.__version__)


def interpreting() -> bool:
    """Whether this process runs kernels in Triton's interpreter (TRITON_INTERPRET=1 before triton was imported)."""
    return bool(triton.knobs.runtime.interpret)


def reachable(tensor: Tensor) -> bool:
    """Whether a kernel launched here can read the tensor."""
    return tensor.is_cuda or (tensor.device.type == "cpu" and interpreting())


def _check_device(name: str, tensor: Tensor) -> None:
    if not reachable(tensor):
        raise ValueError(
            f"{name}: on {tensor.device}; rule: Triton kernels run on a CUDA device; fix: move the tensor, or use the "
            "emulated backend"
        )


def check_matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
    """Raises ValueError unless x is a 2-D row-major matrix of one of the dtypes."""
    if x.dim() != 2 or x.dtype not in dtypes or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{name}: {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} with strides {x.stride()}; rule: a matrix "
            f"of {' or '.join(str(d).removeprefix('torch.') for d in dtypes)} with contiguous rows; fix: .contiguous()"
        )


def check_block_format(fmt: Fp8Format) -> bool:
    """Whether scales are powers of two. Raises ValueError for granularities that the kernels do not have."""
    if fmt.granularity != "block":
        raise ValueError(
            f"granularity: {fmt.granularity}; rule: the GPU kernels quantize 1x128 and 128x128 blocks; fix: block"
        )
    return fmt.scale_format == "pow2"


def empty_scale(num_rows: int, num_groups: int, device: torch.device, layout: ScaleLayout) -> Tensor:
    """fp32 [num_rows, num_groups], to be filled.

    `row_major`: contiguous, the form of `Fp8Tensor`. `tma`: the same shape with strides (1, num_rows rounded up to 4):
    MN-major with a 16-byte aligned pitch, what DeepGEMM's `get_mn_major_tma_aligned_tensor` returns, so that it takes
    the tensor as it is."""
    if layout == "row_major":
        return torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    pitch = -(-num_rows // TMA_ALIGNMENT) * TMA_ALIGNMENT
    return torch.empty_strided((num_rows, num_groups), (1, pitch), dtype=torch.float32, device=device)


def padded(length: int) -> int:
    """length rounded up to whole groups of 128."""
    return num_blocks(length) * BLOCK


def instructions(ptx: str) -> set[str]:
    """The distinct instructions of PTX text, with their modifiers: {'div.rn.f32', 'ld.global.v4.b32', ...}."""
    return set(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)*)\s", ptx, re.MULTILINE))
