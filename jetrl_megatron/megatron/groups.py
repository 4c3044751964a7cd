"""Process groups: torch.distributed and Megatron's parallel state, from the environment that torchrun sets."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.megatron import cpu_shim

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process's coordinates and the sizes of the layout."""

    rank: int
    world_size: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    data: int
    data_size: int
    expert: int = 0
    expert_size: int = 1
    virtual_size: int = 1  # chunks of the model per pipeline stage
    node: int = 0
    num_nodes: int = 1
    local_rank: int = 0  # among the ranks of this node
    device: torch.device = CPU  # where this rank's parameters live

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline == self.pipeline_size - 1


def initialize(parallel: ParallelConfig, seed: int, timeout_s: float = 1800.0) -> Ranks:
    """Join the default group (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and build Megatron's groups.

    On GPUs the rank's own (`select_device`) is current from here on. Raises ValueError when the world size does not fit
    the layout, or the node has fewer GPUs than ranks.
    """
    cpu_shim.install()
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size % parallel.model_size or parallel.data not in (None, world_size // parallel.model_size):
        raise ValueError(
            f"tensor={parallel.tensor} pipeline={parallel.pipeline} data={parallel.data}, ranks={world_size}; "
            "rule: tensor * pipeline * data = ranks; fix: change the sizes or the number of ranks"
        )
    if world_size // parallel.pipeline % parallel.expert:
        raise ValueError(
            f"expert={parallel.expert}, ranks={world_size}; rule: divides tensor * data "
            f"({world_size // parallel.pipeline}); fix: change the sizes or the number of ranks"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = select_device(local_rank)
    if not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,  # NCCL connects here, and not by guessing the GPU in the first call
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # an expert is never cut
    )
    model_parallel_cuda_manual_seed(seed)
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel.tensor,
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel.pipeline,
        data=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel.expert,
        virtual_size=parallel.virtual_pipeline,
        node=int(os.environ.get("GROUP_RANK", "0")),  # torchrun has one agent, hence one group, per node
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        local_rank=local_rank,
        device=device,
    )


def select_device(local_rank: int) -> torch.device:
    """The GPU of a rank, made current before anything allocates: rank i of a node takes GPU i of those that
    CUDA_VISIBLE_DEVICES leaves. The CPU where there is no CUDA. Raises ValueError when the node has too few GPUs."""
    if not torch.cuda.is_available():
        return CPU
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise ValueError(
            f"LOCAL_RANK={local_rank} with {visible} visible GPUs; rule: every rank of a node has a GPU of its own, "
            "GPU LOCAL_RANK; fix: fewer ranks on the node (parallel.*, JETRL_RANKS_PER_NODE), or show all of the "
            "node's GPUs to every rank (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def own_address() -> str:
    """Numeric address of this node on the network that leads to MASTER_ADDR: host names need not resolve, and the first
    interface may be the wrong one."""
    target = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        probe.connect(target[4])  # chooses a route, sends nothing
        return str(probe.getsockname()[0])


def shutdown() -> None:
    """Leave all groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
