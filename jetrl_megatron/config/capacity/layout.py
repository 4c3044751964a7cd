"""Which rank runs on which GPU: sizes of the training groups and the placement of engines."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl_megatron.config.errors import ConfigError, Violation
from jetrl_megatron.config.schema import RunConfig


@dataclass(frozen=True)
class Layout:
    """gpus: all of them. engine_ranks_per_gpu: at most so many engine ranks share a GPU with a training rank; 0: the
    engines have GPUs of their own."""

    gpus: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    data: int
    expert: int
    sequence: bool
    engine_tensor: int
    engine_expert: int
    num_engines: int
    engine_ranks_per_gpu: int

    @property
    def training_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def engine_ranks(self) -> int:
        return self.num_engines * self.engine_tensor

    @property
    def shared(self) -> bool:
        return self.engine_ranks_per_gpu > 0


def resolve_layout(cfg: RunConfig, gpus: int | None) -> Layout:
    """gpus: None means one per training rank. Training takes all GPUs unless parallel.data is given; engines have their
    own GPUs where both fit side by side. Raises ConfigError for sizes that do not fit."""
    par, rollout = cfg.parallel, cfg.rollout
    if gpus is None:
        gpus = par.model_size * (par.data or par.least_data)
    data = par.data or max(gpus // par.model_size, 1)
    ranks = par.model_size * data
    engine_ranks = rollout.num_engines * rollout.tensor_parallel
    if ranks > gpus or (par.data is None and gpus % par.model_size):
        value = f"{gpus} with parallel.tensor={par.tensor}, parallel.pipeline={par.pipeline}, parallel.data={par.data}"
        rule = f"training ranks ({ranks}) fit, a multiple of tensor * pipeline ({par.model_size})"
        raise ConfigError([Violation("--gpus", value, rule, f"--gpus {max(ranks, par.model_size)}, or smaller sizes")])
    if par.tensor * data % par.expert:
        value = f"{par.expert} with parallel.tensor={par.tensor} and {data} data-parallel ranks"
        raise ConfigError([Violation("parallel.expert", value, "divides tensor * data", "choose a divisor")])
    if rollout.tensor_parallel > gpus:
        value = f"{rollout.tensor_parallel} on {gpus} GPUs"
        raise ConfigError([Violation("rollout.tensor_parallel", value, "at most the GPUs", "a smaller size")])
    shared = ranks + engine_ranks > gpus
    return Layout(
        gpus=gpus,
        tensor=par.tensor,
        pipeline=par.pipeline,
        virtual_pipeline=par.virtual_pipeline,
        data=data,
        expert=par.expert,
        sequence=par.sequence,
        engine_tensor=rollout.tensor_parallel,
        engine_expert=rollout.expert_parallel,
        num_engines=rollout.num_engines,
        engine_ranks_per_gpu=-(-engine_ranks // gpus) if shared else 0,
    )
