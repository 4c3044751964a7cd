"""A stand-in for DeepGEMM on the CPU: its signatures, what it demands of layouts, and what it documents to compute, the
latter with the exact GEMM. It knows nothing of our adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8 import E4M3, Fp8Format, Fp8Tensor, expand_weight_scale, gemm_nt, prepare_weight

Operand = tuple[Tensor, Tensor]
ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def _exact(a: Operand, b: Operand) -> Tensor:
    fmt = Fp8Format()
    left, right = (Fp8Tensor(codes, scale.contiguous(), fmt) for codes, scale in (a, b))
    return gemm_nt(left, prepare_weight(right))


def _check_rows(operand: Operand) -> None:
    """TMA: contiguous codes with 16-byte rows; fp32 scales, MN-major, pitch of whole 16 bytes."""
    codes, scale = operand
    assert codes.dtype == E4M3
    assert codes.is_contiguous()
    assert codes.shape[-1] % 16 == 0
    assert scale.dtype == torch.float32
    assert scale.shape == (*codes.shape[:-1], -(-codes.shape[-1] // 128))
    assert scale.stride(-2) == 1
    assert scale.stride(-1) % 4 == 0
    assert scale.stride(-1) >= codes.shape[-2]


def _expanded(operand: Operand) -> Operand:
    codes, grid = operand
    assert codes.is_contiguous()
    assert grid.is_contiguous()
    assert grid.shape == (-(-codes.shape[0] // 128), -(-codes.shape[1] // 128))
    return codes, expand_weight_scale(grid, len(codes))


def fp8_gemm_nt(
    a: Any,
    b: Any,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: Any = None,
) -> None:
    assert d.shape == (len(a[0]), len(b[0]))
    assert d.is_contiguous()
    assert d.shape[1] * d.element_size() % 16 == 0
    assert set(compiled_dims) <= set("mnk")
    _check_rows(a)
    if recipe == (1, 128, 128):
        assert c is None
        assert d.dtype == torch.bfloat16
        d.copy_(_exact(a, _expanded(b)).bfloat16())
    else:
        assert recipe == (1, 1, 128)
        _check_rows(b)
        assert d.dtype == torch.float32
        assert c is not None
        assert c.data_ptr() == d.data_ptr()
        d.copy_(c + _exact(a, b))


def m_grouped_fp8_gemm_nt_contiguous(
    a: Any,
    b: Any,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: Any = None,
) -> None:
    """The kernel looks at the group of a block's first row only."""
    _check_rows(a)
    assert recipe == (1, 128, 128)
    assert grouped_layout.dtype == torch.int32
    assert grouped_layout.is_contiguous()
    assert d.shape == (len(a[0]), b[0].shape[1])
    d.fill_(float("nan"))
    for first in range(0, len(d), ALIGNMENT):
        rows = slice(first, first + ALIGNMENT)
        groups = grouped_layout[rows]
        group = int(groups[0])
        assert set(groups.tolist()) <= {group, -1}
        if group >= 0:
            weight = _expanded((b[0][group], b[1][group]))
            d[rows] = _exact((a[0][rows], a[1][rows]), weight).bfloat16()


def m_grouped_fp8_gemm_nt_masked(
    a: Any,
    b: Any,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    _check_rows(a)
    assert recipe == (1, 128, 128)
    assert masked_m.dtype == torch.int32
    assert masked_m.shape == (len(b[0]),)
    assert expected_m > 0
    assert a[1].stride(0) == a[1].stride(2) * a[1].shape[2]
    d.fill_(float("nan"))
    for e, count in enumerate(masked_m.tolist()):
        weight = _expanded((b[0][e], b[1][e]))
        d[e, :count] = _exact((a[0][e, :count], a[1][e, :count]), weight).bfloat16()


def k_grouped_fp8_gemm_nt_contiguous(
    a: Any,
    b: Any,
    d: Tensor,
    ks: list[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: Any = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    use_padded_sf_layout: bool = False,
) -> None:
    """Flat codes: per group [M, k], one after the other; scales [M, sum of k/128], MN-major."""
    assert recipe == (1, 1, 128)
    assert c is not None
    assert c.data_ptr() == d.data_ptr()
    assert d.dtype == torch.float32
    assert grouped_layout.dtype == torch.int32
    assert grouped_layout.tolist() == ks
    assert all(k % ALIGNMENT == 0 for k in ks)
    _, m, n = d.shape
    for operand, rows in ((a, m), (b, n)):
        assert operand[0].dim() == 1
        assert operand[0].numel() == rows * sum(ks)
        assert operand[1].shape == (rows, sum(ks) // 128)
        assert operand[1].stride(0) == 1
        assert operand[1].stride(1) % 4 == 0
    start = 0
    for e, k in enumerate(ks):
        groups = slice(start // 128, (start + k) // 128)
        parts = [
            (codes[start * rows : (start + k) * rows].view(rows, k), scale[:, groups])
            for (codes, scale), rows in ((a, m), (b, n))
        ]
        d[e] = c[e] + _exact(*parts)
        start += k
