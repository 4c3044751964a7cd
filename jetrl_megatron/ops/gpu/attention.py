"""Triton's attention: prefill, chunks and decode bitwise the same, in any company; near the exact reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jetrl_megatron.fp8.gpu.attention import attention
from jetrl_megatron.ops import reference
from jetrl_megatron.ops.gpu.linears import Agreement, num_different, relative_error

# bf16 weights and outputs each round to 2^-9 at most; the sum over keys averages.
BOUND = 5e-3
SHAPES = (((700, 129, 1), 32, 8, 128), ((65, 300), 6, 2, 64))  # lengths of the sequences, H, G, D
SMALL_SHAPES = (((70, 5), 6, 2, 24),)


def check_attention(device: str, shape: tuple[tuple[int, ...], int, int, int]) -> Iterator[Agreement]:
    lengths, heads, groups, dim = shape
    case = f"lengths={lengths} H={heads} G={groups} D={dim}"
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, dim, generator=generator).bfloat16() for h in (heads, groups, groups))
    slots = torch.randperm(total, generator=generator)
    k_pool, v_pool = torch.empty_like(k), torch.empty_like(v)
    k_pool[slots], v_pool[slots] = k, v
    table = torch.nn.utils.rnn.pad_sequence(list(slots.split(list(lengths))), batch_first=True)
    kv_len = torch.cat([torch.arange(1, length + 1) for length in lengths])
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    scale = dim**-0.5
    there = [x.to(device) for x in (q, k_pool, v_pool, table, kv_len)]

    def run(queries: Tensor, sequences: list[int], cu: list[int] | None) -> Tensor:
        picked, rows = queries.to(device), torch.tensor(sequences, device=device)
        return attention(there[0][picked], there[1], there[2], there[3], rows, cu, there[4][picked], scale)

    whole = run(torch.arange(total), list(range(len(lengths))), ends)
    expected = reference.attention(q, k_pool, v_pool, table, torch.arange(len(lengths)), ends, kv_len, scale)
    yield Agreement("triton", "attention", case, relative_error(whole, expected), BOUND)
    last = torch.tensor(ends[1:]) - 1
    decoded = run(last, list(range(len(lengths))), None)
    yield Agreement("triton", "attention, decode = prefill", case, num_different(decoded, whole[last.to(device)]), 0)
    alone = run(last[:1], [0], None)
    yield Agreement(
        "triton", "attention, alone = in a batch", case, num_different(alone, whole[last[:1].to(device)]), 0
    )
    cut = lengths[0] // 3
    for name, first, end in (("first", 0, cut), ("second", cut, lengths[0])):
        chunk = run(torch.arange(first, end), [0], [0, end - first])
        yield Agreement("triton", f"attention, {name} chunk = prefill", case, num_different(chunk, whole[first:end]), 0)
