"""Whether the engines of a run have a place on the GPUs that this process sees, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jetrl_megatron.config import RunConfig
from jetrl_megatron.config.capacity import place_engines


def check_engine_places(cfg: RunConfig, gpus: int, environment: Mapping[str, str] = os.environ) -> None:
    """gpus: of this machine, as the driver counts them; 0: the run is on the CPU. Raises ConfigError."""
    nodes, ranks = nodes_and_ranks(cfg, environment)
    place_engines(cfg.rollout, nodes, visible(gpus, environment), ranks)


def nodes_and_ranks(cfg: RunConfig, environment: Mapping[str, str]) -> tuple[int, int]:
    """Nodes, and training ranks of one: as torchrun says, else as a launcher (launch/lib/common.sh) will tell torchrun,
    else as `jetrl train` starts them on this machine."""
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment.get("GROUP_WORLD_SIZE", "1")), int(environment["LOCAL_WORLD_SIZE"])
    if "JETRL_RANKS_PER_NODE" in environment:
        nodes = environment.get("JETRL_NNODES") or environment.get("SLURM_JOB_NUM_NODES", "1")
        return int(nodes), int(environment["JETRL_RANKS_PER_NODE"])
    return 1, cfg.parallel.model_size * (cfg.parallel.data or cfg.parallel.least_data)


def visible(gpus: int, environment: Mapping[str, str]) -> int:
    """How many of a machine's GPUs CUDA shows; as CUDA reads it, the list ends at the first index that is none."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return gpus
    shown = 0
    for entry in (part.strip() for part in listed.split(",")):
        if not entry or (entry.lstrip("-").isdigit() and not 0 <= int(entry) < gpus):
            break
        shown += 1
    return min(shown, gpus)
