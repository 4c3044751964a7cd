"""DeepGEMM (PyPI `sgl-deep-gemm`, read at 0.2.3.post2) as executor of the FP8 GEMMs on Hopper GPUs.

Every function here first prepares a `Call`: the library's function by name with operands in the layouts that it
demands, after checking everything in our own words; `execute` alone touches the library. So preparation is tested
without a GPU.

| GEMM | library function | recipe | output |
|---|---|---|---|
| FProp, DGrad | `fp8_gemm_nt` | (1, 128, 128), B's scales on a 128x128 grid | bf16 |
| the same, blocks not at B's rows 0, 128, ... | `fp8_gemm_nt` | (1, 1, 128) | fp32 from 0, then bf16 |
| WGrad | `fp8_gemm_nt` | (1, 1, 128) | added to main_grad |
| experts, rows sorted and padded | `m_grouped_fp8_gemm_nt_contiguous` | (1, 128, 128) | bf16 |
| experts, decode | `m_grouped_fp8_gemm_nt_masked` | (1, 128, 128) | bf16 |
| experts' WGrad | `k_grouped_fp8_gemm_nt_contiguous` | (1, 1, 128) | added to main_grad |

Shape letters: M rows, N output features, K contracted, T tokens, E experts, G = groups of 128 along the contraction.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8.format import BLOCK, E4M3, Fp8Tensor, num_blocks

ROWWISE, BLOCKWISE = (1, 1, 128), (1, 128, 128)
TMA_BYTES = 16
Operand = tuple[Tensor, Tensor]  # E4M3 codes and fp32 scales


@dataclass(frozen=True)
class Call:
    """One call into the library. out: the tensor that it fills."""

    function: str
    arguments: tuple[Any, ...]
    out: Tensor
    keywords: dict[str, Any] = field(default_factory=dict)


@functools.cache
def library() -> Any:
    """The module `deep_gemm`. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("deep_gemm")
    except ImportError as error:
        raise ValueError(
            f"deep_gemm: cannot be imported ({error}); rule: the deep_gemm backend needs the package sgl-deep-gemm; "
            "fix: pip install 'jetrl-megatron[gpu]', or choose another backend"
        ) from None


def execute(call: Call | None) -> Tensor | None:
    """Run the call; None (nothing to compute) stays None."""
    if call is None:
        return None
    getattr(library(), call.function)(*call.arguments, **call.keywords)
    return call.out


# ------------------------------------------------------------------------------------------------ layouts
def tma_scale(scale: Tensor) -> Tensor:
    """fp32 scales [..., M, G] with M contiguous, from a whole 16 bytes on, and a pitch of whole 16 bytes; the tensor
    itself if it is that."""
    m, g = scale.shape[-2:]
    pitch = -(-m // 4) * 4
    strides = ((pitch * g,) if scale.dim() == 3 else ()) + (1, pitch)
    if scale.stride() == strides and scale.storage_offset() % 4 == 0:
        return scale
    out = torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device)
    return out.copy_(scale)


def pad_tokens(x: Fp8Tensor) -> Operand:
    """x^T [K, T] quantized along tokens -> the same with T padded to whole groups by zeros, and scales for TMA."""
    codes = x.data
    short = -codes.shape[1] % BLOCK
    if short:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, short)).view(E4M3)
    return codes, tma_scale(x.scale)


def _check_operand(name: str, codes: Tensor, scale: Tensor, num_scale_rows: int) -> None:
    k = codes.shape[-1]
    if codes.dtype != E4M3 or not codes.is_contiguous():
        raise ValueError(f"{name}: {codes.dtype}, strides {codes.stride()}; rule: contiguous E4M3; fix: .contiguous()")
    if k % TMA_BYTES:
        raise ValueError(
            f"{name}: K = {k}; rule: DeepGEMM reads rows of FP8 that start at multiples of {TMA_BYTES} bytes, so K "
            f"must be one; fix: a hidden size divisible by {TMA_BYTES}, or the triton backend"
        )
    wanted = (*codes.shape[:-2], num_scale_rows, num_blocks(k))
    if scale.dtype != torch.float32 or tuple(scale.shape) != wanted:
        raise ValueError(f"{name}: scales {scale.dtype} {tuple(scale.shape)}; rule: fp32 {wanted}; fix: check shapes")


def _check_contraction(a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"K: {a.shape[-1]} and {b.shape[-1]}; rule: operands contract the same K; fix: check shapes")


def _check_outputs(n: int, element_size: int) -> None:
    multiple = TMA_BYTES // element_size
    if n % multiple:
        raise ValueError(
            f"N: {n}; rule: DeepGEMM writes rows of whole {TMA_BYTES} bytes, so N must be a multiple of {multiple}; "
            "fix: pad the weight, or the triton backend"
        )


# ------------------------------------------------------------------------------------------------ dense
def prepare_gemm(a: Fp8Tensor, codes_NK: Tensor, scale_NG: Tensor, grid: Tensor | None) -> Call | None:
    """FProp or DGrad: A [M, K] times B [N, K] transposed. scale_NG: row-expanded; grid: `PreparedWeight.grid`.

    The output of the call is bf16 [M, N] with a grid, fp32 without one. None if there are no rows."""
    m, n = len(a.data), len(codes_NK)
    _check_operand("A", a.data, a.scale, m)
    _check_operand("B", codes_NK, scale_NG, n)
    _check_contraction(a.data, codes_NK)
    _check_outputs(n, 2)
    if m == 0:
        return None
    left = (a.data, tma_scale(a.scale))
    if grid is not None:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=a.data.device)
        keywords: dict[str, Any] = {"c": None, "recipe": BLOCKWISE, "compiled_dims": "nk"}
        return Call("fp8_gemm_nt", (left, (codes_NK, grid), out), out, keywords)
    out = torch.zeros(m, n, dtype=torch.float32, device=a.data.device)
    keywords = {"c": out, "recipe": ROWWISE, "compiled_dims": "nk"}
    return Call("fp8_gemm_nt", (left, (codes_NK, tma_scale(scale_NG)), out), out, keywords)


def prepare_wgrad(dy_t: Fp8Tensor, x_t: Fp8Tensor, main_grad: Tensor) -> Call | None:
    """dY^T [N, T] and X^T [K, T], both quantized along tokens: main_grad [N, K] fp32 += dY^T X. None without tokens."""
    n, k = len(dy_t.data), len(x_t.data)
    _check_contraction(dy_t.data, x_t.data)
    _check_main_grad(main_grad, (n, k))
    if dy_t.data.shape[1] == 0:
        return None
    left, right = pad_tokens(dy_t), pad_tokens(x_t)
    _check_operand("dY^T", *left, n)
    _check_operand("X^T", *right, k)
    keywords = {"c": main_grad, "recipe": ROWWISE, "compiled_dims": "mn"}
    return Call("fp8_gemm_nt", (left, right, main_grad), main_grad, keywords)


def _check_main_grad(main_grad: Tensor, shape: tuple[int, ...]) -> None:
    if main_grad.dtype != torch.float32 or tuple(main_grad.shape) != shape or not main_grad.is_contiguous():
        raise ValueError(
            f"main_grad: {main_grad.dtype} {tuple(main_grad.shape)}; rule: contiguous fp32 {shape}; fix: Megatron's "
            "gradient buffer"
        )
    _check_outputs(shape[-1], 4)


# ------------------------------------------------------------------------------------------------ experts
@dataclass(frozen=True)
class PaddedRows:
    """Rows sorted by expert, each expert's padded to `alignment`. source: [M] row that stands at each place, -1 none.
    group: [M] int32 expert of each place, -1 where padding. places: [R] where each row went."""

    source: Tensor
    group: Tensor
    places: Tensor


def pad_groups(num_rows: Sequence[int], alignment: int, device: torch.device | str = "cpu") -> PaddedRows:
    """The padded layout of `m_grouped_fp8_gemm_nt_contiguous` for experts with num_rows rows each."""
    sources, groups, places, row, place = [], [], [], 0, 0
    for expert, count in enumerate(num_rows):
        spare = -count % alignment
        sources += [torch.arange(row, row + count), torch.full((spare,), -1)]
        groups += [torch.full((count,), expert), torch.full((spare,), -1)]
        places.append(torch.arange(place, place + count))
        row, place = row + count, place + count + spare
    if not sources:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return PaddedRows(empty, empty.int(), empty)
    source, group = torch.cat(sources), torch.cat(groups).int()
    return PaddedRows(source.to(device), group.to(device), torch.cat(places).to(device))


def _place_rows(x: Fp8Tensor, source: Tensor) -> Operand:
    """Rows of x at their places; zeros with scale 1 at the others."""
    used, picked = source >= 0, source.clamp_min(0)
    codes = torch.where(used.unsqueeze(-1), x.data.view(torch.uint8)[picked], 0).view(E4M3)
    return codes, torch.where(used.unsqueeze(-1), x.scale[picked], 1.0)


def prepare_grouped(
    x: Fp8Tensor, num_rows: Sequence[int], codes_ENK: Tensor, grid_E: Tensor, alignment: int = BLOCK
) -> tuple[Call | None, PaddedRows]:
    """x [R, K], rows sorted by expert, num_rows of each, times that expert's weight [N, K] (grid [E, ceil(N/128), G]).

    alignment: the library's `get_mk_alignment_for_contiguous_layout()`. The result of row r is at row places[r]."""
    _check_experts(x, num_rows, codes_ENK)
    n = codes_ENK.shape[1]
    _check_operand("B", codes_ENK, grid_E, num_blocks(n))
    _check_outputs(n, 2)
    layout = pad_groups(num_rows, alignment, x.data.device)
    if not len(layout.source):
        return None, layout
    codes, scale = _place_rows(x, layout.source)
    _check_operand("A", codes, scale, len(codes))
    out = torch.empty(len(codes), n, dtype=torch.bfloat16, device=codes.device)
    arguments = ((codes, tma_scale(scale)), (codes_ENK, grid_E), out, layout.group)
    return Call("m_grouped_fp8_gemm_nt_contiguous", arguments, out, {"recipe": BLOCKWISE}), layout


def prepare_routed(
    x: Fp8Tensor, offsets: Tensor, codes_ENK: Tensor, grid_E: Tensor, alignment: int = BLOCK
) -> tuple[Call | None, Tensor]:
    """`prepare_grouped` where only the device knows how many rows each expert has: rows of expert e are offsets[e] to
    offsets[e + 1] (integers [E + 1]). The host reads nothing, so there is room for the worst case; what is left over
    has group -1, which the library skips. The result of row r is at row places[r], -1 for rows of no expert."""
    num_rows, (num_experts, n, _) = len(x.data), codes_ENK.shape
    _check_contraction(x.data, codes_ENK)
    _check_operand("B", codes_ENK, grid_E, num_blocks(n))
    _check_outputs(n, 2)
    room = (num_rows + num_experts * (alignment - 1)) // alignment * alignment
    row = torch.arange(num_rows, device=x.data.device)
    if not num_rows:
        return None, row
    padded = (offsets.diff() + alignment - 1) // alignment * alignment
    expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    known, expert = expert < num_experts, expert.clamp_max(num_experts - 1)
    places = torch.where(known, (padded.cumsum(0) - padded)[expert] + row - offsets[expert], room)
    source, group = (torch.full((room + 1,), -1, device=row.device).scatter_(0, places, v) for v in (row, expert))
    codes, scale = _place_rows(x, source[:room])
    _check_operand("A", codes, scale, room)
    out = torch.empty(room, n, dtype=torch.bfloat16, device=codes.device)
    arguments = ((codes, tma_scale(scale)), (codes_ENK, grid_E), out, group[:room].int())
    call = Call("m_grouped_fp8_gemm_nt_contiguous", arguments, out, {"recipe": BLOCKWISE})
    return call, torch.where(known, places, -1)


def prepare_masked(
    x: Fp8Tensor, num_rows: Sequence[int], codes_ENK: Tensor, grid_E: Tensor, max_rows: int
) -> tuple[Call, Tensor]:
    """The same for decode: A [E, max_rows, K], of which num_rows[e] rows count. The result of row r is row places[r] of
    the output, flattened to [E * max_rows, N]. Raises ValueError if an expert has more than max_rows rows."""
    _check_experts(x, num_rows, codes_ENK)
    num_experts, n, k = codes_ENK.shape
    _check_operand("B", codes_ENK, grid_E, num_blocks(n))
    _check_outputs(n, 2)
    if max(num_rows, default=0) > max_rows:
        raise ValueError(f"max_rows: {max_rows}; rule: at least the {max(num_rows)} rows of the fullest expert")
    source = torch.full((num_experts, max_rows), -1)
    for expert, first in enumerate(itertools.accumulate(num_rows, initial=0)):
        if expert < num_experts:
            source[expert, : num_rows[expert]] = torch.arange(first, first + num_rows[expert])
    source = source.to(x.data.device)
    codes, scale = _place_rows(x, source.view(-1))
    codes, scale = codes.view(num_experts, max_rows, k), scale.view(num_experts, max_rows, -1)
    _check_operand("A", codes, scale, max_rows)
    out = torch.empty(num_experts, max_rows, n, dtype=torch.bfloat16, device=codes.device)
    counts = torch.tensor(list(num_rows), dtype=torch.int32, device=codes.device)
    expected = max(1, -(-sum(num_rows) // num_experts))
    arguments = ((codes, tma_scale(scale)), (codes_ENK, grid_E), out, counts, expected)
    places = (source.view(-1) >= 0).nonzero().squeeze(-1)
    return Call("m_grouped_fp8_gemm_nt_masked", arguments, out, {"recipe": BLOCKWISE}), places


def _check_experts(x: Fp8Tensor, num_rows: Sequence[int], codes_ENK: Tensor) -> None:
    if codes_ENK.dim() != 3 or len(num_rows) != len(codes_ENK):
        raise ValueError(f"num_rows: {len(num_rows)} experts; rule: as many as weights, {tuple(codes_ENK.shape)}")
    if sum(num_rows) != len(x.data):
        raise ValueError(f"num_rows: {sum(num_rows)} in all; rule: every one of the {len(x.data)} rows has one expert")
    _check_contraction(x.data, codes_ENK)


def prepare_grouped_wgrad(dy_t: Sequence[Fp8Tensor], x_t: Sequence[Fp8Tensor], main_grad_ENK: Tensor) -> Call | None:
    """Per expert dY^T [N, T_e] and X^T [K, T_e], quantized along tokens, in one call: main_grad [E, N, K] += dY^T X.

    Tokens are padded to 128 per expert; one without any adds nothing. None if no expert has any."""
    shape = (len(dy_t), len(dy_t[0].data), len(x_t[0].data))
    _check_main_grad(main_grad_ENK, shape)
    for dy, x in zip(dy_t, x_t, strict=True):
        _check_contraction(dy.data, x.data)
    lengths = [num_blocks(columns.shape[1]) * BLOCK for columns in dy_t]
    if not sum(lengths):
        return None
    left, right = _flatten_groups(dy_t), _flatten_groups(x_t)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=main_grad_ENK.device)
    keywords = {"c": main_grad_ENK, "recipe": ROWWISE}
    arguments = (left, right, main_grad_ENK, lengths, sizes)
    return Call("k_grouped_fp8_gemm_nt_contiguous", arguments, main_grad_ENK, keywords)


def _flatten_groups(groups: Sequence[Fp8Tensor]) -> Operand:
    """Experts' x^T, each [K, T_e padded], one after the other in one flat buffer; scales [K, sum of G_e] for TMA."""
    operands = [pad_tokens(columns) for columns in groups if columns.shape[1]]
    codes = torch.cat([codes.view(torch.uint8).reshape(-1) for codes, _ in operands]).view(E4M3)
    return codes, tma_scale(torch.cat([scale for _, scale in operands], dim=1))


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """[E, ...] of contiguous parts of one shape: a view where one follows the other (an engine's experts), else a
    copy."""
    first = parts[0]
    size, memory = first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    if all(
        part.untyped_storage().data_ptr() == memory and part.data_ptr() == first.data_ptr() + i * size
        for i, part in enumerate(parts)
    ):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([part.view(torch.uint8) for part in parts]).view(first.dtype)
