"""The training graph: one forward and backward of the real policy on a few tokens, recorded on every rank."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.fp8.recorder import record
from jetrl_megatron.megatron.model import Policy
from jetrl_megatron.megatron.optimizer import Trainable
from jetrl_megatron.megatron.step import MicroBatch, pack
from jetrl_megatron.ops.precision_flow import Graph
from jetrl_megatron.ops.recorder import attach

# Megatron-Core's path, below a layer or the model -> Hugging Face's, with SGLang's names for fused linears.
LAYER_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention": "self_attn",
    "self_attention.linear_qkv": "self_attn.qkv_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp": "mlp",
    "mlp.linear_fc1": "mlp.gate_up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
}
EXPERTS = "mlp.experts"  # with all experts below it: SGLang computes them together
MODEL_MODULES = {"embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm"}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)(?:\.(.+))?$")


def canonical_name(path: str, first_layer: int) -> str | None:
    """Hugging Face path of a module of our GPTModel; None where Hugging Face has no such module.

    first_layer: global index of this pipeline stage's first layer."""
    match = _LAYER.match(path)
    if match is None:
        return MODEL_MODULES.get(path)
    layer = f"model.layers.{int(match[1]) + first_layer}"
    if match[2] is None:
        return layer
    name = EXPERTS if match[2].startswith(EXPERTS) else LAYER_MODULES.get(match[2])
    return f"{layer}.{name}" if name is not None else None


def record_training(trainable: Trainable, num_tokens: int, temperature: float) -> list[Graph]:
    """Graphs of all ranks that hold different parts of the data or of the linears, pipeline stages merged: one per
    (data, tensor) rank. Every rank calls it and gets the same list. Gradients are overwritten, weights are not touched.
    """
    policy = trainable.policy
    pad = policy.ranks.tensor_size if policy.model.config.sequence_parallel else 1
    tokens = torch.arange(num_tokens) % policy.dims.vocab_size
    with record() as nodes, attach(policy.model, lambda path: canonical_name(path, policy.first_layer)):
        trainable.accumulate([pack([(tokens.tolist(), 1)], temperature, pad)], _mean_logprob)
    return _gather(policy, Graph.of("training", nodes))


def _mean_logprob(logprobs: Tensor, _batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
    return logprobs.mean(), {}


def _gather(policy: Policy, graph: Graph) -> list[Graph]:
    ranks = policy.ranks
    everyone: list[tuple[int, int, int, Graph] | None] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (ranks.data, ranks.tensor, ranks.pipeline, graph))
    parts = sorted((part for part in everyone if part is not None), key=lambda part: part[:3])
    merged = []
    for first in range(0, len(parts), ranks.pipeline_size):
        data, tensor, _, _ = parts[first]
        side = f"training (data rank {data}, tensor rank {tensor})" if first else "training"
        merged.append(Graph.merged(side, [part[3] for part in parts[first : first + ranks.pipeline_size]]))
    return merged
