"""From a placement to the GPU of every rank of an engine, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_megatron.config import ConfigError, RunConfig
from jetrl_megatron.megatron.groups import Ranks
from jetrl_megatron.rollout.engine import EngineSpec
from jetrl_megatron.rollout.environment import engine_environment
from jetrl_megatron.trainer import session
from tests.support.models import tiny_model

ROOT = Path(__file__).parents[2]


def test_sglang_gives_each_rank_its_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SGLang's own launcher, given our arguments for an engine of two ranks from GPU 4 on, takes GPUs 4 and 5. An
    engine of one GPU that is to decode through graphs keeps them after all of SGLang's rules, up to its batch size."""
    folder = tiny_model(tmp_path_factory, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "jetrl_fp8", "granularity": "block", "scale_format": "fp32", "tp_invariant": False}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    environment = engine_environment(1, 2)
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)])
    command = [sys.executable, "-m", "tests.rollout.scheduler_gpus", str(folder), "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    written = {path.name: path.read_text() for path in folder.glob("gpu_of_rank_*")}
    assert written == {"gpu_of_rank_0": "cuda:4", "gpu_of_rank_1": "cuda:5"}, done.stderr[-4000:]
    graphs = json.loads((folder / "graphs.json").read_text())
    assert graphs == {"decode": "full", "batches": [1, 2, 4, 8], "prefill": "disabled"}


def test_an_engine_without_a_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    """The device follows from the place alone, not from what this machine has."""
    spec = EngineSpec(tmp_path, "jetrl_fp8", 1, 8, 1024, 64, 0.3, 1, 0, tmp_path / "log")
    assert spec.server_args()["device"] == "cpu"
    assert "base_gpu_id" not in spec.server_args()


def test_unequal_free_memory_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's check of the free memory of an engine's GPUs is off, as SGLang reads it, unless the user turns it on."""
    from sglang.srt.environ import envs

    for given, expected in ((None, False), ("true", True)):
        monkeypatch.delenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", raising=False)
        if given is not None:
            monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", given)
        for key, value in engine_environment(1, 2).items():
            if key.startswith("SGLANG_ENABLE"):
                monkeypatch.setenv(key, value)
        assert envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get() is expected


@pytest.fixture
def two_nodes() -> Ranks:
    """The main rank of two nodes with four training ranks each, on GPUs."""
    return Ranks(0, 8, 0, 4, 0, 1, 0, 2, num_nodes=2, device=torch.device("cuda", 0))


def config(num_engines: int) -> RunConfig:
    rollout = {"num_engines": num_engines, "tensor_parallel": 2}
    return RunConfig.model_validate({"model": {"path": "x"}, "data": {"path": "x"}, "rollout": rollout})


def test_a_run_starts_its_engines_where_the_placement_says(
    two_nodes: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four engines of two GPUs on two nodes of four: GPUs 0-1 and 2-3 of each, started by the other node's first rank
    there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    started: list[Any] = []
    monkeypatch.setattr(session, "EnginePool", lambda *given: started.append(given))
    monkeypatch.setattr(session, "active_name", lambda: "triton")
    cfg = config(4)
    places = session._engine_places(cfg, two_nodes)
    starter: Any = SimpleNamespace()
    session._start_engines(cfg, tmp_path, {}, places, {1: starter})
    ((specs, _, _, _, starters),) = started
    assert [(spec.first_gpu, at is starter) for spec, at in zip(specs, starters, strict=True)] == [
        (0, False),
        (0, True),
        (2, False),
        (2, True),
    ]
    assert all(spec.cuda_graphs for spec in specs)


@pytest.mark.parametrize(
    ("backend", "expert_size", "num_ranks", "expected"),
    [
        ("emulated", 128, 1, False),
        ("triton", 192, 1, True),
        ("triton", 192, 2, False),
        ("triton", None, 2, True),
        ("deep_gemm", 768, 1, True),
        ("deep_gemm", 192, 1, False),
        ("deep_gemm", None, 2, True),
    ],
)
def test_whose_decode_reads_nothing_on_the_host(
    backend: str, expert_size: int | None, num_ranks: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By backend; with DeepGEMM not where experts of 192 rows are taken one by one."""
    monkeypatch.setattr(session, "active_name", lambda: backend)
    hf_config = {} if expert_size is None else {"moe_intermediate_size": expert_size}
    assert session._decodes_on_the_device(hf_config, num_ranks) == expected


def test_a_run_refuses_engines_without_a_place(two_nodes: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule as that of `jetrl plan`, on every rank, before a model is built."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match=r"rollout\.num_engines: 3 of 2 GPUs each on 2 node\(s\) of 4 GPUs"):
        session._engine_places(config(3), two_nodes)
