"""Loaded through the rules, stock Megatron-Core computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.plan import ConversionPlan
from tests.support.models import FAMILIES, hf_model, per_expert, perturb


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's process groups with a single rank, on gloo."""
    if torch.cuda.is_available():
        pytest.skip("the stock model on CPU; with a GPU Megatron would move parts of it there")
    from megatron.core import parallel_state

    from jetrl_megatron.megatron.groups import shutdown

    if dist.is_initialized():  # left by another test package of the same session
        shutdown()
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def stock_gpt_model(dims: ModelDims) -> Any:
    """Megatron-Core's own GPTModel in fp32 with its local layer spec, nothing of ours."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if dims.moe is not None:
        experts = {
            "num_moe_experts": dims.moe.num_experts,
            "moe_router_topk": dims.moe.experts_per_token,
            "moe_ffn_hidden_size": dims.moe.intermediate_size,
            "moe_router_load_balancing_type": "none",
        }
    config = TransformerConfig(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden_size,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_kv_heads,
        kv_channels=dims.head_dim,
        ffn_hidden_size=dims.intermediate_size,
        layernorm_epsilon=dims.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=dims.qk_norm,
        add_qkv_bias=dims.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=None if dims.moe is None else dims.moe.num_experts,
            normalization="RMSNorm",
            qk_layernorm=dims.qk_norm,
        ),
        vocab_size=dims.padded_vocab_size(1),
        max_sequence_length=64,
        share_embeddings_and_output_weights=dims.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(dims.rope_theta),
        parallel_output=False,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_stock_megatron(one_rank: None, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool) -> None:
    """fp32 logits of transformers and of stock Megatron-Core agree to 1e-4: every weight is where it belongs."""
    # Megatron asks for a CUDA device and forks a CUDA random state (for a dropout of 0) on any machine.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork", nullcontext)
    source = hf_model(family, dtype=torch.float32, tie_word_embeddings=tied).eval()
    perturb(source, seed=1)
    plan = ConversionPlan(ModelDims.from_hf(source.config.to_dict()))
    model = stock_gpt_model(plan.dims).eval()
    state = per_expert(source.state_dict())
    parameters = dict(model.named_parameters())
    assert parameters.keys() == {rule.megatron_name for rule in plan.rules}
    with torch.no_grad():
        for name, parameter in parameters.items():
            rule = plan.rule_for(name)
            parameter.copy_(rule.to_megatron([state[hf.name] for hf in rule.hf], 1)[0])
        ids = torch.randint(0, plan.dims.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
        actual, expected = model(ids, positions, mask), source(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
