"""One Megatron rank inside the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import free_port


@pytest.fixture(scope="package")
def single_process() -> Iterator[None]:
    """torch.distributed with one rank; Megatron's groups are built by `initialize`."""
    if torch.cuda.is_available():
        pytest.skip("the emulated backend is for machines without CUDA")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(key, value)
        patch.setenv("MASTER_PORT", str(free_port()))
        yield
    if dist.is_initialized():
        from jetrl_megatron.megatron.groups import shutdown

        shutdown()
