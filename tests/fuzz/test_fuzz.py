"""Fuzz: quantizers, GEMM, attention and a whole model on any shape, value, dtype and stride.

A seeded subset runs with the other tests; `make fuzz` runs 10,000 fresh cases (JETRL_FUZZ_CASES per test).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8 import (
    Fp8Format,
    Fp8Weight,
    fp8_matmul,
    gemm_nt,
    prepare_weight,
    quantize_columns,
    quantize_rows,
    quantize_weight,
    whole,
)
from jetrl_megatron.native import tensors as compiled
from jetrl_megatron.ops import reference
from tests.support.models import tiny_model
from tests.support.oracles import codes_of, gemm_exact, quantize_blocks
from tests.support.trainer import load_policy

CASES = os.environ.get("JETRL_FUZZ_CASES")
cases = settings(max_examples=int(CASES or 60), deadline=None, derandomize=CASES is None, database=None)
SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
SCALE_FORMATS = st.sampled_from(["fp32", "pow2"])
VALUES = st.sampled_from(["gaussian", "spread", "zeros", "denormal", "largest", "outlier", "signed zeros"])
SUMMABLE = VALUES.filter(lambda kind: kind != "largest")  # products of the largest values overflow fp32
FAULTS = st.sampled_from([None, None, None, float("nan"), float("inf"), float("-inf")])
STRIDES = st.sampled_from(["contiguous", "transposed", "every second column", "offset"])


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "spread":
        x = x * torch.exp2(torch.randint(-30, 30, shape, generator=generator).float())
    elif kind == "zeros":
        x = x * (torch.rand(shape, generator=generator) < 0.02)
    elif kind == "denormal":
        x = x * 2.0**-133
    elif kind == "largest":
        x = torch.sign(x) * torch.finfo(dtype).max
    elif kind == "outlier":
        x.view(-1)[seed % x.numel()] = 3e4
    elif kind == "signed zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    return x.to(dtype)


def strided(x: Tensor, how: str) -> Tensor:
    """The same values in another memory layout."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "every second column":
        return torch.stack([x, torch.full_like(x, 7.0)], dim=-1).flatten(1)[:, ::2]
    if how == "offset":
        return torch.cat([torch.full_like(x[:, :1], 9.0), x], dim=1)[:, 1:]
    return x


@cases
@given(
    seed=SEEDS, m=st.integers(1, 140), k=st.integers(1, 300), dtype=DTYPES, kind=VALUES, how=STRIDES,
    fault=FAULTS, scale_format=SCALE_FORMATS,
)  # fmt: skip
def test_quantizers(
    seed: int, m: int, k: int, dtype: torch.dtype, kind: str, how: str, fault: float | None, scale_format: str
) -> None:
    """Rows, blocks and columns are bitwise the numpy oracle's; a fault poisons its own group only."""
    x = values(kind, (m, k), dtype, seed)
    if fault is not None:
        x[seed % m, seed % k] = fault
    fmt, wide = Fp8Format("block", scale_format), x.float().numpy()
    for found, expected in (
        (quantize_rows(strided(x, how), fmt), quantize_blocks(wide, 1, scale_format)),
        (quantize_weight(strided(x, how), fmt), quantize_blocks(wide, 128, scale_format)),
        (quantize_columns(strided(x, how), fmt), quantize_blocks(wide.T.copy(), 1, scale_format)),
    ):
        assert (codes_of(found.data) == expected[0]).all()
        assert torch.equal(found.scale.nan_to_num(nan=-1.0), torch.from_numpy(expected[1]).nan_to_num(nan=-1.0))


@cases
@given(
    seed=SEEDS, m=st.integers(1, 20), n=st.integers(1, 40), k=st.integers(1, 520), kinds=st.tuples(SUMMABLE, SUMMABLE),
    how=STRIDES, scale_format=SCALE_FORMATS,
)  # fmt: skip
def test_gemm(seed: int, m: int, n: int, k: int, kinds: tuple[str, str], how: str, scale_format: str) -> None:
    """One corner of the result is that of exact rational arithmetic; all of it is the torch form's, and rows and
    columns do not depend on their neighbours. Activations in any memory layout."""
    fmt = Fp8Format("block", scale_format)
    x, w = values(kinds[0], (m, k), torch.bfloat16, seed), values(kinds[1], (n, k), torch.bfloat16, seed + 1)
    quantized = quantize_weight(w, fmt)
    weight = Fp8Weight.of(quantized, whole(n))
    found = fp8_matmul(strided(x, how), weight)
    a = quantize_rows(x, fmt)
    corner = [(codes_of(t.data)[:2], t.scale.numpy()[:2]) for t in (a, quantized)]
    assert torch.equal(found[:2, :2], torch.from_numpy(gemm_exact(corner[0], corner[1])))
    assert torch.equal(fp8_matmul(x[-1:], weight), found[-1:])
    assert torch.equal(fp8_matmul(x, weight, dtype=torch.bfloat16), found.bfloat16())
    with mock.patch.object(compiled, "usable", return_value=False):
        assert torch.equal(gemm_nt(a, prepare_weight(quantized)), found)


@cases
@given(
    seed=SEEDS, lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4), groups=st.integers(1, 3),
    per_group=st.integers(1, 4), dim=st.sampled_from([16, 32, 64, 70, 96, 128]), chunk=st.integers(1, 40),
    kind=SUMMABLE,
)  # fmt: skip
def test_attention(seed: int, lengths: list[int], groups: int, per_group: int, dim: int, chunk: int, kind: str) -> None:
    """Packed training attention equals chunked prefill and decode from a shuffled pool, and the torch form."""
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    total, scale = cu[-1], dim**-0.5
    q, k, v = (
        values(kind, (total, h, dim), torch.bfloat16, seed + i)
        for i, h in enumerate((groups * per_group, groups, groups))
    )
    full = ops.packed_attention(q, k, v, cu, scale)
    slots = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    k_pool, v_pool = torch.empty_like(k), torch.empty_like(v)
    k_pool[slots], v_pool[slots] = k, v
    for b, length in enumerate(lengths):
        row = torch.tensor([seed % 3])
        table = torch.zeros(3, length, dtype=torch.int32)
        table[row] = slots[cu[b] : cu[b + 1]].int()
        first = max(0, length - chunk)
        rows, kv_len = slice(cu[b] + first, cu[b + 1]), torch.arange(first + 1, length + 1)
        part = (q[rows], k_pool, v_pool, table, row, [0, length - first], kv_len, scale)
        assert torch.equal(ops.paged_attention(*part), full[rows])
        assert torch.equal(reference.attention(*part), full[rows])
        last = (q[rows][-1:], k_pool, v_pool, table, row, None, kv_len[-1:], scale)
        assert torch.equal(ops.paged_attention(*last), full[rows][-1:])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tiny_model(tmp_path_factory, "qwen3_moe", num_hidden_layers=1, hidden_size=128, head_dim=32)
    return load_policy(path, fp8=True)


@cases
@given(
    seed=SEEDS, lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8), padding=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
)  # fmt: skip
def test_whole_model(policy: Any, seed: int, lengths: list[int], padding: int, temperature: float) -> None:
    """A mixture-of-experts model in FP8: log-probs of sequences packed together, with a tail of padding, are those of
    each sequence alone."""
    from jetrl_megatron.megatron.step import compute_logprobs, pack

    generator = torch.Generator().manual_seed(seed)
    vocab_size = policy.dims.vocab_size
    pairs = [(torch.randint(0, vocab_size, (n,), generator=generator).tolist(), 1) for n in lengths]
    together = compute_logprobs(policy, [pack(pairs, temperature, 1, sum(lengths) + padding)])[0]
    alone = torch.cat(compute_logprobs(policy, [pack([pair], temperature, 1) for pair in pairs]))
    assert bool(torch.isfinite(together).all())
    assert torch.equal(together, alone)
