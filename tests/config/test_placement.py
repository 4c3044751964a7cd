"""Which GPUs engines take: by hand for whole tables of nodes, and what is refused."""

from __future__ import annotations

import itertools
import re

import pytest

from jetrl_megatron.cli.placement import check_engine_places, nodes_and_ranks, visible
from jetrl_megatron.config import ConfigError, RunConfig
from jetrl_megatron.config.capacity import EnginePlace, make_plan, place_engines, resolve_layout
from jetrl_megatron.config.schema import RolloutConfig
from tests.config.test_capacity import GPUS, RUNS, load

BASE = {"model": {"path": "x"}, "data": {"path": "x"}}


def rollout(engines: int, size: int) -> RolloutConfig:
    return RolloutConfig(num_engines=engines, tensor_parallel=size)


@pytest.mark.parametrize(
    ("nodes", "gpus", "ranks", "engines", "size", "shared", "expected"),
    [
        (1, 8, 8, 2, 4, True, [(0, 0), (0, 4)]),
        (1, 8, 8, 8, 1, True, [(0, i) for i in range(8)]),
        (1, 1, 1, 1, 1, True, [(0, 0)]),
        (2, 8, 8, 4, 4, True, [(0, 0), (1, 0), (0, 4), (1, 4)]),
        (2, 8, 8, 2, 8, True, [(0, 0), (1, 0)]),
        (1, 8, 4, 1, 4, False, [(0, 4)]),
        (2, 8, 4, 3, 2, False, [(0, 4), (1, 4), (0, 6)]),
        (2, 8, 6, 1, 2, False, [(0, 6)]),
        (2, 0, 4, 3, 2, False, [(0, None), (1, None), (0, None)]),
    ],
)
def test_places_by_hand(
    nodes: int, gpus: int, ranks: int, engines: int, size: int, shared: bool, expected: list[tuple[int, int | None]]
) -> None:
    """Engines are dealt over nodes; on one they lie side by side, on training's GPUs only where there are no others."""
    found = place_engines(rollout(engines, size), nodes, gpus, ranks)
    assert found.shared is shared
    assert found.engines == tuple(EnginePlace(*place) for place in expected)


def test_no_gpu_is_taken_twice_or_unevenly() -> None:
    """Over all small sizes: a placement gives every engine rank a GPU of its node, none two, and either no training GPU
    an engine rank or all of them one. Where counting says that such a placement exists, it is found."""
    for nodes, gpus, engines, size in itertools.product((1, 2, 3), range(1, 9), range(1, 9), (1, 2, 3, 4, 8)):
        for ranks in range(1, gpus + 1):
            per_node = -(-engines // nodes)
            beside = ranks + per_node * size <= gpus
            evenly = engines % nodes == 0 and per_node * size == ranks
            try:
                found = place_engines(rollout(engines, size), nodes, gpus, ranks)
            except ConfigError:
                assert not beside
                assert not evenly
                continue
            assert beside or evenly
            assert found.shared is not beside
            taken = [(p.node, p.first_gpu + i) for p in found.engines if p.first_gpu is not None for i in range(size)]
            assert len(set(taken)) == len(taken) == engines * size
            assert all(0 <= node < nodes and 0 <= gpu < gpus for node, gpu in taken)
            on_training = {place for place in taken if place[1] < ranks}
            assert len(on_training) == (nodes * ranks if found.shared else 0)


@pytest.mark.parametrize(
    ("nodes", "gpus", "ranks", "engines", "size", "message"),
    [
        (1, 4, 8, 1, 1, "parallel: 8 ranks on a node of 4 GPUs; rule: every training rank has a GPU of its own; fix: "),
        (
            2,
            8,
            8,
            1,
            16,
            "rollout.tensor_parallel: 16 on nodes of 8 GPUs; rule: an engine lies within one node; fix: at",
        ),
        (
            1,
            8,
            8,
            1,
            4,
            "rollout.num_engines: 1 of 4 GPUs each on 1 node(s) of 8 GPUs, 8 of them with a training rank;",
        ),
        (1, 8, 8, 1, 4, "; fix: 2 that share its GPUs"),
        (2, 8, 4, 3, 4, "; fix: 2 or fewer beside training; 2 that share its GPUs"),
        (1, 8, 6, 2, 4, "; fix: a rollout.tensor_parallel that divides 6"),
    ],
)
def test_refusals(nodes: int, gpus: int, ranks: int, engines: int, size: int, message: str) -> None:
    """Key, value, rule and fix; what the fix names is accepted."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        place_engines(rollout(engines, size), nodes, gpus, ranks)
    for count in re.findall(r"(\d+) (?:or fewer beside|that share)", message):
        assert len(place_engines(rollout(int(count), size), nodes, gpus, ranks).engines) == int(count)


@pytest.mark.parametrize("model", RUNS)
def test_shipped_layouts_share_every_gpu(model: str) -> None:
    """On nodes of eight, the shipped layouts put one engine rank on each GPU of training."""
    for gpus in GPUS:
        cfg, _ = load(model, "math_8k", "fp8", gpus)
        layout = resolve_layout(cfg, gpus, 8)
        size = layout.engine_tensor
        taken = [(p.node, (p.first_gpu or 0) + i) for p in layout.placement.engines for i in range(size)]
        assert layout.shared
        assert sorted(taken) == [(node, gpu) for node in range(gpus // 8) for gpu in range(8)]


def test_a_plan_is_for_whole_nodes() -> None:
    """12 GPUs are no nodes of 8; ranks that do not split over the nodes, and engines that do not, are refused."""
    with pytest.raises(ConfigError, match=r"--gpus: 12; rule: fewer than 8, or whole nodes of 8; fix: --gpus 8"):
        resolve_layout(RunConfig.model_validate(BASE), 12, 8)
    one = RunConfig.model_validate(BASE | {"parallel": {"data": 1}})
    with pytest.raises(ConfigError, match=r"parallel\.data: 1 ranks; rule: 2 nodes have equally many"):
        resolve_layout(one, 16, 8)
    cfg, dims = load("qwen3-8b", "math_8k", "fp8", 16, "rollout.num_engines=1")
    with pytest.raises(ConfigError, match=r"rollout\.num_engines: 1 of 4 GPUs each on 2 node\(s\) of 8 GPUs"):
        make_plan(cfg, dims, 16)


def test_memory_fraction_by_hand() -> None:
    """Qwen3-8B on 8 GPUs of 80 GiB, engine and training rank on each: the share of the free memory that an engine must
    be given, at its first start (training still takes its states) and when it is started again (training keeps its
    peak)."""
    cfg, dims = load("qwen3-8b", "math_8k", "bf16", 8, "rollout.mem_fraction_static=0.1")
    found = make_plan(cfg, dims, 8, search=False)
    gib, size = 1 << 30, 80 << 30
    worst = 0.0
    for memory in found.memories:
        held = memory.resident
        engine = held["engine weights"] + held["KV cache"]
        states = sum(v for part, v in held.items() if part not in ("engine weights", "KV cache"))
        free = size - 3 * gib - held["weights bf16"]
        later = states - 3 * gib - held["weights bf16"]
        peak = max(sum(parts.values()) for phase, parts in memory.peaks.items() if phase != "rollout")
        worst = max(worst, (engine + later) / free, engine / (size - states - peak))
    (fault,) = found.violations
    assert fault.key == "rollout.mem_fraction_static"
    assert f"need {worst:.3f} of the memory that is free" in fault.rule
    fixed, _, _ = fault.fix.partition(",")
    cfg, dims = load("qwen3-8b", "math_8k", "bf16", 8, fixed)
    assert make_plan(cfg, dims, 8, search=False).fits


def test_visible_gpus() -> None:
    """As CUDA reads CUDA_VISIBLE_DEVICES: indices or UUIDs, and nothing behind an index that does not exist."""
    for listed, expected in ((None, 8), ("", 0), ("0", 1), ("2,3", 2), ("0,9,1", 1), ("-1", 0), ("GPU-a,GPU-b", 2)):
        environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
        assert visible(8, environment) == expected, listed


def test_the_check_knows_nodes_and_ranks() -> None:
    """torchrun's variables count, then a launcher's settings, then what `jetrl train` starts by itself."""
    cfg = RunConfig.model_validate(BASE | {"parallel": {"tensor": 2, "data": 2}, "rollout": {"num_engines": 4}})
    assert nodes_and_ranks(cfg, {}) == (1, 4)
    assert nodes_and_ranks(cfg, {"JETRL_RANKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}) == (2, 2)
    assert nodes_and_ranks(cfg, {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "4", "JETRL_RANKS_PER_NODE": "2"}) == (
        4,
        1,
    )
    check_engine_places(cfg, 0, {})
    check_engine_places(cfg, 8, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    with pytest.raises(ConfigError, match="4 ranks on a node of 2 GPUs"):
        check_engine_places(cfg, 8, {"CUDA_VISIBLE_DEVICES": "4,5"})
