"""Rotary embedding against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetrl_megatron import ops

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def transformers_cos_sin(theta: float, head_dim: int, scaling: dict[str, float] | None, positions: torch.Tensor) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is not None:
        rope |= {"rope_type": "llama3", **scaling}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters=rope,
        max_position_embeddings=4096,
    )
    return LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128)])
def test_rotates_as_transformers(theta: float, head_dim: int, scaling: dict[str, float] | None) -> None:
    """cos, sin and the rotated q equal transformers' up to its fp32 angles (position * 2^-24, 1e-4 at position 1500);
    q itself to half a bf16 ulp more."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.cat([torch.arange(300), torch.tensor([1023, 1024, 1500])])
    cos, sin = transformers_cos_sin(theta, head_dim, scaling, positions)
    table = ops.RopeTable(theta, head_dim, 1501, scaling)
    ours = table.lookup(positions)
    for mine, theirs in zip(ours, (cos[0], sin[0]), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs[:, : head_dim // 2], rtol=0, atol=2e-4)
    torch.testing.assert_close(ours[0][:10], cos[0, :10, : head_dim // 2], rtol=0, atol=2e-6)
    q = torch.randn(len(positions), 3, head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, _ = apply_rotary_pos_emb(q.float()[None], q.float()[None], cos, sin, unsqueeze_dim=2)
    actual = ops.rope(q, positions, table)
    torch.testing.assert_close(actual.float(), expected[0], rtol=2.0**-8, atol=2e-3)


def test_llama3_scaling_changes_something() -> None:
    """Negative control: the scaled table is not the plain one, and its highest frequency is unchanged."""
    plain, scaled = (ops.RopeTable(1e4, 64, 1, s).inverse_frequencies() for s in (None, LLAMA3))
    assert plain[0] == scaled[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 8)
    assert ((plain / 8 - 1e-12 <= scaled) & (scaled <= plain)).all()


def test_a_position_does_not_depend_on_the_length_of_the_table() -> None:
    """A position's cos and sin have the same bits in tables of every length that has it; a longer position is an
    error."""
    positions = torch.tensor([0, 5, 1023, 1024, 3000, 4100])
    expected = ops.RopeTable(1e4, 128, 5000).lookup(positions)
    for i, position in enumerate(positions):
        table = ops.RopeTable(1e4, 128, int(position) + 1)
        cos, sin = table.lookup(position[None])
        assert torch.equal(cos[0], expected[0][i])
        assert torch.equal(sin[0], expected[1][i])
        with pytest.raises(IndexError):
            table.lookup(position[None] + 1)


def test_the_gradient_is_the_inverse_rotation() -> None:
    """Rotation is orthogonal: the gradient is the incoming one rotated by -position (bf16 tolerance)."""
    table = ops.RopeTable(1e4, 64, 20)
    x = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    dy = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    ops.rope(x, torch.arange(20), table).backward(dy)
    cos, sin = (t.double()[:, None] for t in table.lookup(torch.arange(20)))
    a, b = dy.double().chunk(2, -1)
    assert x.grad is not None
    expected = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
    torch.testing.assert_close(x.grad.double(), expected, rtol=2.0**-8, atol=2e-3)
