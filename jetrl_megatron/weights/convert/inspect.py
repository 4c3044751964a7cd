"""What a checkpoint is: family, dims, precision, block grid, and what every tensor-parallel size would cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.plan import Linear, layer_linears, shard
from jetrl_megatron.fp8.format import num_blocks
from jetrl_megatron.weights.plan import ConversionPlan


def describe(kind: str, dims: ModelDims, dtypes: Sequence[str], num_bytes: int, sizes: Sequence[int]) -> dict[str, Any]:
    """kind: the format; dtypes: one per tensor; num_bytes: of all tensors; sizes: tensor-parallel sizes to look at."""
    plan = ConversionPlan(dims)
    num_parameters = sum(_count(hf.shape) for rule in plan.rules for hf in rule.hf)
    return {
        "format": kind,
        "family": dims.model_type,
        "dims": asdict(dims),
        "num_parameters": num_parameters,
        "num_bytes": num_bytes,
        "dtypes": dict(Counter(dtypes)),
        "linears": [_linear(linear, dims, sizes) for linear in layer_linears(dims)],
        "tensor_parallel": {str(size): _verdict(plan, size) for size in sizes},
    }


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _verdict(plan: ConversionPlan, size: int) -> dict[str, Any]:
    try:
        plan.check_tensor_parallel(size)
    except ValueError as error:
        return {"works": False, "cut": [], "why": str(error)}
    cut = [linear.name for linear in layer_linears(plan.dims) if _layout(linear, plan.dims, size)["cut"]]
    return {"works": True, "cut": cut, "why": ""}


def _linear(linear: Linear, dims: ModelDims, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "name": linear.name,
        "shape": [linear.n, linear.k],
        "blocks": list(linear.grid),
        "split": linear.kind,
        "layouts": {str(size): _layout(linear, dims, size) for size in sizes},
    }


def _layout(linear: Linear, dims: ModelDims, size: int) -> dict[str, Any]:
    """A shard of one size; an expert is never cut in training."""
    found = shard(linear, dims, 1 if linear.expert else size)
    blocks = [num_blocks(found.n), num_blocks(found.k)]
    return {"shard": [found.n, found.k], "blocks": blocks, "divides": found.divides, "cut": found.cuts_weight_block}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The description as text, one line per fact."""
    dims, sizes = found["dims"], list(found["tensor_parallel"])
    out = [
        f"format      {found['format']}",
        f"family      {found['family']}{' (tied embeddings)' if dims['tied_embeddings'] else ''}",
        f"size        {found['num_parameters'] / 1e9:.3f} B parameters, {found['num_bytes'] / 1e9:.3f} GB",
        f"dtypes      {', '.join(f'{name} x {count}' for name, count in found['dtypes'].items())}",
        f"dims        {dims['num_layers']} layers, hidden {dims['hidden_size']}, inner {dims['intermediate_size']}, "
        f"heads {dims['num_heads']}/{dims['num_kv_heads']} x {dims['head_dim']}, vocabulary {dims['vocab_size']}",
    ]
    if dims["moe"] is not None:
        moe = dims["moe"]
        out.append(
            f"experts     {moe['num_experts']}, {moe['experts_per_token']} per token, inner {moe['intermediate_size']}"
        )
    out.append(
        "linears     [N, K] in blocks of 128 x 128; * a shard boundary cuts a block (amax shared), ! not possible"
    )
    out.append(f"{'':12}{'':28}{'shape':>16}{'blocks':>12}  " + "".join(f"{'TP ' + size:>16}" for size in sizes))
    for linear in found["linears"]:
        cells = ""
        for size in sizes:
            layout = linear["layouts"][size]
            mark = "!" if not layout["divides"] else "*" if layout["cut"] else " "
            cells += f"{'x'.join(map(str, layout['shard'])) + mark:>16}"
        shape, blocks = ("x".join(map(str, linear[key])) for key in ("shape", "blocks"))
        out.append(f"{'':12}{linear['name']:28}{shape:>16}{blocks:>12}  {cells}")
    out += [
        f"TP {size:9}{verdict['why']}" for size, verdict in found["tensor_parallel"].items() if not verdict["works"]
    ]
    return out
