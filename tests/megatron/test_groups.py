"""Where a rank's process group and parameters go, on machines that this one only pretends to be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.megatron import groups


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_rank_takes_its_gpu_before_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 of a node makes GPU 3 current, and only then joins NCCL, bound to that GPU."""
    calls: list[tuple[str, object]] = []

    class JoinedError(Exception):
        """Ends `initialize` behind the default group."""

    def join(backend: str, **options: object) -> None:
        calls.append((backend, options["device_id"]))
        raise JoinedError

    pretend_gpus(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(JoinedError):
        groups.initialize(ParallelConfig(tensor=2), seed=0)
    assert calls == [("set_device", 3), ("nccl", torch.device("cuda", 3))]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU would hang in NCCL; the message has key, value, rule and fix."""
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"LOCAL_RANK=2 with 2 visible GPUs; rule: .*GPU LOCAL_RANK; fix: fewer ranks"):
        groups.select_device(2)


def test_without_cuda_the_device_is_the_cpu() -> None:
    """The CPU build stays where it is."""
    assert groups.select_device(5) == torch.device("cpu")
