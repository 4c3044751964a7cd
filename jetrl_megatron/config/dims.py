"""Model dimensions, read from a Hugging Face `config.json` (a dict). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# model_type -> (q/k/v bias, q/k norm)
ARCHITECTURES: dict[str, tuple[bool, bool]] = {
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
MOE_FAMILIES = ("qwen3_moe",)


@dataclass(frozen=True)
class MoeDims:
    """A mixture of experts in every layer. intermediate_size: of one expert; renormalize: router weights sum to 1 over
    the chosen experts (HF `norm_topk_prob`), else they are the softmax over all."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalize: bool


@dataclass(frozen=True)
class ModelDims:
    """Dims of a decoder-only transformer, in Hugging Face terms. `rope_scaling`: the llama3 dict or None. `moe`: None
    for a dense model."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float] | None
    max_position_embeddings: int
    moe: MoeDims | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary rows held by Megatron: the next multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelDims:
        """Raises ValueError for an unknown model_type, a missing field, an unsupported rope scaling or dense layers
        among those with experts."""
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type: {model_type!r}; rule: a supported family; fix: use one of {sorted(ARCHITECTURES)}"
            )
        qkv_bias, qk_norm = ARCHITECTURES[model_type]

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise ValueError(f"{key}: missing in the model's config.json; rule: required; fix: add it")
            return config[key]

        def positive(key: str, value: Any) -> int:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key}: {value!r}; rule: a positive integer; fix: correct the model's config.json")
            return value

        hidden = positive("hidden_size", need("hidden_size"))
        heads = positive("num_attention_heads", need("num_attention_heads"))
        kv_heads = positive("num_key_value_heads", config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads: {kv_heads}; rule: divides num_attention_heads ({heads}); fix: correct it"
            )

        def number(key: str, value: Any) -> float:
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{key}: {value!r}; rule: a positive number; fix: correct the model's config.json")
            return float(value)

        rope = _rope(config)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"rope_scaling: {kind!r}; rule: default or llama3; fix: use a supported checkpoint")
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = None
        if kind == "llama3":
            missing = [k for k in keys if rope.get(k) is None]
            if missing:
                raise ValueError(
                    f"rope_scaling: {missing} missing; rule: llama3 scaling needs {list(keys)}; fix: add them"
                )
            scaling = {k: number(f"rope_scaling.{k}", rope[k]) for k in keys}
        moe = None
        if model_type in MOE_FAMILIES:
            _require_experts_everywhere(config)
            # transformers 5 writes num_local_experts for the num_experts of the published checkpoints
            experts_key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
            moe = MoeDims(
                num_experts=positive(experts_key, need(experts_key)),
                experts_per_token=positive("num_experts_per_tok", need("num_experts_per_tok")),
                intermediate_size=positive("moe_intermediate_size", need("moe_intermediate_size")),
                renormalize=bool(config.get("norm_topk_prob", False)),
            )
            if moe.experts_per_token > moe.num_experts:
                raise ValueError(
                    f"num_experts_per_tok: {moe.experts_per_token}; rule: at most {experts_key} ({moe.num_experts}); "
                    "fix: correct the model's config.json"
                )
        theta = rope.get("rope_theta", config.get("rope_theta"))
        return cls(
            model_type=model_type,
            hidden_size=hidden,
            intermediate_size=positive("intermediate_size", need("intermediate_size")),
            num_layers=positive("num_hidden_layers", need("num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=positive("head_dim", config.get("head_dim") or hidden // heads),
            vocab_size=positive("vocab_size", need("vocab_size")),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            rms_norm_eps=number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=number("rope_theta", 10000.0 if theta is None else theta),
            rope_scaling=scaling,
            max_position_embeddings=positive("max_position_embeddings", config.get("max_position_embeddings", 2048)),
            moe=moe,
        )


def _require_experts_everywhere(config: Mapping[str, Any]) -> None:
    for key, value, wanted in (
        ("decoder_sparse_step", config.get("decoder_sparse_step", 1), 1),
        ("mlp_only_layers", list(config.get("mlp_only_layers") or []), []),
    ):
        if value != wanted:
            raise ValueError(
                f"{key}: {value}; rule: {wanted}, every layer has experts (SGLang's Qwen3-MoE knows no other); "
                "fix: use a checkpoint without dense layers"
            )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings; transformers 5 writes `rope_parameters`, older ones `rope_scaling` beside `rope_theta`."""
    rope: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        part = config.get(key) or {}
        if not isinstance(part, Mapping):
            raise ValueError(f"{key}: {part!r}; rule: a mapping; fix: correct the model's config.json")
        rope.update(part)
    return rope
