"""The training graph: one forward and backward of the real policy on a few tokens, recorded on every rank."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.fp8.recorder import Node, Phase, record
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

    first_layer: global index of the model's first layer."""
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
    pad = policy.ranks.tensor_size if policy.config.sequence_parallel else 1
    tokens = torch.arange(num_tokens) % policy.dims.vocab_size
    batch = pack([(tokens.tolist(), 1)], temperature, pad)
    num_batches = policy.ranks.pipeline_size if len(policy.chunks) > 1 else 1  # the least of the interleaved schedule
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(record())
        for chunk in policy.chunks:
            stack.enter_context(attach(chunk.model, partial(canonical_name, first_layer=chunk.first_layer)))
        trainable.accumulate([batch] * num_batches, _mean_logprob)
    return _gather(policy, [Graph.of("training", part) for part in _per_chunk(policy, _of_one(nodes, num_batches))])


def _mean_logprob(logprobs: Tensor, _batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
    return logprobs.mean(), {}


def _of_one(nodes: Sequence[Node], num_batches: int) -> list[Node]:
    """What one of equal micro-batches ran: of every module and phase the first of `num_batches` equal parts."""
    total, seen = Counter((node.module, node.phase) for node in nodes), Counter[tuple[str, Phase]]()
    kept = []
    for node in nodes:
        key = node.module, node.phase
        seen[key] += 1
        if seen[key] * num_batches <= total[key]:
            kept.append(node)
    return kept


def _per_chunk(policy: Policy, nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes of every chunk; those outside of any of its modules (lm_head, log-probs) are the last one's."""
    names = [
        {canonical_name(path, chunk.first_layer) for path, _ in chunk.model.named_modules()} for chunk in policy.chunks
    ]
    parts: list[list[Node]] = [[] for _ in names]
    for node in nodes:
        parts[next((i for i, known in enumerate(names) if node.module in known), -1)].append(node)
    return parts


def _gather(policy: Policy, graphs: Sequence[Graph]) -> list[Graph]:
    ranks = policy.ranks
    mine = [(ranks.data, ranks.tensor, i, ranks.pipeline, graph) for i, graph in enumerate(graphs)]
    everyone: list[list[tuple[int, int, int, int, Graph]]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(everyone, mine)
    parts = sorted((part for rank in everyone for part in rank), key=lambda part: part[:4])
    num_chunks = ranks.pipeline_size * len(graphs)
    merged = []
    for first in range(0, len(parts), num_chunks):
        data, tensor = parts[first][:2]
        side = f"training (data rank {data}, tensor rank {tensor})" if first else "training"
        merged.append(Graph.merged(side, [part[-1] for part in parts[first : first + num_chunks]]))
    return merged
