"""Tensor-parallel communication beside the GEMMs changes no bit, and is started before them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.launch import launch


@pytest.mark.multi
def test_a_shared_input_gives_the_bits_of_megatrons_mappings(tmp_path: Path) -> None:
    """FP8 (codes or bf16 saved) and BF16, with and without sequence parallelism, on both ranks."""
    launch("tests.megatron.overlap_worker", 2, [str(tmp_path)], tmp_path, timeout_s=200)
    results = [torch.load(tmp_path / f"overlap.{rank}.pt") for rank in range(2)]
    assert [len(cases) for cases in results] == [6, 6]
    for cases in results:
        for saved, sequence_parallel, expected, found, events, kept in cases:
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b), (saved, sequence_parallel)
            assert kept == (12 if sequence_parallel else 24)  # a rank's own rows
            gemms = ["dgrad", "add_up", "wgrad"] if saved else ["add_up"]
            assert events == (["gather", "gather"] if sequence_parallel else []) + gemms, (saved, sequence_parallel)
    for one, other in zip(*results, strict=True):  # dX of two shards of W is one sum, not each rank's own
        assert one[1] or torch.equal(one[3][1], other[3][1])
        assert not torch.equal(one[3][2], other[3][2])
