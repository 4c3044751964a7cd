"""Custom weight loader of the engine (`--custom-weight-loader`): a whole weight bundle or nothing.

Everything that can be wrong with a bundle is checked before the first parameter is touched: every checksum, the exact
set of names and every shape. After loading, the bytes now held by the engine are hashed again and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.fp8 import BLOCK, compact_weight_scale
from jetrl_megatron.weights.bundle import SCALE_SUFFIX, Bundle, checksums_of
from jetrl_megatron.weights.plan import ConversionPlan

LOAD_FORMAT = "jetrl_megatron.rollout.weight_loader.load_bundle"
_FUSED: dict[str, tuple[tuple[str, Any], ...]] = {
    "qkv_proj": (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")),
    "gate_up_proj": (("gate_proj", 0), ("up_proj", 1)),
}

_generation = [0]
_last_digest = [""]


class WeightSyncError(RuntimeError):
    """The engine refused an update; the weights it held before are intact."""


class EngineWeightsError(RuntimeError):
    """The engine does not hold what was loaded: it must not answer another request, and ends."""


@dataclass(frozen=True)
class ExpertShard:
    """Where a tensor of one expert lies in a parameter [E, N, K] of stacked experts. expert: index on this rank,
    outside 0 .. E - 1 for the experts of other ranks; part: which of num_parts equal runs of rows."""

    expert: int
    part: int
    num_parts: int

    def of(self, stacked: Tensor) -> Tensor:
        """This tensor's rows of `stacked`."""
        return stacked[self.expert].chunk(self.num_parts)[self.part]


@dataclass(frozen=True)
class _Route:
    """Where a Hugging Face tensor lives in SGLang's model: a parameter, and `held`, its part of that parameter."""

    parameter: nn.Parameter
    shard_id: Any
    held: Callable[[Tensor], Tensor]

    def load(self, tensor: Tensor) -> None:
        loader = getattr(self.parameter, "weight_loader", None)
        if loader is None:
            self.parameter.data.copy_(tensor)
        elif self.shard_id is None:
            loader(self.parameter, tensor)
        else:
            loader(self.parameter, tensor, self.shard_id)


def _routes(model: nn.Module) -> dict[str, _Route]:
    """Hugging Face name -> route, from the model's own parameters (the models' `load_weights` rename and skip)."""
    routes: dict[str, _Route] = {}
    for path, parameter in model.named_parameters():
        prefix, _, kind = path.rpartition(".")
        parent, _, leaf = prefix.rpartition(".")
        for name, shard in getattr(parameter, "jetrl_experts", {}).items():
            routes[f"{prefix}.{name}"] = _Route(parameter, shard, shard.of)
        if hasattr(parameter, "jetrl_experts"):
            continue
        parts = _FUSED.get(leaf, ((leaf, None),))
        for i, (name, shard_id) in enumerate(parts):
            held = partial(_fused_part, model.get_submodule(prefix), i) if len(parts) > 1 else _whole
            routes[".".join(filter(None, (parent, name, kind)))] = _Route(parameter, shard_id, held)
    return routes


def _fused_part(layer: Any, part: int, data: Tensor) -> Tensor:
    return data.split(list(layer.output_partition_sizes))[part]


def _whole(data: Tensor) -> Tensor:
    return data


def weight_generation() -> int:
    """Changes whenever weights were loaded: the key of everything derived from them."""
    return _generation[0]


def last_digest() -> str:
    """Digest of the weights that the engine holds now."""
    return _last_digest[0]


def load_bundle(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's custom-loader signature. named_tensors: one uint8 tensor that spells the bundle's path.

    Raises WeightSyncError before anything is changed.
    """
    path = Path(bytes(named_tensors[0][1].tolist()).decode())
    try:
        bundle = Bundle.open(path)
        bundle.verify()
        _check_fits(model, bundle)
    except (ValueError, OSError) as error:
        raise WeightSyncError(str(error)) from error
    routes = _routes(model)
    for layer in model.modules():
        getattr(layer, "jetrl_loaded", set()).clear()
    for name, tensor in bundle.tensors():
        routes[name].load(tensor)
    _generation[0] += 1
    _last_digest[0] = ""
    _require_held(model, bundle)
    _last_digest[0] = bundle.digest


def encode_path(path: Path) -> Tensor:
    """Inverse of what `load_bundle` reads."""
    return torch.tensor(list(str(path).encode()), dtype=torch.uint8)


def _check_fits(model: nn.Module, bundle: Bundle) -> None:
    """Raises ValueError unless the bundle is exactly the model's tensors in the form the engine was built for."""
    plan = ConversionPlan(ModelDims.from_hf(model.config.to_dict()))  # type: ignore[union-attr, operator]
    shapes = {hf.name: tuple(hf.shape) for rule in plan.rules for hf in rule.hf}
    if any(hasattr(m, "jetrl_parts") for m in model.modules()):
        for name in plan.quantized_hf_names():
            rows, cols = shapes[name]
            shapes[name + SCALE_SUFFIX] = (-(-rows // BLOCK), -(-cols // BLOCK))
    unknown = sorted(set(shapes) ^ set(_routes(model)))
    if unknown:
        raise ValueError(
            f"{unknown[0]}: in only one of SGLang's model and the conversion plan ({len(unknown)} tensors)"
        )
    local = {f"{p}.weight" for p, layer in model.named_modules() if getattr(layer, "jetrl_shard_local", False)}
    for name in local:  # every rank quantizes its own shard
        del shapes[name + SCALE_SUFFIX]
    missing, unused = sorted(set(shapes) - set(bundle.checksums)), sorted(set(bundle.checksums) - set(shapes))
    if missing or unused:
        raise ValueError(
            f"weight bundle: missing {missing[:3]}, unused {unused[:3]}; rule: exactly the model's tensors"
        )
    for name, tensor in bundle.tensors():
        wanted = shapes[name]
        per_row = name.endswith(SCALE_SUFFIX) and tensor.shape[0] == shapes[name.removesuffix(SCALE_SUFFIX)][0]
        if tuple(tensor.shape) != wanted and not per_row:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}; rule: {wanted}; fix: same model on both sides")
        if name in local and tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name}: {tensor.dtype}; rule: bfloat16 for shards that cut groups; fix: one TP size")


def _require_held(model: nn.Module, bundle: Bundle) -> None:
    """Raises EngineWeightsError naming the first tensor whose bytes in the engine's own layers are not the bundle's.
    Tensor-parallel ranks hold parts only: there every part must have been copied."""
    for path, layer in model.named_modules():
        if hasattr(layer, "jetrl_loaded") and layer.jetrl_loaded != layer.jetrl_expected:
            raise EngineWeightsError(f"{path}: {sorted(layer.jetrl_expected - layer.jetrl_loaded)} never loaded")
    if _tensor_parallel_size() > 1:
        return
    held = checksums_of(held_tensors(model, bundle))
    for name, expected in bundle.checksums.items():
        if held.get(name) != expected:
            raise EngineWeightsError(f"{name}: other bytes in the engine after loading")


def _tensor_parallel_size() -> int:
    from sglang.srt.distributed import get_tp_group

    return int(get_tp_group().world_size)


def held_tensors(model: nn.Module, bundle: Bundle) -> Iterator[tuple[str, Tensor]]:
    """What the layers hold, under Hugging Face names and in the bundle's forms (one engine rank)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in bundle.tensors()}
    for name, route in _routes(model).items():
        part = route.held(route.parameter.data)
        if name.endswith(SCALE_SUFFIX) and shapes[name][0] != part.shape[0]:
            part = compact_weight_scale(part)
        yield name, part[: shapes[name][0]]  # SGLang pads the vocabulary
