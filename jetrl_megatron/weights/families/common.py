"""The decoder that all families share; a family adds what is its own (biases, q/k norms, experts)."""

from __future__ import annotations

from collections.abc import Callable

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.rules import HfTensor, Rule, Units

LayerRules = Callable[[ModelDims, int], list[Rule]]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def replicated(megatron_name: str, hf_name: str, size: int) -> Rule:
    """A 1-D parameter that every tensor-parallel rank holds in full."""
    return Rule(megatron_name, (HfTensor(hf_name, (size,)),))


def vocab_rule(megatron_name: str, hf_name: str, dims: ModelDims, export: bool = True) -> Rule:
    """An embedding or lm_head, [vocab_size, hidden_size], rows padded in Megatron."""
    return Rule(megatron_name, (HfTensor(hf_name, (dims.vocab_size, dims.hidden_size)),), "vocab", 0, export=export)


def tied_output_copy(dims: ModelDims) -> Rule:
    """The last pipeline stage's copy of a tied embedding: loaded from the embedding, exported by the first stage."""
    return vocab_rule(OUTPUT, "model.embed_tokens.weight", dims, export=False)


def qkv_tensors(dims: ModelDims, layer: int, suffix: str, *tail: int) -> tuple[HfTensor, ...]:
    """The q, k and v tensors `model.layers.N.self_attn.*_proj.<suffix>`, shapes (q_size | kv_size, *tail)."""
    rows = {"q": dims.q_size, "k": dims.kv_size, "v": dims.kv_size}
    return tuple(HfTensor(f"model.layers.{layer}.self_attn.{n}_proj.{suffix}", (rows[n], *tail)) for n in "qkv")


def kv_head_units(dims: ModelDims) -> Units:
    return Units("num_key_value_heads", dims.num_kv_heads)


def attention_rules(dims: ModelDims, layer: int) -> list[Rule]:
    """Norms and attention of decoder layer `layer` (global index)."""
    mcore, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, heads = dims.hidden_size, kv_head_units(dims)
    qkv = qkv_tensors(dims, layer, "weight", hidden)
    o_proj = (HfTensor(hf + "self_attn.o_proj.weight", (hidden, dims.q_size)),)
    return [
        replicated(mcore + "input_layernorm.weight", hf + "input_layernorm.weight", hidden),
        Rule(mcore + "self_attention.linear_qkv.weight", qkv, "qkv", 0, heads, quantized=True),
        Rule(mcore + "self_attention.linear_proj.weight", o_proj, "plain", 1, heads, quantized=True),
        replicated(mcore + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
    ]


def gated_mlp_tensors(prefix: str, hidden: int, inter: int) -> tuple[tuple[HfTensor, ...], tuple[HfTensor, ...]]:
    """(gate and up, down) of the gated MLP whose tensors are `<prefix>{gate,up,down}_proj.weight`."""
    gate_up = tuple(HfTensor(f"{prefix}{n}_proj.weight", (inter, hidden)) for n in ("gate", "up"))
    return gate_up, (HfTensor(f"{prefix}down_proj.weight", (hidden, inter)),)


def dense_mlp_rules(dims: ModelDims, layer: int) -> list[Rule]:
    """The gated MLP of decoder layer `layer`."""
    mcore, inner = f"decoder.layers.{layer}.mlp.", Units("intermediate_size", dims.intermediate_size)
    gate_up, down = gated_mlp_tensors(f"model.layers.{layer}.mlp.", dims.hidden_size, dims.intermediate_size)
    return [
        Rule(mcore + "linear_fc1.weight", gate_up, "gate_up", 0, inner, quantized=True),
        Rule(mcore + "linear_fc2.weight", down, "plain", 1, inner, quantized=True),
    ]


def _nothing(dims: ModelDims, layer: int) -> list[Rule]:
    return []


def decoder_rules(dims: ModelDims, extra: LayerRules = _nothing, mlp: LayerRules = dense_mlp_rules) -> list[Rule]:
    """All rules of a decoder in HF layer order; `extra(dims, layer)` adds a family's own parameters of each layer,
    `mlp(dims, layer)` are those of its MLP."""
    rules = [vocab_rule(EMBEDDING, "model.embed_tokens.weight", dims)]
    for layer in range(dims.num_layers):
        rules += attention_rules(dims, layer) + mlp(dims, layer) + extra(dims, layer)
    rules.append(replicated("decoder.final_layernorm.weight", "model.norm.weight", dims.hidden_size))
    if not dims.tied_embeddings:
        rules.append(vocab_rule(OUTPUT, "lm_head.weight", dims))
    return rules
