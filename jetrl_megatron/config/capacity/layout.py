"""Which rank runs on which GPU: sizes of the training groups and the placement of engines."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl_megatron.config.capacity.placement import Placement, place_engines
from jetrl_megatron.config.errors import ConfigError, Violation
from jetrl_megatron.config.schema import RunConfig


@dataclass(frozen=True)
class Layout:
    """gpus: all of them, on `nodes` equal nodes."""

    gpus: int
    nodes: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    data: int
    expert: int
    sequence: bool
    engine_tensor: int
    engine_expert: int
    num_engines: int
    placement: Placement

    @property
    def training_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def engine_ranks(self) -> int:
        return self.num_engines * self.engine_tensor

    @property
    def shared(self) -> bool:
        return self.placement.shared


def resolve_layout(cfg: RunConfig, gpus: int | None, gpus_per_node: int) -> Layout:
    """gpus: None means one per training rank. Training takes all GPUs unless parallel.data is given; engines are where
    `place_engines` puts them. Raises ConfigError for sizes that do not fit."""
    par, rollout = cfg.parallel, cfg.rollout
    if gpus is None:
        gpus = par.model_size * (par.data or par.least_data)
    data = par.data or max(gpus // par.model_size, 1)
    ranks = par.model_size * data
    if ranks > gpus or (par.data is None and gpus % par.model_size):
        value = f"{gpus} with parallel.tensor={par.tensor}, parallel.pipeline={par.pipeline}, parallel.data={par.data}"
        rule = f"training ranks ({ranks}) fit, a multiple of tensor * pipeline ({par.model_size})"
        raise ConfigError([Violation("--gpus", value, rule, f"--gpus {max(ranks, par.model_size)}, or smaller sizes")])
    if par.tensor * data % par.expert:
        value = f"{par.expert} with parallel.tensor={par.tensor} and {data} data-parallel ranks"
        raise ConfigError([Violation("parallel.expert", value, "divides tensor * data", "choose a divisor")])
    nodes = _nodes(gpus, gpus_per_node, ranks)
    return Layout(
        gpus=gpus,
        nodes=nodes,
        tensor=par.tensor,
        pipeline=par.pipeline,
        virtual_pipeline=par.virtual_pipeline,
        data=data,
        expert=par.expert,
        sequence=par.sequence,
        engine_tensor=rollout.tensor_parallel,
        engine_expert=rollout.expert_parallel,
        num_engines=rollout.num_engines,
        placement=place_engines(rollout, nodes, gpus // nodes, ranks // nodes),
    )


def _nodes(gpus: int, gpus_per_node: int, ranks: int) -> int:
    """Nodes of a plan: a part of one, or several whole ones with equally many training ranks."""
    nodes, rest = divmod(gpus, gpus_per_node)
    if nodes == 0:
        return 1
    if rest:
        rule = f"fewer than {gpus_per_node}, or whole nodes of {gpus_per_node}"
        raise ConfigError([Violation("--gpus", str(gpus), rule, f"--gpus {nodes * gpus_per_node}")])
    if ranks % nodes:
        rule = f"{nodes} nodes have equally many training ranks"
        raise ConfigError([Violation("parallel.data", f"{ranks} ranks", rule, "another size, or more GPUs")])
    return nodes
