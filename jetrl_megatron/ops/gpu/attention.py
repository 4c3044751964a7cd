"""Triton's attention: prefill, chunks and decode bitwise the same, in any company, by any number of programs; near the
exact reference. Its backward: near fp64's, the same when run twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from jetrl_megatron.fp8.gpu.attention import SEGMENT, attention
from jetrl_megatron.ops import reference
from jetrl_megatron.ops.attention import packed_pool
from jetrl_megatron.ops.gpu import kernels
from jetrl_megatron.ops.gpu.linears import Agreement, num_different, relative_error

# bf16 weights and outputs each round to 2^-9 at most; the sum over keys averages. Backward: P, dS, O and the result do.
BOUND, BACKWARD_BOUND = 5e-3, 5e-3
Shape = tuple[tuple[int, ...], int, int, int]  # lengths of the sequences, H, G, D
SHAPES: tuple[Shape, ...] = (((700, 129, 1), 32, 8, 128), ((65, 300), 6, 2, 64), ((2100, 0, 513), 16, 2, 128))
SMALL_SHAPES: tuple[Shape, ...] = (((70, 5), 6, 2, 24), ((1100, 0, 65), 1, 1, 16))
SMALL_BACKWARD_SHAPES: tuple[Shape, ...] = (((70, 5), 6, 2, 24), ((130, 0, 65), 1, 1, 64))
SPLITS = (1, 2, 3, 16, None)
_BORDERS = (0, 62, 63, 64, 510, 511, 512, 1022, 1023, 1024)  # last key of a decoding query, around blocks and segments


@dataclass(frozen=True)
class _Sequences:
    """Packed queries, and their keys and values scattered over a pool, on a device; ends: offsets of the sequences."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    kv_len: Tensor
    ends: list[int]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @staticmethod
    def of(shape: Shape, device: str) -> _Sequences:
        lengths, (q, k, v) = shape[0], _packed(shape)
        slots = torch.randperm(len(q), generator=torch.Generator().manual_seed(2))
        k_pool, v_pool = torch.empty_like(k), torch.empty_like(v)
        k_pool[slots], v_pool[slots] = k, v
        table = torch.nn.utils.rnn.pad_sequence(list(slots.split(list(lengths))), batch_first=True)
        kv_len = torch.cat([torch.arange(1, length + 1) for length in lengths])
        q, k_pool, v_pool, table, kv_len = (x.to(device) for x in (q, k_pool, v_pool, table, kv_len))
        return _Sequences(q, k_pool, v_pool, table, kv_len, _ends(lengths))

    def prefill(self, sequences: list[int], first: int = 0, end: int | None = None) -> Tensor:
        """Tokens [first, end) of the sequences, each cut at its end."""
        spans = [(self.ends[b], self.ends[b + 1]) for b in sequences]
        spans = [(min(a + first, z), z if end is None else min(a + end, z)) for a, z in spans]
        picked = torch.cat([torch.arange(*span) for span in spans]).to(self.q.device)
        return self._run(picked, sequences, _ends([z - a for a, z in spans]), self.kv_len[picked])

    def decode(self, places: list[tuple[int, int]], splits: int | None, hidden: bool = False) -> Tensor:
        """Queries at (sequence, position), one by one. hidden: as if no key were visible."""
        picked = torch.tensor([self.ends[b] + position for b, position in places], device=self.q.device)
        return self._run(picked, [b for b, _ in places], None, self.kv_len[picked] * (not hidden), splits)

    def _run(
        self, picked: Tensor, sequences: list[int], cu: list[int] | None, kv_len: Tensor, splits: int | None = None
    ) -> Tensor:
        rows = torch.tensor(sequences, device=self.q.device)
        return attention(
            self.q[picked], self.k_pool, self.v_pool, self.table, rows, cu, kv_len, self.scale, splits=splits
        )


def _ends(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _packed(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    lengths, heads, groups, dim = shape
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (torch.randn(sum(lengths), h, dim, generator=generator).bfloat16() for h in (heads, groups, groups))
    return q, k, v


def _case(shape: Shape) -> str:
    lengths, heads, groups, dim = shape
    return f"lengths={lengths} H={heads} G={groups} D={dim}"


def check_attention(device: str, shape: Shape) -> Iterator[Agreement]:
    lengths, everyone = shape[0], list(range(len(shape[0])))
    at = _Sequences.of(shape, device)
    whole = at.prefill(everyone)
    q, k, v, table, kv_len = (x.cpu() for x in (at.q, at.k_pool, at.v_pool, at.table, at.kv_len))
    expected = reference.attention(q, k, v, table, torch.tensor(everyone), at.ends, kv_len, at.scale)

    def agreement(what: str, error: float, bound: float = 0) -> Agreement:
        return Agreement("triton", f"attention{what}", _case(shape), error, bound)

    yield agreement("", relative_error(whole, expected), BOUND)
    places = [(b, p) for b, n in enumerate(lengths) for p in sorted({*_BORDERS, n - 1}) if 0 <= p < n]
    wanted = whole[torch.tensor([at.ends[b] + p for b, p in places], device=device)]
    decoded = {splits: at.decode(places, splits) for splits in SPLITS}
    yield agreement(", decode = prefill", num_different(decoded[1], wanted))
    yield agreement(", split = whole", sum(num_different(split, wanted) for split in decoded.values()))
    unseen = [at.decode(places[:2], splits, hidden=True) for splits in SPLITS]
    yield agreement(", no keys = 0", sum(num_different(out, torch.zeros_like(out)) for out in unseen))
    yield agreement(", alone = in a batch", num_different(at.decode(places[-1:], 1), wanted[-1:]))
    reordered = at.prefill(everyone[::-1])
    turned = torch.cat([whole[at.ends[b] : at.ends[b + 1]] for b in everyone[::-1]])
    yield agreement(", sequences reordered", num_different(reordered, turned))
    cut = lengths[0] // 3
    for name, first, end in (("first", 0, cut), ("second", cut, lengths[0])):
        chunk = at.prefill([0], first, end)
        yield agreement(f", {name} chunk = prefill", num_different(chunk, whole[first:end]))


def check_splits(device: str) -> Iterator[Agreement]:
    """Decode by any number of programs against one. So that another order of the fp32 sums shows in bf16 results: many
    values, and segments that cancel each other."""
    generator, heads, dim = torch.Generator().manual_seed(3), 64, 128
    kv_len = torch.tensor([512, 513, 1100, 1985], device=device)
    q = torch.randn(len(kv_len), heads, dim, generator=generator).bfloat16().to(device)
    k, v = (torch.randn(2048, 1, dim, generator=generator) for _ in range(2))
    slots = torch.randperm(2048, generator=generator)
    v[slots.view(-1, SEGMENT)[::2]] += 100
    v[slots.view(-1, SEGMENT)[1::2]] -= 100
    k, v, table = k.bfloat16().to(device), v.bfloat16().to(device), slots.int().expand(3, -1).to(device)
    rows = torch.tensor([2, 0, 1, 0], device=device)
    one = attention(q, k, v, table, rows, None, kv_len, dim**-0.5, splits=1)
    for splits in SPLITS[1:]:
        found = attention(q, k, v, table, rows, None, kv_len, dim**-0.5, splits=splits)
        case = f"keys={kv_len.tolist()} H={heads} G=1 D={dim} splits={splits}"
        yield Agreement("triton", "attention, split = whole", case, num_different(found, one), 0)


def check_attention_backward(device: str, shape: Shape) -> Iterator[Agreement]:
    """Against fp64 autograd of the textbook formula; padding tokens; twice."""
    lengths, case = shape[0], _case(shape)
    ends, (q, k, v) = _ends(lengths), _packed(shape)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = shape[3] ** -0.5

    def run() -> tuple[Tensor, Tensor, Tensor]:
        there = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 7), value=1.0).to(device) for x in (dout, q, k, v))
        upstream, queries, keys, values = there
        _, saved = kernels.attention_forward(queries, keys, values, *packed_pool(queries, ends), scale)
        return kernels.attention_backward(upstream, queries, keys, values, saved, ends, scale)

    found, again = run(), run()
    for name, gradient, wanted in zip(("dq", "dk", "dv"), found, gradients64(dout, q, k, v, ends, scale), strict=True):
        error = relative_error(gradient[: ends[-1]], wanted)
        yield Agreement("triton", f"attention backward, {name}", case, error, BACKWARD_BOUND)
    tails = sum(float(gradient[ends[-1] :].ne(0).sum()) for gradient in found)
    yield Agreement("triton", "attention backward, padding = 0", case, tails, 0)
    differ = sum(num_different(a, b) for a, b in zip(found, again, strict=True))
    yield Agreement("triton", "attention backward twice", case, differ, 0)


def gradients64(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in fp64 by autograd of softmax(q k^T) v, sequence by sequence."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    outs = []
    for start, end in pairwise(ends):
        queries, keys, values = (x[start:end].transpose(0, 1) for x in wide)
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (keys, values))
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        weights = torch.softmax(((queries @ keys.transpose(1, 2)) * scale).masked_fill(hidden, float("-inf")), -1)
        outs.append((weights @ values).transpose(0, 1))
    dq, dk, dv = torch.autograd.grad(torch.cat(outs), wide, dout.double())
    return dq, dk, dv
