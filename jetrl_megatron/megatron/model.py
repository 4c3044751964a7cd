"""Builds a GPTModel of Megatron-Core for Llama, Qwen2.5, Qwen3 and Qwen3-MoE, with our modules in every place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.config.dims import ModelDims, MoeDims
from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.fp8 import GridSlice
from jetrl_megatron.megatron.groups import Ranks
from jetrl_megatron.megatron.linear import (
    LinearPrecision,
    PreciseColumnParallelLinear,
    PreciseRowParallelLinear,
)
from jetrl_megatron.megatron.modules import CoreAttention, RMSNorm, RopeSelfAttention, SwiGLU, residual_add
from jetrl_megatron.megatron.moe import ExactRouter, FixedOrderMoELayer, GroupedExperts, SequentialExperts
from jetrl_megatron.weights.plan import ConversionPlan, shift_expert, shift_layer
from jetrl_megatron.weights.rules import Rule


@dataclass(frozen=True)
class LogprobRequest:
    """What the last stage computes. rows [n]: indices into the packed tokens whose next token is asked; targets [n]:
    those tokens; temperature: sampling temperature (0: greedy)."""

    rows: Tensor
    targets: Tensor
    temperature: float


@dataclass
class Chunk:
    """Consecutive layers of the model: a pipeline stage, or one of its virtual stages. rules: of its parameters, with
    global layer indices; first_layer: global index of its first layer."""

    model: GPTModel
    rules: list[Rule]
    first_layer: int


@dataclass
class Policy:
    """A model with its layout and the rules that connect its parameters to Hugging Face tensors. chunks: what this rank
    holds, one per virtual pipeline stage, in the order of the layers."""

    chunks: list[Chunk]
    config: TransformerConfig
    dims: ModelDims
    ranks: Ranks
    plan: ConversionPlan
    precision: LinearPrecision
    head: LogprobHead

    def named_rules(self) -> Iterator[tuple[Rule, nn.Parameter, Any]]:
        """(rule, local parameter, its module) for every parameter of this pipeline stage. The module of a quantized
        rule is one of our linears."""
        for chunk in self.chunks:
            parameters = dict(chunk.model.named_parameters())
            for rule in chunk.rules:
                name = shift_layer(rule.megatron_name, -chunk.first_layer)
                if self.dims.moe is not None:
                    name = shift_expert(name, -local_experts(self.dims.moe, self.ranks).start)
                yield rule, parameters[name], chunk.model.get_submodule(name.rpartition(".")[0])

    @property
    def models(self) -> list[GPTModel]:
        return [chunk.model for chunk in self.chunks]

    @property
    def device(self) -> torch.device:
        """Where the parameters of this rank are."""
        return next(self.models[0].parameters()).device

    def weights_changed(self, version: int) -> None:
        """Declare that the parameters changed: quantized copies are made again on next use."""
        self.precision.version.value = version


class LogprobHead:
    """The `output_processor` of GPTModel: lm_head on the asked rows only, then their log-probs."""

    def __init__(self, dims: ModelDims, precision: LinearPrecision) -> None:
        self._vocab_size = dims.vocab_size
        self._version = precision.version
        self._cached: tuple[int, ops.ExactWeight] | None = None

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: LogprobRequest,
        **_unused: Any,
    ) -> Tensor:
        """hidden_states [T, 1, H] (sharded over T under sequence parallelism) -> fp32 log-probs [n]."""
        group = output_layer.tp_group
        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        elif group.size() > 1:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        weight = output_layer.weight if output_weight is None else output_weight
        picked = hidden_states.squeeze(1)[context.rows]
        logits = ops.lm_head(picked, weight, self._prepared(weight))
        if group.size() > 1:
            logits = gather_from_tensor_model_parallel_region(logits, group=group)
        return ops.logprob(logits[:, : self._vocab_size], context.targets, context.temperature)

    def _prepared(self, weight: Tensor) -> ops.ExactWeight:
        if self._cached is None or self._cached[0] != self._version.value:
            self._cached = (self._version.value, ops.ExactWeight.of(weight))
        return self._cached[1]


def local_experts(moe: MoeDims, ranks: Ranks) -> range:
    """Global indices of the experts of this rank."""
    count = moe.num_experts // ranks.expert_size
    return range(ranks.expert * count, (ranks.expert + 1) * count)


def layer_spec(dims: ModelDims, grouped_experts: bool) -> ModuleSpec:
    """One decoder layer: norm and linear unfused, so that names match the Hugging Face tensors one to one."""
    qk_norm: dict[str, Any] = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if dims.qk_norm else {}
    attention = SelfAttentionSubmodules(
        linear_qkv=PreciseColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=PreciseRowParallelLinear,
        **qk_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=PreciseColumnParallelLinear, linear_fc2=PreciseRowParallelLinear, activation_func=SwiGLU
    )
    if dims.moe is None:
        feed_forward = partial(MLP.as_mlp_submodule, submodules=mlp)
    else:
        experts = partial(GroupedExperts if grouped_experts else SequentialExperts, submodules=mlp)
        feed_forward = partial(FixedOrderMoELayer, submodules=MoESubmodules(experts=experts, router=ExactRouter))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=RopeSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=residual_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=feed_forward,
            mlp_bda=residual_add,
        ),
    )


def transformer_config(dims: ModelDims, parallel: ParallelConfig, recompute: bool) -> TransformerConfig:
    """Megatron's configuration: BF16, no dropout, every fusion off (they would change the operators)."""
    on_cpu = not torch.cuda.is_available()
    interleaved = parallel.virtual_pipeline > 1
    config = TransformerConfig(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden_size,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_kv_heads,
        kv_channels=dims.head_dim,
        ffn_hidden_size=dims.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=dims.rms_norm_eps,
        qk_layernorm=dims.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=dims.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        overlap_p2p_comm=interleaved,  # without it the interleaved schedule is silently wrong on gloo
        batch_p2p_comm=not interleaved,
        sequence_parallel=parallel.sequence,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **_moe_config(dims, parallel),
    )
    config.use_te_activation_func = True  # hands the activation the whole [gate | up]; no TE involved
    return config


def _moe_config(dims: ModelDims, parallel: ParallelConfig) -> dict[str, Any]:
    """No auxiliary loss and no token dropping: neither exists in the engine."""
    if dims.moe is None:
        return {}
    return {
        "num_moe_experts": dims.moe.num_experts,
        "moe_router_topk": dims.moe.experts_per_token,
        "moe_ffn_hidden_size": dims.moe.intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
    }


def grid_slices(rule: Rule, ranks: Ranks) -> list[GridSlice]:
    """Where this rank's rows of a linear lie on the grids of its Hugging Face tensors."""
    segments = rule.local_segments(ranks.tensor_size, ranks.tensor)
    return [GridSlice(s.local_rows, s.hf_start, s.hf_rows) for s in segments]


def build_policy(
    dims: ModelDims, parallel: ParallelConfig, ranks: Ranks, precision: LinearPrecision, recompute: bool = False
) -> Policy:
    """This rank's part of the model. Parameters are uninitialised until `load_hf` or a checkpoint fills them."""
    config = transformer_config(dims, parallel, recompute)
    plan = ConversionPlan(dims)
    chunks = [_build_chunk(config, plan, parallel, ranks, i) for i in range(ranks.virtual_size)]
    policy = Policy(chunks, config, dims, ranks, plan, precision, LogprobHead(dims, precision))
    table = ops.RopeTable(dims.rope_theta, dims.head_dim, dims.max_position_embeddings, dims.rope_scaling)
    for layer in (layer for model in policy.models for layer in model.decoder.layers):
        layer.self_attention.rope_table = table
        if dims.moe is not None:
            layer.mlp.router.configure(precision, dims.moe.renormalize)
        if not parallel.sequence or precision.rows_travel:  # else linears read what was gathered, not the norm's result
            layer.input_layernorm.fmt = precision.carried_format
            layer.pre_mlp_layernorm.fmt = precision.carried_format if dims.moe is None else None
    configured = 0
    for rule, _, module in policy.named_rules():
        if rule.quantized:
            module.configure(precision, grid_slices(rule, ranks))
            configured += 1
    modules = [module for model in policy.models for module in model.modules()]
    for activation in (module for module in modules if isinstance(module, SwiGLU)):
        activation.fmt = precision.carried_format
    expected = sum(isinstance(m, PreciseColumnParallelLinear | PreciseRowParallelLinear) for m in modules)
    assert configured == expected, (configured, expected)
    return policy


def _build_chunk(
    config: TransformerConfig, plan: ConversionPlan, parallel: ParallelConfig, ranks: Ranks, index: int
) -> Chunk:
    """The layers of this rank's virtual stage `index`. Layers go round the stages once per virtual stage."""
    dims = plan.dims
    num_layers = dims.num_layers // (ranks.pipeline_size * ranks.virtual_size)
    first_layer = (index * ranks.pipeline_size + ranks.pipeline) * num_layers
    has_embedding = first_layer == 0
    has_output = first_layer + num_layers == dims.num_layers
    spec = layer_spec(dims, parallel.grouped_experts)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm),
        vocab_size=dims.padded_vocab_size(parallel.tensor),
        max_sequence_length=dims.max_position_embeddings,
        share_embeddings_and_output_weights=dims.tied_embeddings,
        position_embedding_type="none",
        parallel_output=True,
        pre_process=has_embedding,
        post_process=has_output,
        vp_stage=index if ranks.virtual_size > 1 else None,
    )
    experts = None if dims.moe is None else local_experts(dims.moe, ranks)
    rules = plan.stage_rules(first_layer, num_layers, has_embedding, has_output, experts)
    assert [layer.layer_number for layer in model.decoder.layers] == [first_layer + 1 + i for i in range(num_layers)]
    return Chunk(model, rules, first_layer)
