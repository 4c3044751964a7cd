"""Attention: one result for training, chunked prefill and paged decode."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.fp8.gpu.launch import Plan
from jetrl_megatron.ops import reference
from jetrl_megatron.ops.kernels import use_kernels
from tests.support.oracles import rel_error

LENGTHS = (1, 7, 150, 33, 128, 129)
CU = [0, 1, 8, 158, 191, 319, 448]
SHAPES = [(4, 2, 128), (4, 4, 64), (3, 1, 96), (2, 2, 16)]  # heads, kv heads, head dim


def tensors(
    heads: int, groups: int, dim: int, seed: int = 0, total: int = CU[-1]
) -> tuple[Tensor, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(total, n, dim, generator=generator).bfloat16() for n in (heads, groups, groups))
    v = v * torch.exp(torch.randn(total, 1, 1, generator=generator)).bfloat16()
    return q, k, v, dim**-0.5


def attention64(q: Tensor, k: Tensor, v: Tensor, cu: list[int], scale: float) -> Tensor:
    """The textbook formula in fp64, sequence by sequence."""
    out = []
    for start, end in pairwise(cu):
        qs, ks, vs = (t[start:end].double().transpose(0, 1) for t in (q, k, v))
        ks, vs = (t.repeat_interleave(q.shape[1] // k.shape[1], 0) for t in (ks, vs))
        scores = (qs @ ks.transpose(1, 2)) * scale
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        p = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out.append((p @ vs).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(shape: tuple[int, int, int]) -> None:
    """Packed causal attention, GQA included, is within 2.5e-3 relative Frobenius of fp64 (one bf16 rounding is 1.7e-3),
    and every element within a bf16 ulp of its row's largest value."""
    q, k, v, scale = tensors(*shape)
    actual, exact = ops.packed_attention(q, k, v, CU, scale), attention64(q, k, v, CU, scale)
    assert rel_error(actual, exact) < 2.5e-3
    assert ((actual.double() - exact).abs() <= 2.0**-8 * exact.abs().amax(-1, keepdim=True)).all()


def test_extreme_scores() -> None:
    """Scores of +-1000 neither overflow nor lose the softmax: within 1 % of fp64."""
    q, k, v, scale = tensors(4, 2, 64, seed=5)
    q = q * 60
    assert rel_error(ops.packed_attention(q, k, v, CU, scale), attention64(q, k, v, CU, scale)) < 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_do_not_see_each_other(shape: tuple[int, int, int]) -> None:
    """A sequence alone, in any company and order and with a padding tail has the same bits; padding gets zeros."""
    q, k, v, scale = tensors(*shape)
    full = ops.packed_attention(q, k, v, CU, scale)
    for start, end in pairwise(CU):
        alone = ops.packed_attention(q[start:end], k[start:end], v[start:end], [0, end - start], scale)
        assert torch.equal(alone, full[start:end])
    order = [3, 0, 5, 2]
    index = torch.cat([torch.arange(CU[i], CU[i + 1]) for i in order])
    cu = [0]
    for i in order:
        cu.append(cu[-1] + LENGTHS[i])
    tail = torch.cat([index, torch.zeros(9, dtype=torch.int64)])
    mixed = ops.packed_attention(q[tail], k[tail], v[tail], cu, scale)
    assert torch.equal(mixed[: len(index)], full[index])
    assert not mixed[len(index) :].any()


def paged(k: Tensor, v: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The packed keys scattered over a larger pool: (k pool, v pool, table [B, longest] of slots)."""
    slots = torch.randperm(2 * len(k), generator=torch.Generator().manual_seed(seed))[: len(k)]
    pools = []
    for x in (k, v):
        pool = torch.full((2 * len(x), *x.shape[1:]), 7.0, dtype=x.dtype)  # stale but finite
        pool[slots] = x
        pools.append(pool)
    table = torch.zeros(len(LENGTHS), max(LENGTHS) + 5, dtype=torch.int32)
    for b, (start, end) in enumerate(pairwise(CU)):
        table[b, : end - start] = slots[start:end].int()
    return pools[0], pools[1], table


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 5, 64, 128, 1000])
def test_chunked_prefill_and_decode_equal_training(shape: tuple[int, int, int], chunk: int) -> None:
    """From a paged pool, in chunks of any size down to single-token decode, for all sequences at once: bitwise the
    packed training result."""
    q, k, v, scale = tensors(*shape)
    full = ops.packed_attention(q, k, v, CU, scale)
    k_pool, v_pool, table = paged(k, v, seed=chunk)
    actual = torch.zeros_like(full)
    steps = range(0, max(LENGTHS), chunk)
    if chunk == 1:
        steps = range(0, max(LENGTHS), 9)  # every ninth decode step
    for first in steps:
        live = [b for b, n in enumerate(LENGTHS) if first < n]
        index, cu, kv_len = [], [0], []
        for b in live:
            last = min(first + chunk, LENGTHS[b])
            index += range(CU[b] + first, CU[b] + last)
            kv_len += range(first + 1, last + 1)
            cu.append(len(index))
        picked, cuts = torch.tensor(index), None if chunk == 1 else cu
        o = ops.paged_attention(q[picked], k_pool, v_pool, table, torch.tensor(live), cuts, torch.tensor(kv_len), scale)
        actual[picked] = o
        assert torch.equal(o, full[picked]), (chunk, first)
    if chunk > 1:
        assert torch.equal(actual, full)


def test_long_sequences_are_cut_into_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory limit of one work item and the query chunk change the grouping, not the bits."""
    q, k, v, scale = tensors(4, 2, 64, seed=2, total=600)
    expected = ops.packed_attention(q, k, v, [0, 400, 600], scale)
    monkeypatch.setattr(reference, "_MAX_SCORES", 1)
    monkeypatch.setattr(reference, "_QUERY_CHUNK", 37)
    assert torch.equal(ops.packed_attention(q, k, v, [0, 400, 600], scale), expected)


def test_what_the_triton_set_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For backward on a GPU, besides q, k and v: the result and two fp32 per query and head, as memory is planned;
    nothing of T x T. No kernel is launched."""
    monkeypatch.setattr(Plan, "run", lambda plan: plan.result)
    q, k, v, scale = tensors(4, 2, 64)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    use_kernels("triton")
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ops.packed_attention(q.requires_grad_(), k, v, CU, scale)
    finally:
        use_kernels(None)
    given = sum(x.numel() * 2 for x in (q, k, v))
    assert sum(storages.values()) - given == len(q) * (2 * 4 * 64 + 2 * 4 * 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: tuple[int, int, int]) -> None:
    """dq, dk, dv within 0.5 % relative Frobenius of fp64 autograd, zero on the padding tail."""
    q, k, v, scale = tensors(*shape)
    tail = torch.zeros(6, 1, 1, dtype=q.dtype)
    narrow = [torch.cat([t, tail.expand(-1, *t.shape[1:])]).requires_grad_() for t in (q, k, v)]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    dy = torch.randn(CU[-1] + 6, *q.shape[1:], generator=torch.Generator().manual_seed(3)).bfloat16()
    ops.packed_attention(*narrow, CU, scale).backward(dy)
    attention64(*wide, CU, scale).backward(dy[: CU[-1]].double())
    for ours, exact in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        assert rel_error(ours.grad[: CU[-1]], exact.grad) < 5e-3
        assert not ours.grad[CU[-1] :].any()
