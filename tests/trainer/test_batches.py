"""Micro-batches of data-parallel ranks that share experts, and of virtual pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jetrl_megatron.megatron.groups import Ranks
from jetrl_megatron.samples import Prompt, Sample
from jetrl_megatron.trainer.batches import UpdateBatch, make_updates

RANKS = Ranks(0, 4, 0, 1, 0, 1, 0, 4)


def sample(length: int, index: int) -> Sample:
    prompt = Prompt(index, index, "", (3,), "")
    return Sample(prompt, 0, [4] * length, [0.5] * length, "stop", 0, advantage=1.0)


def per_rank(lengths: list[int], expert_size: int) -> list[UpdateBatch]:
    samples = [sample(length, i) for i, length in enumerate(lengths)]
    ranks = [replace(RANKS, data=d, expert=d % expert_size, expert_size=expert_size) for d in range(4)]
    return [make_updates(samples, 1, r, 64, 1.0, sequence=False)[0] for r in ranks]


@pytest.mark.parametrize("lengths", [[60, 60, 60, 32, 31], [60], [5] * 40])
def test_ranks_that_share_experts_run_equally_many_forwards(lengths: list[int]) -> None:
    """Every layer's all-to-all needs all ranks: they get equally many micro-batches, padded with masked tokens; real
    tokens are those of the samples, each once."""
    updates = per_rank(lengths, expert_size=2)
    assert len({len(update.micro_batches) for update in updates}) == 1
    masks = [batch.loss_inputs["mask"] for update in updates for batch in update.micro_batches]
    assert sum(int(mask.sum()) for mask in masks) == sum(lengths)


@pytest.mark.parametrize("lengths", [[60, 60, 60, 32, 31], [60], [5] * 40, [0, 0]])
def test_virtual_stages_get_whole_groups_of_micro_batches(lengths: list[int]) -> None:
    """The interleaved schedule takes micro-batches in groups of the pipeline's size, all of one length: masked ones
    fill the last group; real tokens are those of the samples, each once."""
    samples = [sample(length, i) for i, length in enumerate(lengths)]
    rank = replace(RANKS, data_size=1, pipeline_size=2, virtual_size=2)
    (update,) = make_updates(samples, 1, rank, 64, 1.0, sequence=False)
    assert len(update.micro_batches) % 2 == 0
    assert len({batch.num_tokens for batch in update.micro_batches}) == 1
    assert sum(int(batch.loss_inputs["mask"].sum()) for batch in update.micro_batches) == sum(lengths)


def test_other_ranks_run_no_more_than_they_need() -> None:
    """Without shared experts nothing is padded."""
    counts = [len(update.micro_batches) for update in per_rank([60, 60, 60, 32, 31], expert_size=1)]
    assert len(set(counts)) > 1
