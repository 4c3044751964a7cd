"""Between this rank's parameters and whole Hugging Face tensors: loading, weight sync and export.

Only this module knows ranks; the algebra is `weights`. Gathering is tensor by tensor: tensor-parallel shards meet on
the group's first rank, experts on the first rank of the expert-parallel group, which is the same one; pipeline stages
hand their tensors to global rank 0 in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, compact_weight_scale, quantize_weight
from jetrl_megatron.megatron.model import Policy
from jetrl_megatron.megatron.torch_dist import MegatronCheckpoint
from jetrl_megatron.weights.bundle import SCALE_SUFFIX
from jetrl_megatron.weights.io import HfCheckpoint, require_finite
from jetrl_megatron.weights.plan import expert_of, shift_expert
from jetrl_megatron.weights.rules import Rule


def load_hf(policy: Policy, checkpoint: HfCheckpoint) -> None:
    """Fill this rank's parameters from an HF checkpoint. ValueError: missing, unused or non-finite tensors."""
    policy.plan.check_names(checkpoint.names())
    ranks = policy.ranks
    for rule, parameter, _ in policy.named_rules():
        parts = [checkpoint.tensor(hf.name) for hf in rule.hf]
        for hf, part in zip(rule.hf, parts, strict=True):
            require_finite(hf.name, part)
        local = rule.to_megatron_shard(parts, ranks.tensor_size, ranks.tensor)
        with torch.no_grad():
            parameter.copy_(local.to(parameter.dtype))


def load_megatron(policy: Policy, checkpoint: MegatronCheckpoint) -> None:
    """Fill this rank's parameters from a torch_dist checkpoint of any layout. ValueError: a hole, a NaN or Inf."""
    stored = {rule.hf: rule for rule in checkpoint.plan.rules if rule.export}
    ranks = policy.ranks
    for rule, parameter, _ in policy.named_rules():
        source = stored[rule.hf]  # a tied output layer has no tensor of its own
        parts = source.to_hf([require_finite(source.megatron_name, checkpoint.parameter(source))])
        local = rule.to_megatron_shard(parts, ranks.tensor_size, ranks.tensor)
        with torch.no_grad():
            parameter.copy_(local.to(parameter.dtype))


def export_bf16(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Whole HF tensors in the model's dtype, on global rank 0. All ranks must iterate; elsewhere nothing is yielded."""
    yield from _gather(policy, fp8=False)


def export_fp8(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Like `export_bf16`, with linears as `X.weight` E4M3 and `X.weight_scale_inv` fp32 [ceil(N/128), ceil(K/128)];
    with precision.misaligned=shard_local in the model's dtype where shards of K cut groups: there is no global grid,
    every engine rank quantizes its own."""
    yield from _gather(policy, fp8=True)


def _gather(policy: Policy, fp8: bool) -> Iterator[tuple[str, Tensor]]:
    is_first_of_stage = policy.ranks.data == 0 and policy.ranks.tensor == 0
    tensors = _stage_tensors(policy, fp8)
    for stage in range(policy.ranks.pipeline_size):
        if stage == 0:
            if policy.ranks.is_first_stage:
                yield from tensors
        elif policy.ranks.pipeline == stage:
            if is_first_of_stage:
                _send_all(tensors)
            else:
                for _ in tensors:
                    pass
        elif dist.get_rank() == 0:
            yield from _receive_all(_stage_source(stage), policy.device)


def _stage_source(stage: int) -> int:
    """Global rank that sends a pipeline stage's tensors: the one in rank 0's pipeline group."""
    return int(dist.get_global_rank(parallel_state.get_pipeline_model_parallel_group(), stage))


def _stage_tensors(policy: Policy, fp8: bool) -> Iterator[tuple[str, Tensor]]:
    """HF tensors of this stage, on its first rank; other ranks take part and get nothing."""
    group = parallel_state.get_tensor_model_parallel_group()
    holds_experts = parallel_state.get_expert_data_parallel_rank() == 0
    for rule, parameter, module in policy.named_rules():
        if not rule.export:
            continue
        if expert_of(rule) is not None:
            if holds_experts:
                yield from _expert_tensors(policy, rule, parameter, module, fp8)
            continue
        if policy.ranks.data != 0:
            continue
        if fp8 and rule.quantized and not module.cuts_groups:
            quantized = module.fp8_weight().quantized
            codes = _gather_shards(quantized.data.view(torch.uint8), group)
            scales = _gather_shards(quantized.scale, group)
            if codes is not None and scales is not None:
                yield from _fp8_parts(rule, codes, scales, quantized.format.granularity == "block")
        elif rule.tp_dim is not None or group.rank() == 0:
            shards = _gather_shards(parameter.detach(), group) if rule.tp_dim is not None else [parameter.detach()]
            if shards is not None and fp8 and rule.quantized and not module.precision.shard_local:
                yield from _quantized(rule, shards, module.precision.recipe.format)  # BF16 training, FP8 rollout
            elif shards is not None:
                yield from zip((hf.name for hf in rule.hf), rule.to_hf(shards), strict=True)


def _quantized(rule: Rule, shards: Sequence[Tensor], fmt: Fp8Format) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors quantized here, because the grid of a cut shard is no part of theirs."""
    for hf, tensor in zip(rule.hf, rule.to_hf(shards), strict=True):
        quantized = quantize_weight(tensor, fmt)
        yield hf.name, quantized.data
        yield hf.name + SCALE_SUFFIX, _sent_scale(quantized.scale, fmt.granularity == "block")


def _expert_tensors(
    policy: Policy, rule: Rule, parameter: Tensor, module: Any, fp8: bool
) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of the expert of `rule` and of its peers, the experts at the same place of the other
    expert-parallel ranks, on the group's first rank."""
    assert policy.dims.moe is not None
    group = parallel_state.get_expert_model_parallel_group()
    per_rank = policy.dims.moe.num_experts // group.size()
    names = [shift_expert(rule.megatron_name, (i - group.rank()) * per_rank) for i in range(group.size())]
    peers = [policy.plan.rule_for(name) for name in names]
    if not fp8:
        for peer, weight in zip(peers, _gather_shards(parameter.detach(), group) or [], strict=False):
            yield from zip((hf.name for hf in peer.hf), peer.to_hf([weight]), strict=True)
        return
    quantized = module.fp8_weight().quantized
    codes = _gather_shards(quantized.data.view(torch.uint8), group)
    scales = _gather_shards(quantized.scale, group)
    if codes is not None and scales is not None:
        for peer, data, scale in zip(peers, codes, scales, strict=True):
            yield from _fp8_parts(peer, [data], [scale], quantized.format.granularity == "block")


def _fp8_parts(
    rule: Rule, codes: Sequence[Tensor], scales: Sequence[Tensor], blocks: bool
) -> Iterator[tuple[str, Tensor]]:
    for hf, data, row_scale in zip(rule.hf, rule.to_hf(codes), rule.to_hf(scales), strict=True):
        yield hf.name, data.view(torch.float8_e4m3fn)
        yield hf.name + SCALE_SUFFIX, _sent_scale(row_scale, blocks)


def _sent_scale(row_scale: Tensor, blocks: bool) -> Tensor:
    """One scale per 128 rows; other granularities send one per row."""
    return compact_weight_scale(row_scale) if blocks else row_scale


def _gather_shards(local: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """All shards on the group's first rank, None elsewhere."""
    if group.size() == 1:
        return [local]
    target = dist.get_global_rank(group, 0)
    parts = [torch.empty_like(local) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(local.contiguous(), parts, dst=target, group=group)
    return parts


def _send_all(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        dist.send_object_list([(name, tensor.shape, tensor.dtype)], dst=0)
        dist.send(tensor.contiguous().view(torch.uint8).flatten(), dst=0)
    dist.send_object_list([None], dst=0)


def _receive_all(source: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    while True:
        header: list[tuple[str, torch.Size, torch.dtype] | None] = [None]
        dist.recv_object_list(header, src=source)
        if header[0] is None:
            return
        name, shape, dtype = header[0]
        buffer = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
        dist.recv(buffer, src=source)
        yield name, buffer.view(dtype).view(shape)
