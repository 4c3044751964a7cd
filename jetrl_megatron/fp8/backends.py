"""Who computes the quantization and the three GEMMs of an FP8 linear: one backend per process, chosen by name. It also
brings the kernels of the other operators (`ops/kernels.py`).

| backend | runs on | quantizer | GEMM |
|---|---|---|---|
| `emulated` | any device | torch or compiled C++ | exact partial sums (`fp8/gemm.py`) |
| `triton` | NVIDIA, compute capability 8.9 or more | Triton, the same bytes | Triton, tensor cores |
| `deep_gemm` | NVIDIA Hopper (9.x) | Triton, the same bytes | DeepGEMM, tensor cores |

Bytes and scales are equal on all three; accumulators are not (docs/numerics.md, section 2), so training and rollout
must use the same one. Nothing falls back: a backend that cannot run here says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import Fp8Format, Fp8Tensor
from jetrl_megatron.fp8.gemm import Fp8Experts, PreparedWeight
from jetrl_megatron.fp8.quantize import GridSlice

MODULES = {
    "deep_gemm": "jetrl_megatron.fp8.deep_gemm_backend",
    "emulated": "jetrl_megatron.fp8.emulated",
    "triton": "jetrl_megatron.fp8.gpu.backend",
}
TRITON_CAPABILITY = (8, 9)  # FP8 tensor cores: Ada, Hopper and later
DEEP_GEMM_CAPABILITY = (9, 0)


class Backend(Protocol):
    """Shape letters: M rows, N outputs, K contracted, T tokens. `_grouped`: one weight per group of rows, the bits of
    the method without it, group by group."""

    def unusable(self) -> str | None:
        """Why this backend cannot run in this process; None if it can."""

    def quantize_weight(
        self,
        weight: Tensor,
        fmt: Fp8Format,
        slices: Sequence[GridSlice] | None,
        share_amax: Callable[[Tensor], Tensor] | None,
    ) -> Fp8Tensor:
        """See `fp8.quantize_weight`."""

    def quantize_rows(self, x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
        """x [M, K], groups along K."""

    def quantize_columns(self, x: Tensor, fmt: Fp8Format) -> Fp8Tensor:
        """x [T, K] -> x^T [K, T], groups along tokens."""

    def quantize_both(self, x: Tensor, fmt: Fp8Format) -> tuple[Fp8Tensor, Fp8Tensor]:
        """`quantize_rows` and `quantize_columns` of one tensor."""

    def requantize_columns(self, x: Fp8Tensor, dtype: torch.dtype) -> Fp8Tensor:
        """Quantized along K [T, K] -> x^T [K, T] quantized along tokens, through `dtype`."""

    def fprop(
        self,
        x: Tensor,
        weight: PreparedWeight,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, Fp8Tensor]:
        """x [M, K] quantized (here, unless it comes quantized) and multiplied: [M, N], the accumulator rounded once to
        `dtype`, and the quantized x."""

    def matmul(self, a: Fp8Tensor, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        """A [M, K], quantized along K, times the weight [N, K] transposed: [M, N], rounded once. DGrad: dY times the
        weight prepared transposed. The bits of `fprop` with one segment."""

    def wgrad(self, dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor | None) -> Tensor:
        """dY^T [N, T] times X [T, K] in fp32: added to main_grad [N, K] if there is one, else new."""

    def fprop_grouped(
        self,
        x: Sequence[Tensor],
        weights: Sequence[PreparedWeight],
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        """x: the groups' rows [M_g, K], one after the other in memory; quantized: of all of them. [M, N] and the
        quantized groups."""

    def matmul_grouped(self, a: Sequence[Fp8Tensor], weights: Sequence[PreparedWeight], dtype: torch.dtype) -> Tensor:
        """A [M_g, K] of every group: [M, N]."""

    def wgrad_grouped(
        self, dy_t: Sequence[Fp8Tensor], x_t: Sequence[Fp8Tensor], main_grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Every group's weight gradient."""

    def fprop_routed(
        self,
        x: Tensor,
        experts: Fp8Experts,
        offsets: Tensor,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        """x [R, K], rows sorted by expert: those of expert e are offsets[e] to offsets[e + 1], a tensor on x's device.
        [R, N], zero in rows of no expert, and the quantized rows."""


class GroupLoops(Backend):
    """The grouped methods of `Backend`, one group after the other; numbers of rows read on the host."""

    def fprop_grouped(
        self,
        x: Sequence[Tensor],
        weights: Sequence[PreparedWeight],
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        found = [None] * len(x) if quantized is None else quantized.split([len(rows) for rows in x])
        groups = [
            self.fprop(rows, weight, num_segments, dtype, codes)
            for rows, weight, codes in zip(x, weights, found, strict=True)
        ]
        return joined([y for y, _ in groups]), [codes for _, codes in groups]

    def fprop_routed(
        self,
        x: Tensor,
        experts: Fp8Experts,
        offsets: Tensor,
        num_segments: int,
        dtype: torch.dtype,
        quantized: Fp8Tensor | None = None,
    ) -> tuple[Tensor, list[Fp8Tensor]]:
        num_rows = offsets.diff().tolist()
        used = sum(num_rows)
        if quantized is not None and used < len(x):
            quantized = quantized.split([used, len(x) - used])[0]
        groups = x[:used].split(num_rows)
        y, found = self.fprop_grouped(groups, experts.each, num_segments, dtype, quantized)
        return y if used == len(x) else torch.cat([y, y.new_zeros(len(x) - used, y.shape[1])]), found

    def matmul_grouped(self, a: Sequence[Fp8Tensor], weights: Sequence[PreparedWeight], dtype: torch.dtype) -> Tensor:
        return joined([self.matmul(rows, weight, dtype) for rows, weight in zip(a, weights, strict=True)])

    def wgrad_grouped(
        self, dy_t: Sequence[Fp8Tensor], x_t: Sequence[Fp8Tensor], main_grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        return [self.wgrad(*group) for group in zip(dy_t, x_t, main_grads, strict=True)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of the groups' rows; a lone group is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def load(name: str) -> Backend:
    """The backend of this name. Raises ValueError for an unknown one or one whose library is missing."""
    if name not in MODULES:
        raise ValueError(f"backend: {name!r}; rule: a known FP8 backend; fix: one of {sorted(MODULES)}")
    try:
        backend: Backend = importlib.import_module(MODULES[name]).BACKEND
    except ImportError as error:
        raise ValueError(f"backend: {name}; rule: its libraries are installed ({error}); fix: install them") from None
    return backend


def unusable(name: str) -> str | None:
    """Why the backend cannot run in this process; None if it can."""
    try:
        return load(name).unusable()
    except ValueError as error:
        return str(error)


def resolve(name: str) -> str:
    """`auto` -> the fastest backend that runs in this process; any other name must be able to run.

    Raises ValueError with the reason if it cannot."""
    if name == "auto":
        return next(candidate for candidate in ("deep_gemm", "triton", "emulated") if unusable(candidate) is None)
    reason = unusable(name)
    if reason is not None:
        raise ValueError(f"backend: {name} cannot run here: {reason}")
    return name


_active: list[tuple[str, Backend]] = []


def use_backend(name: str) -> str:
    """Select the backend of this process (`auto`: see `resolve`) and return its name; ValueError if it cannot run."""
    name = resolve(name)
    _active[:] = [(name, load(name))]
    return name


def active_name() -> str:
    """Name of the backend in use: `emulated` unless another was selected."""
    if not _active:
        use_backend("emulated")
    return _active[0][0]


def active() -> Backend:
    """The backend in use."""
    active_name()
    return _active[0][1]


def gpu_unusable(capability: tuple[int, int], below: tuple[int, int] | None, what: str) -> str | None:
    """Why the GPUs of this process cannot run something that needs at least this compute capability, and less than
    `below`."""
    if not torch.cuda.is_available():
        return f"{what} needs an NVIDIA GPU, and torch sees none"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(index)
        if found < capability or (below is not None and found >= below):
            needed = f"{capability[0]}.{capability[1]}" + ("" if below is None else f" up to {below[0]}.{below[1]}")
            return f"{what} needs compute capability {needed}, GPU {index} has {found[0]}.{found[1]}"
    return None
