"""Every parallel layout computes what one rank computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.io import HfCheckpoint
from jetrl_megatron.weights.plan import ConversionPlan
from tests.support.launch import launch
from tests.support.models import assert_same_bits
from tests.support.oracles import rel_error
from tests.support.policies import LEARNING_RATE, Job, calm_model, run_job

pytestmark = [pytest.mark.multi, pytest.mark.slow]

CUT: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 509,
    "tie_word_embeddings": True,
}
# name: (family, dims). `cut`: head_dim 64 over 4 kv heads (TP cuts 128-row blocks of k and v), q/k norms, tied
# embedding, padded vocabulary. `ragged`: TP 2 cuts 128-column groups of fc2, allowed in BF16. `bias`: untied, biases.
# `moe`: 8 experts, top-4. `deep`: 4 layers, for virtual stages.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cut": ("qwen3", CUT),
    "deep": ("qwen3", {**CUT, "num_hidden_layers": 4}),
    "ragged": ("qwen3", {**CUT, "intermediate_size": 384}),
    "bias": ("qwen2", {}),
    "moe": ("qwen3_moe", {}),
    "deep_moe": ("qwen3_moe", {"num_hidden_layers": 4}),
}
TWO_RANKS = [
    ("cut", Job("tp2", tensor=2)),
    ("cut", Job("tp2_sp", tensor=2, sequence=True)),
    ("cut", Job("pp2", pipeline=2)),
    ("cut", Job("dp2")),
    ("cut", Job("tp2_bf16", tensor=2, fp8=False, backward="bf16")),
    ("ragged", Job("tp2_bf16_ragged", tensor=2, fp8=False, backward="bf16")),
    ("cut", Job("tp2_free", tensor=2, tp_invariant=False)),
    ("cut", Job("tp2_sp_recompute", tensor=2, sequence=True, recompute=True, num_batches=6)),
    ("cut", Job("pp2_recompute_padded", pipeline=2, recompute=True, num_batches=1, pad_to=300)),
    ("deep", Job("pp2_deep", pipeline=2)),
    ("deep", Job("pp2_vpp2", pipeline=2, virtual_pipeline=2)),
    ("deep", Job("pp2_vpp2_recompute", pipeline=2, virtual_pipeline=2, recompute=True, num_batches=6)),
    ("deep_moe", Job("moe_pp2_vpp2", pipeline=2, virtual_pipeline=2)),
    ("bias", Job("bias_tp2", tensor=2)),
    ("bias", Job("bias_pp2", pipeline=2)),
    ("moe", Job("moe_ep2", expert=2)),
    ("moe", Job("moe_tp2_sp", tensor=2, sequence=True)),
    ("moe", Job("moe_tp2_sp_ep2", tensor=2, sequence=True, expert=2, grouped_experts=False)),
    ("moe", Job("moe_pp2", pipeline=2)),
    ("moe", Job("moe_ep2_bf16", expert=2, fp8=False, backward="bf16")),
]
FOUR_RANKS = [
    ("cut", Job("tp4", tensor=4)),
    ("cut", Job("tp2_pp2", tensor=2, pipeline=2)),
    ("cut", Job("tp2_dp2", tensor=2)),
    ("cut", Job("tp2_sp_pp2", tensor=2, pipeline=2, sequence=True)),
    ("deep", Job("tp2_sp_pp2_deep", tensor=2, pipeline=2, sequence=True)),
    ("deep", Job("tp2_sp_pp2_vpp2", tensor=2, pipeline=2, virtual_pipeline=2, sequence=True)),
    ("moe", Job("moe_tp2_sp_pp2_ep2", tensor=2, pipeline=2, sequence=True, expert=2)),
    ("moe", Job("moe_tp2_sp_dp2_ep4", tensor=2, sequence=True, expert=4)),
    ("moe", Job("moe_tp2_sp_dp2_ep2", tensor=2, sequence=True, expert=2)),
    ("moe", Job("moe_pp2_ep2", pipeline=2, expert=2)),
]
ALL = {job.name: (model, job) for model, job in TWO_RANKS + FOUR_RANKS}
EXACT = [name for name in ALL if name != "tp2_free"]
Results = list[dict[str, Any]]  # per rank


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: calm_model(tmp_path_factory.mktemp(name), family, seed=7, **dims)
        for name, (family, dims) in MODELS.items()
    }


@pytest.fixture(scope="module")
def distributed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Results of a job on all its ranks; all jobs of one world size run in one launch."""
    done: dict[str, Results] = {}
    launched: set[int] = set()

    def results(name: str) -> Results:
        if name not in done:
            num_ranks, jobs = next(
                (n, js) for n, js in ((2, TWO_RANKS), (4, FOUR_RANKS)) if name in {j.name for _, j in js}
            )
            assert num_ranks not in launched, f"the launch of {num_ranks} ranks failed before"
            launched.add(num_ranks)
            out = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            spec = json.dumps([[str(models[model]), asdict(job)] for model, job in jobs])
            launch("tests.megatron.worker", num_ranks, [spec, str(out)], out, timeout_s=400)
            for _, job in jobs:
                files = [out / f"{job.name}.{rank}.pt" for rank in range(num_ranks)]
                done[job.name] = [torch.load(file) for file in files]
        return done[name]

    return results


@pytest.fixture(scope="module")
def alone(single_process: None, models: dict[str, Path]) -> Callable[[str, bool], dict[str, Any]]:
    """The same scenario on one rank, in this process."""
    done: dict[tuple[str, bool], dict[str, Any]] = {}

    def result(model: str, fp8: bool) -> dict[str, Any]:
        if (model, fp8) not in done:
            job = Job("tp1", fp8=fp8, backward="fp8" if fp8 else "bf16")
            done[model, fp8] = run_job(job, models[model])
        return done[model, fp8]

    return result


def logprobs_of(ranks: Results, job: Job, key: str = "logprobs") -> Tensor:
    """In the order of the sequences: data-parallel ranks hold consecutive shares; the last stage has them."""
    holders = sorted(
        (r for r in ranks if r["coordinates"][1] == job.pipeline - 1),
        key=lambda r: (r["coordinates"][2], r["coordinates"][0]),
    )
    per_data: dict[int, Tensor] = {}
    for r in holders:
        value = torch.cat(r[key])
        assert torch.equal(per_data.setdefault(r["coordinates"][2], value), value)  # TP ranks agree
    return torch.cat([per_data[data] for data in sorted(per_data)])


def hf_gradients(ranks: Results, job: Job, plan: ConversionPlan) -> dict[str, Tensor]:
    """Local gradients of all TP ranks and stages joined by the weight rules; data-parallel ranks must agree bitwise,
    and so must all ranks that hold an expert."""
    found: dict[str, list[Tensor]] = {}
    experts: dict[str, Tensor] = {}
    for r in sorted(ranks, key=lambda r: r["coordinates"]):
        twin = next(t for t in ranks if t["coordinates"] == (*r["coordinates"][:2], 0))
        for name, grad in r["gradients"].items():
            if ".local_experts." in name:
                assert torch.equal(experts.setdefault(name, grad), grad), name
                continue
            assert torch.equal(grad, twin["gradients"][name]), name
            if r is twin:
                found.setdefault(name, []).append(grad)
    joined: dict[str, Tensor] = {}
    for name, shards in found.items():
        rule = plan.rule_for(name)
        assert len(shards) == job.tensor
        if rule.tp_dim is None:
            assert all(rel_error(shard, shards[0]) < 1e-6 for shard in shards), name
        for hf, grad in zip(rule.hf, rule.to_hf(shards), strict=True):
            if hf.name in joined:  # the tied copy on the last stage
                assert torch.equal(joined[hf.name], grad), name
            joined[hf.name] = grad
    for name, shard in experts.items():
        rule = plan.rule_for(name)
        joined |= dict(zip((hf.name for hf in rule.hf), rule.to_hf([shard]), strict=True))
    return joined


@pytest.mark.parametrize("name", EXACT)
def test_logprobs_are_bitwise_those_of_one_rank(name: str, distributed: Any, alone: Any) -> None:
    """Before any update every layout gives the log-probs of one rank, bit for bit, on every rank that has them."""
    model, job = ALL[name]
    assert torch.equal(logprobs_of(distributed(name), job), torch.cat(alone(model, job.fp8)["logprobs"]))


@pytest.mark.parametrize("name", EXACT)
def test_exports_are_bitwise_those_of_one_rank(name: str, distributed: Any, alone: Any) -> None:
    """Gathered BF16 and FP8 tensors, block scales included, are bitwise those of one rank, on global rank 0 only."""
    model, job = ALL[name]
    ranks, expected = distributed(name), alone(model, job.fp8)
    for key in ("bf16", "fp8"):
        assert ranks[0][key].keys() == expected[key].keys()
        for tensor_name, tensor in expected[key].items():
            assert_same_bits(ranks[0][key][tensor_name], tensor, tensor_name)
        assert not any(r[key] for r in ranks[1:])


@pytest.mark.parametrize("name", list(ALL))
def test_gradients_are_close_to_those_of_one_rank(
    name: str, distributed: Any, alone: Any, models: dict[str, Path]
) -> None:
    """Gradient norm within 1 %; every Hugging Face tensor's gradient within 8 % relative Frobenius (twice that for
    twice the layers; 5 % with BF16 linears: only BF16 input gradients are summed in another order). Ranks that hold
    copies agree."""
    model, job = ALL[name]
    ranks, expected = distributed(name), alone(model, job.fp8)
    plan = ConversionPlan(ModelDims.from_hf(HfCheckpoint(models[model]).config))
    for r in ranks:
        assert r["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
    reference = hf_gradients([expected], Job("tp1"), plan)
    found = hf_gradients(ranks, job, plan)
    assert found.keys() == reference.keys()
    tolerance = (0.08 if job.fp8 else 0.05) * plan.dims.num_layers / 2
    for tensor_name, grad in reference.items():
        assert rel_error(found[tensor_name], grad) < tolerance, tensor_name


@pytest.mark.parametrize(
    "jobs", [("pp2_deep", "pp2_vpp2"), ("tp2_sp_pp2_deep", "tp2_sp_pp2_vpp2")], ids=["pp2", "tp2_sp_pp2"]
)
def test_virtual_stages_change_no_gradient(jobs: tuple[str, str], distributed: Any) -> None:
    """With the same micro-batches the gradients of PP 2 with two chunks per stage are bitwise those of PP 2."""
    expected, found = (
        {(rank["coordinates"][0], name): grad for rank in distributed(job) for name, grad in rank["gradients"].items()}
        for job in jobs
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


@pytest.mark.parametrize("name", list(ALL))
def test_the_update_is_close_to_that_of_one_rank(name: str, distributed: Any, alone: Any) -> None:
    """After one Adam step (which moves every element by about the learning rate, in the direction of its gradient's
    sign) no weight is further than two steps plus BF16 rounding from one rank's, the steps' directions agree, and
    log-probs moved the same way."""
    model, job = ALL[name]
    ranks, expected = distributed(name), alone(model, job.fp8)
    moved, cosines = 0, []
    for tensor_name, tensor in expected["updated"].items():
        before, ours = expected["bf16"][tensor_name].float(), ranks[0]["updated"][tensor_name].float()
        limit = 2 * LEARNING_RATE + 2.0**-7 * before.abs().max()
        assert float((ours - tensor.float()).abs().max()) <= limit, tensor_name
        step, reference = (ours - before).flatten(), (tensor.float() - before).flatten()
        moved += int(step.any())
        if reference.norm() > 0 and tensor.ndim == 2:
            cosines.append(float(torch.cosine_similarity(step, reference, 0)))
    assert moved > len(expected["updated"]) / 2
    assert min(cosines) > 0.9, cosines
    change = logprobs_of(ranks, job, "logprobs_updated") - logprobs_of(ranks, job)
    expected_change = torch.cat(expected["logprobs_updated"]) - torch.cat(expected["logprobs"])
    assert torch.cosine_similarity(change, expected_change, 0) > 0.97


def test_free_order_of_the_row_parallel_sum_differs(distributed: Any, alone: Any) -> None:
    """Negative control: with tp_invariant=False at TP 2 the log-probs are close to those of one rank, but other
    bits."""
    ours, expected = logprobs_of(distributed("tp2_free"), ALL["tp2_free"][1]), torch.cat(alone("cut", True)["logprobs"])
    assert not torch.equal(ours, expected)
    assert float((ours - expected).abs().mean()) < 0.1
