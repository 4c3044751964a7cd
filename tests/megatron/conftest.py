"""One Megatron rank inside the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import join_alone


@pytest.fixture(scope="package")
def single_process() -> Iterator[None]:
    """torch.distributed with one rank; Megatron's groups are built by `initialize`."""
    if torch.cuda.is_available():
        pytest.skip("the emulated backend is for machines without CUDA")
    join_alone()
    yield
    if dist.is_initialized():
        from jetrl_megatron.megatron.groups import shutdown

        shutdown()
