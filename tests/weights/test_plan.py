"""Conversion plans are total: every tensor of transformers' models, nothing else, on every pipeline stage."""

from __future__ import annotations

from typing import Any

import pytest

from jetrl_megatron.config.dims import ARCHITECTURES, ModelDims
from jetrl_megatron.weights.families import FAMILIES
from jetrl_megatron.weights.plan import ConversionPlan, expert_of, shift_expert, shift_layer
from tests.support.models import default_dims, hf_shapes


def plan_of(family: str, **dims: Any) -> ConversionPlan:
    return ConversionPlan(ModelDims.from_hf({**default_dims(family), **dims, "model_type": family}))


def test_every_known_architecture_has_rules() -> None:
    """The two registries list the same families."""
    assert FAMILIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_and_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    """The plan lists exactly the tensors, with their shapes, of the model that transformers builds."""
    plan = plan_of(family, tie_word_embeddings=tied)
    names = plan.hf_names()
    assert len(names) == len(set(names))
    assert {hf.name: hf.shape for rule in plan.rules for hf in rule.hf} == hf_shapes(family, tie_word_embeddings=tied)
    linears = tuple(f"{n}_proj.weight" for n in ("q", "k", "v", "o", "gate", "up", "down"))
    assert plan.quantized_hf_names() == [name for name in names if name.endswith(linears)]


def test_missing_and_unused_tensors_are_named() -> None:
    """A checkpoint with one tensor too few and one too many is refused by their names; rotary buffers pass."""
    plan = plan_of("llama")
    names = [*plan.hf_names(), "model.layers.0.self_attn.rotary_emb.inv_freq"]
    plan.check_names(names)
    names.remove("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"missing model.layers.1.mlp.up_proj.weight, unused extra.bias;"):
        plan.check_names([*names, "extra.bias"])
    with pytest.raises(ValueError, match=r"missing lm_head.weight"):
        plan.check_names(plan_of("llama", tie_word_embeddings=True).hf_names())
    with pytest.raises(ValueError, match=r"unused .*q_proj.bias"):
        plan.check_names(plan_of("qwen2").hf_names())


def test_unknown_parameter_names_the_nearest() -> None:
    """A Megatron parameter without a rule is an error, not skipped."""
    with pytest.raises(ValueError, match=r"nearest: decoder.layers.1.mlp.linear_fc1.weight"):
        plan_of("qwen3").rule_for("decoder.layers.1.mlp.linear_fc1.bias")


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_split_the_plan(tied: bool) -> None:
    """Stages together hold each exported rule once; a tied model's last stage adds a copy that is not exported."""
    plan = plan_of("qwen3", num_hidden_layers=3, tie_word_embeddings=tied)
    first, last = plan.stage_rules(0, 2, True, False), plan.stage_rules(2, 1, False, True)
    exported = [rule for rule in first + last if rule.export]
    assert sorted(r.megatron_name for r in exported) == sorted(r.megatron_name for r in plan.rules)
    assert [hf.name for rule in exported for hf in rule.hf] == plan.hf_names()
    output = [rule for rule in last if rule.megatron_name == "output_layer.weight"]
    assert [rule.hf[0].name for rule in output] == ["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert output[0].export is not tied
    assert plan.rule_for("output_layer.weight") == output[0]
    assert plan.stage_rules(0, 3, True, True) == list(plan.rules)
    with pytest.raises(ValueError, match=r"layers \[2, 4\)"):
        plan.stage_rules(2, 2, False, True)


def test_expert_parallel_ranks_split_the_plan() -> None:
    """Ranks together hold every expert once, and each holds everything else."""
    plan = plan_of("qwen3_moe", num_hidden_layers=2)
    ranks = [plan.stage_rules(0, 2, True, True, experts) for experts in (range(0, 4), range(4, 8))]
    held = [{rule.megatron_name for rule in rules} for rules in ranks]
    shared = {r.megatron_name for r in plan.rules if ".local_experts." not in r.megatron_name}
    assert held[0] & held[1] == shared
    assert held[0] | held[1] == {rule.megatron_name for rule in plan.rules}
    assert len(held[0]) == len(held[1])
    assert expert_of(plan.rule_for("decoder.layers.1.mlp.experts.local_experts.7.linear_fc2.weight")) == 7
    assert expert_of(plan.rule_for("decoder.layers.1.mlp.router.weight")) is None
    assert shift_expert("x.local_experts.1.linear_fc1.weight", 4) == "x.local_experts.5.linear_fc1.weight"


def test_layer_shift_is_its_own_inverse() -> None:
    """Local and global layer names differ by the first layer of the stage; other names stay."""
    assert shift_layer("decoder.layers.1.mlp.linear_fc1.weight", 10) == "decoder.layers.11.mlp.linear_fc1.weight"
    assert shift_layer(shift_layer("decoder.layers.0.x", 7), -7) == "decoder.layers.0.x"
    assert shift_layer("decoder.final_layernorm.weight", 3) == "decoder.final_layernorm.weight"
