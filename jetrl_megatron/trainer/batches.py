"""From samples to micro-batches: balanced over data-parallel ranks, packed, with what the loss needs per token.

Every rank computes the same assignment from the same samples, so nothing but the samples travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetrl_megatron.megatron.groups import Ranks
from jetrl_megatron.megatron.step import MicroBatch, pack
from jetrl_megatron.rl.losses import BatchNorm
from jetrl_megatron.samples import Sample


@dataclass(frozen=True)
class UpdateBatch:
    """One optimizer update: this rank's micro-batches and the counts of the whole update."""

    micro_batches: list[MicroBatch]
    norm: BatchNorm

    @property
    def num_tokens(self) -> int:
        """Packed tokens of this rank, padding included."""
        return sum(batch.num_tokens for batch in self.micro_batches)


def make_updates(
    samples: Sequence[Sample],
    num_updates: int,
    ranks: Ranks,
    micro_batch_tokens: int,
    temperature: float,
    sequence: bool,
) -> list[UpdateBatch]:
    """Split a rollout batch into `num_updates` updates of equally many samples, in order."""
    size = len(samples) // num_updates
    return [
        _update(samples[i * size : (i + 1) * size], ranks, micro_batch_tokens, temperature, sequence)
        for i in range(num_updates)
    ]


def _update(
    samples: Sequence[Sample], ranks: Ranks, micro_batch_tokens: int, temperature: float, sequence: bool
) -> UpdateBatch:
    norm = BatchNorm(
        num_tokens=sum(len(s.response_ids) for s in samples),
        num_sequences=len(samples),
        sequence_tokens=tuple(len(s.response_ids) for s in samples),
    )
    shares = _balance(samples, ranks.data_size)
    groups = [_fill(samples, share, micro_batch_tokens) for share in shares]
    multiple = ranks.tensor_size if sequence else 1
    pad_to = 0
    if ranks.pipeline_size > 1:  # the pipeline schedule exchanges tensors of one fixed length
        longest = max((sum(samples[i].num_tokens for i in group) for share in groups for group in share), default=0)
        pad_to = -(-longest // multiple) * multiple
    mine = groups[ranks.data]
    # Data-parallel ranks that share experts meet in every layer's all-to-all: equally many forwards.
    count = max(1, len(mine), *(map(len, groups) if ranks.expert_size > 1 else ()))
    if ranks.virtual_size > 1:  # the interleaved schedule sends micro-batches round the stages in groups of that size
        count += -count % ranks.pipeline_size
    mine = mine + [[]] * (count - len(mine))
    return UpdateBatch([_pack(samples, group, temperature, multiple, pad_to) for group in mine], norm)


def _balance(samples: Sequence[Sample], num_shares: int) -> list[list[int]]:
    """Sample indices per data-parallel rank: longest first, each to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    with_response = (i for i, s in enumerate(samples) if s.response_ids)
    for i in sorted(with_response, key=lambda i: (-samples[i].num_tokens, i)):
        lightest = loads.index(min(loads))
        shares[lightest].append(i)
        loads[lightest] += samples[i].num_tokens
    return shares


def _fill(samples: Sequence[Sample], share: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Neighbours in length share a micro-batch, which attention's padding likes."""
    groups: list[list[int]] = []
    used = 0
    for i in share:
        if not groups or used + samples[i].num_tokens > micro_batch_tokens:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += samples[i].num_tokens
    return groups


def _pack(
    samples: Sequence[Sample], group: Sequence[int], temperature: float, multiple: int, pad_to: int
) -> MicroBatch:
    """An empty group becomes a dummy of one masked token, so that every rank takes part in every collective."""
    if not group:
        batch = pack([((0, 0), 1)], temperature, multiple, pad_to)
        values: dict[str, list[float]] = {"advantages": [0.0], "logp_rollout": [0.0], "mask": [0.0]}
        ids = [0]
    else:
        chosen = [samples[i] for i in group]
        batch = pack([(s.token_ids, len(s.prompt.token_ids)) for s in chosen], temperature, multiple, pad_to)
        values = {
            "advantages": [s.advantage for s in chosen for _ in s.response_ids],
            "logp_rollout": [value for s in chosen for value in s.logprobs],
            "mask": [1.0 for s in chosen for _ in s.response_ids],
        }
        ids = [i for i, s in zip(group, chosen, strict=True) for _ in s.response_ids]
    batch.loss_inputs = {name: torch.tensor(v, dtype=torch.float32) for name, v in values.items()}
    batch.loss_inputs["seq_ids"] = torch.tensor(ids)
    return batch
