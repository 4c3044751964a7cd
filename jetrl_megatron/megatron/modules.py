"""Megatron-Core modules that compute with our operators: norm, activation, attention with rope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.fp8 import Fp8Format


@dataclass
class PackedSequences(PackedSeqParams):
    """Packed sequences with host-side offsets. cu: offsets of the sequences, without the padding tail."""

    cu: list[int] = field(default_factory=list)
    positions: Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], padded: int) -> PackedSequences:
        """lengths of the sequences in tokens; padded: tokens of the micro-batch incl. the padding tail."""
        cu = [0]
        for length in lengths:
            cu.append(cu[-1] + length)
        tail = [padded - cu[-1]] if padded > cu[-1] else []
        positions = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(sum(tail), dtype=torch.int64)])
        offsets = torch.tensor([*cu, padded] if tail else cu, dtype=torch.int32)
        longest = max([*lengths, *tail])
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cu=cu,
            positions=positions,
        )

    def to(self, device: torch.device) -> PackedSequences:
        """The same on another device; offsets that are asked for on the host stay there."""
        moved = {
            name: value.to(device)
            for name in ("cu_seqlens_q", "cu_seqlens_kv", "positions")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


class RMSNorm(nn.Module):
    """Hidden, q/k and final norm; weight [H] in the model's dtype. fmt: of the FP8 linear that reads the result as it
    is."""

    fmt: Fp8Format | None = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return ops.rmsnorm(x, self.weight, self.eps, self.fmt)


def residual_add(_training: bool, _fused: bool) -> Callable[..., Tensor]:
    """In the place of Megatron's bias_dropout_add, whose bias and dropout our models do not have."""

    def add(output_with_bias: tuple[Tensor, None], residual: Tensor, _dropout: float) -> Tensor:
        return ops.residual_add(output_with_bias[0], residual)

    return add


class SwiGLU(nn.Module):
    """Receives the whole [gate | up] because `config.use_te_activation_func` is set. fmt: as for `RMSNorm`."""

    fmt: Fp8Format | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return ops.swiglu(gate_up, self.fmt)


class CoreAttention(DotProductAttention):
    """Causal attention of packed sequences (thd)."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None
        assert attention_bias is None
        o = ops.packed_attention(query, key, value, packed_seq_params.cu, self.softmax_scale)
        return o.reshape(query.shape[0], -1)


class RopeSelfAttention(SelfAttention):
    """Applies our rope to q and k (the model is built with position_embedding_type="none")."""

    rope_table: ops.RopeTable  # set by the model builder

    def forward(self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any) -> Any:
        assert packed_seq_params is not None, "sequences are always packed"
        self._positions = packed_seq_params.positions
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k, v = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)

        def rotate(x: Tensor) -> Tensor:  # [T, 1, h, D]
            assert self._positions is not None
            return ops.rope(x.squeeze(1), self._positions, self.rope_table).unsqueeze(1)

        return rotate(q), rotate(k), v
