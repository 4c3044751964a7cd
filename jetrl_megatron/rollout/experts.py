"""SGLang's FusedMoE with our experts, and the router in front of it.

Each expert of this rank is a pair of linears over weights in SGLang's layout, loaded tensor by tensor under Hugging
Face names. Every (token, expert) pair is a row of its own and a token's rows are combined in ascending expert id, as in
training. Engine ranks share the experts (expert parallelism), or each holds a slice of all (tensor parallelism).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.fp8 import (
    BLOCK,
    E4M3,
    Fp8Experts,
    Fp8Tensor,
    GridSlice,
    expand_weight_scale,
    whole,
)
from jetrl_megatron.rollout.collectives import exact_sum, is_rank_0, maximum, row_parallel, sum_on_rank_0
from jetrl_megatron.rollout.prepared import exact_weight
from jetrl_megatron.rollout.weight_loader import ExpertShard, WeightSyncError

if TYPE_CHECKING:
    from jetrl_megatron.rollout.quantization import JetrlConfig

_PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


class RouterMethod(UnquantizedLinearMethod):
    """The router: fp32 logits from bf16 weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Stock packing would replace the parameter; nothing to do here."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None
        return ops.router(x, layer.weight, exact_weight(layer))


def route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """SGLang's `custom_routing_function`: weights [T, k] fp32 and expert ids [T, k] int32."""
    experts, weights = ops.route(gating_output, topk, renormalize)
    return weights, experts.to(torch.int32)


def use_our_router(block: Any) -> None:
    """Of a `Qwen3MoeSparseMoeBlock`: route with our operators; experts get global ids in expert parallelism too."""
    block.gate.quant_method = RouterMethod()
    block.topk.topk_config.custom_routing_function = route
    block.experts.dispatcher.skip_local_expert_mapping = True


class ExpertsMethod(FusedMoEMethodBase):
    """Weights of E experts on this rank: w13_weight [E, 2F, H] (gate rows, then up rows), w2_weight [E, H, F]."""

    dtype: torch.dtype

    def __init__(self, config: JetrlConfig) -> None:
        self.config = config

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_unused: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        layer.jetrl_expected, layer.jetrl_loaded = set(), set()
        for name, shape in (("w13", (2 * inner, hidden_size)), ("w2", (hidden_size, inner))):
            self.register(layer, name, "weight", torch.zeros(num_experts, *shape, dtype=self.dtype))

    def register(self, layer: Any, name: str, kind: str, data: Tensor) -> None:
        """A parameter `<name>_<kind>` of `layer` that says which Hugging Face tensors it holds."""
        parameter: Any = nn.Parameter(data, requires_grad=False)
        parameter.weight_loader = partial(self._load, layer, name, kind)
        first = layer.moe_ep_rank * layer.num_local_experts
        parts = _PROJECTIONS[name]
        parameter.jetrl_experts = {
            f"{expert}.{projection}.{kind}": ExpertShard(expert - first, part, len(parts))
            for expert in range(layer.num_experts)
            for part, projection in enumerate(parts)
        }
        held = [shard for shard in parameter.jetrl_experts.values() if 0 <= shard.expert < layer.num_local_experts]
        layer.jetrl_expected |= {(name, kind, shard.expert, shard.part) for shard in held}
        layer.register_parameter(f"{name}_{kind}", parameter)

    def _load(self, layer: Any, name: str, kind: str, param: Tensor, loaded: Tensor, shard: ExpertShard) -> None:
        """loaded: the whole Hugging Face tensor [N, K], or its block grid [ceil(N/128), ceil(K/128)]."""
        if not 0 <= shard.expert < layer.num_local_experts:
            return
        target = shard.of(param.data)
        rank, size = layer.moe_tp_rank, layer.moe_tp_size
        num_rows = target.shape[0] * (size if name == "w13" else 1)
        if kind == "weight_scale_inv" and loaded.shape[0] != num_rows:
            loaded = expand_weight_scale(loaded, num_rows)
        if size > 1 and name == "w13":
            loaded = loaded[rank * target.shape[0] : (rank + 1) * target.shape[0]]
        elif size > 1:
            loaded = loaded[:, rank * target.shape[1] : (rank + 1) * target.shape[1]]
        if target.shape != loaded.shape or target.dtype != loaded.dtype:
            raise WeightSyncError(
                f"{loaded.dtype} {tuple(loaded.shape)} for experts of {target.dtype} {tuple(target.shape)}"
            )
        target.view(torch.uint8).copy_(loaded.contiguous().view(torch.uint8))
        layer.jetrl_loaded.add((name, kind, shard.expert, shard.part))

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """`apply` is the runner."""

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        x = dispatch_output.hidden_states
        weights, experts = dispatch_output.topk_output[:2]
        num_tokens, top_k = experts.shape
        pairs, offsets = pairs_by_expert(experts, layer.moe_ep_rank * layer.num_local_experts, layer.num_local_experts)
        if layer.moe_ep_size > 1:  # engines of several ranks with experts decode eagerly; only own rows are computed
            pairs = pairs[: int(offsets[-1])]
        outputs = x.new_zeros(num_tokens * top_k, x.shape[1])
        outputs[pairs] = self.run(layer, x[pairs // top_k], offsets)
        if layer.moe_ep_size > 1:  # every pair is computed on one rank: only zeros are added
            outputs = sum_on_rank_0(outputs, tree=False)
        return StandardCombineInput(ops.moe_combine(outputs.view(num_tokens, top_k, -1), weights, experts))

    def run(self, layer: Any, rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows sorted by expert [R, H], those of expert e at offsets[e] to offsets[e + 1] -> [R, H]; with tensor
        parallelism the sum on rank 0, zeros elsewhere."""
        raise NotImplementedError


def pairs_by_expert(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """All pairs (token, slot) of ids [T, k], as token * k + slot [T * k]: first those of experts first .. first + count
    - 1, sorted by expert and then by token, then the others; and where these experts' pairs begin and end, [count + 1].
    Nothing is read on the host."""
    local = experts.flatten().long() - first
    local = torch.where((local >= 0) & (local < count), local, count)
    ordered, pairs = local.sort(stable=True)
    return pairs, torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device))


class Fp8ExpertsMethod(ExpertsMethod):
    """FP8 bytes with one scale per row and 128 columns: w13_weight_scale_inv [E, 2F, ceil(H/128)] fp32, w2 alike."""

    dtype = E4M3

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *args: Any,
        **kw: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        if layer.moe_tp_size > 1 and inner % BLOCK:
            raise ValueError(
                f"rollout.tensor_parallel: {layer.moe_tp_size}; rule: an expert's K={inner} per rank is a multiple of "
                f"{BLOCK}; fix: rollout.expert_parallel = rollout.tensor_parallel"
            )
        super().create_weights(layer, num_experts, hidden_size, inner, *args, **kw)
        for name, rows, cols in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            scale = torch.ones(num_experts, rows, -(-cols // BLOCK), dtype=torch.float32)
            self.register(layer, name, "weight_scale_inv", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights; later versions are written into the same memory, which captured CUDA graphs read."""
        if "jetrl_w13" in layer.__dict__:
            layer.jetrl_w13.refresh()
            layer.jetrl_w2.refresh()
            return
        inner, hidden = layer.w2_weight.shape[2], layer.w2_weight.shape[1]
        layer.jetrl_w13 = self._experts(layer.w13_weight, layer.w13_weight_scale_inv, _gate_and_up(inner))
        layer.jetrl_w2 = self._experts(layer.w2_weight, layer.w2_weight_scale_inv, whole(hidden))

    def _experts(self, weight: Tensor, scale: Tensor, slices: list[GridSlice]) -> Fp8Experts:
        return Fp8Experts(Fp8Tensor(weight.data, scale.data, self.config.fmt), slices)

    def run(self, layer: Any, rows: Tensor, offsets: Tensor) -> Tensor:
        gate_up = ops.fp8_routed_linear(rows, offsets, layer.jetrl_w13)
        hidden = ops.swiglu(gate_up, self.config.fmt)
        size = layer.moe_tp_size
        segments, reduce = row_parallel(layer.w2_weight.shape[2] * size, size, self.config.tp_invariant)
        return ops.fp8_routed_linear(hidden, offsets, layer.jetrl_w2, segments, reduce)


def _gate_and_up(inner: int) -> list[GridSlice]:
    """Where the rows of w13 lie on the grids of gate_proj and up_proj; shards cut no block."""
    return [GridSlice(torch.arange(i * inner, (i + 1) * inner), 0, inner) for i in range(2)]


class Bf16ExpertsMethod(ExpertsMethod):
    """Exact BF16 experts."""

    dtype = torch.bfloat16

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights of this version. On GPUs that is the weights themselves."""
        layer.jetrl_w13 = ops.ExactExperts.of(layer.w13_weight)
        if layer.moe_tp_size == 1:
            layer.jetrl_w2 = ops.ExactExperts.of(layer.w2_weight)
        else:
            layer.jetrl_w2 = [ops.ExactWeight.of(weight, maximum) for weight in layer.w2_weight]

    def run(self, layer: Any, rows: Tensor, offsets: Tensor) -> Tensor:
        hidden = ops.swiglu(ops.routed_linear(rows, offsets, layer.w13_weight, layer.jetrl_w13))
        if layer.moe_tp_size == 1:
            return ops.routed_linear(hidden, offsets, layer.w2_weight, layer.jetrl_w2)
        experts = zip(hidden.split(offsets.diff().tolist()), layer.w2_weight, layer.jetrl_w2, strict=True)
        outputs = [ops.row_parallel_linear(*expert, maximum, exact_sum) for expert in experts if len(expert[0])]
        y = torch.cat(outputs) if outputs else rows
        return y if is_rank_0() else torch.zeros_like(y)
