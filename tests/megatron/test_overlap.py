"""Tensor-parallel sums beside WGrad change no bit, and start before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.launch import launch


@pytest.mark.multi
def test_input_gradients_are_those_of_megatrons_mappings(tmp_path: Path) -> None:
    """FP8 and BF16, with and without sequence parallelism, on both ranks."""
    launch("tests.megatron.overlap_worker", 2, [str(tmp_path)], tmp_path, timeout_s=200)
    results = [torch.load(tmp_path / f"overlap.{rank}.pt") for rank in range(2)]
    assert [len(cases) for cases in results] == [4, 4]
    for cases in results:
        for fp8, sequence_parallel, expected, found, events in cases:
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b), (fp8, sequence_parallel)
            assert events == ["sum of dX", "WGrad"], (fp8, sequence_parallel)
    for one, other in zip(*results, strict=True):  # dX of two shards of W is one sum, not each rank's own
        assert one[1] or torch.equal(one[3][1], other[3][1])
        assert not torch.equal(one[3][2], other[3][2])
