"""Which GPUs each engine takes. `jetrl plan`, `jetrl check` and the run itself ask this one function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jetrl_megatron.config.errors import ConfigError, Violation
from jetrl_megatron.config.schema import RolloutConfig


@dataclass(frozen=True)
class EnginePlace:
    """node: its number in the job; first_gpu: the engine takes rollout.tensor_parallel GPUs from there on, counted
    among those that CUDA_VISIBLE_DEVICES leaves; None without GPUs."""

    node: int
    first_gpu: int | None


@dataclass(frozen=True)
class Placement:
    """engines: a place each. shared: every GPU of training also carries one engine rank; else engines have GPUs of
    their own, behind those of training."""

    shared: bool
    engines: tuple[EnginePlace, ...]


def place_engines(rollout: RolloutConfig, nodes: int, gpus: int, ranks: int) -> Placement:
    """Engine i runs on node i mod `nodes`; the engines of a node take its GPUs in turn, from GPU `ranks` on where all
    fit beside training, else from GPU 0 on.

    gpus, ranks: GPUs and training ranks of one node; training rank i has GPU i. gpus 0: no GPUs, nothing to share.
    Raises ConfigError where an engine would have no GPU, or where some training GPUs would carry an engine rank and
    others none: the fullest GPU decides what fits.
    """
    if not gpus:
        return Placement(False, tuple(EnginePlace(i % nodes, None) for i in range(rollout.num_engines)))
    size = rollout.tensor_parallel
    shared = ranks + -(-rollout.num_engines // nodes) * size > gpus
    faults = list(_faults(rollout, nodes, gpus, ranks, shared))
    if faults:
        raise ConfigError(faults)
    first = 0 if shared else ranks
    return Placement(
        shared, tuple(EnginePlace(i % nodes, first + i // nodes * size) for i in range(rollout.num_engines))
    )


def _faults(rollout: RolloutConfig, nodes: int, gpus: int, ranks: int, shared: bool) -> Iterator[Violation]:
    size, count = rollout.tensor_parallel, rollout.num_engines
    if ranks > gpus:
        rule = "every training rank has a GPU of its own"
        yield Violation("parallel", f"{ranks} ranks on a node of {gpus} GPUs", rule, "smaller sizes, or more nodes")
    elif size > gpus:
        rule = "an engine lies within one node"
        yield Violation("rollout.tensor_parallel", f"{size} on nodes of {gpus} GPUs", rule, f"at most {gpus}")
    elif (shared and count * size != nodes * ranks) or (shared and count % nodes):
        value = f"{count} of {size} GPUs each on {nodes} node(s) of {gpus} GPUs, {ranks} of them with a training rank"
        rule = "engines fit beside training, or share its GPUs evenly: one engine rank on each of them"
        yield Violation("rollout.num_engines", value, rule, _fix(size, nodes, gpus, ranks))


def _fix(size: int, nodes: int, gpus: int, ranks: int) -> str:
    """Numbers of engines that have a place."""
    beside, evenly = (gpus - ranks) // size, ranks // size
    choices = [f"{nodes * beside} or fewer beside training"] if beside else []
    if ranks % size == 0:
        choices.append(f"{nodes * evenly} that share its GPUs")
    return "; ".join(choices) or f"a rollout.tensor_parallel that divides {ranks}"
