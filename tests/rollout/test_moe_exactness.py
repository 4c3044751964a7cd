"""Mixture of experts: real SGLang and real Megatron-Core agree exactly, in log-probs and in the experts they chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.megatron.moe import record_routes
from jetrl_megatron.megatron.step import compute_logprobs, pack
from jetrl_megatron.ops import operators
from jetrl_megatron.ops.kernels import kernels
from jetrl_megatron.ops.precision_flow import describe
from jetrl_megatron.rollout.engine import Completion
from jetrl_megatron.trainer.precision_flow import judge
from tests.support.engines import (
    engine,
    engine_logprobs,
    prompts,
    publish,
    requests,
    rollout_flow,
    trainer_logprobs,
    training_flow,
)
from tests.support.models import tiny_model
from tests.support.trainer import load_policy

pytestmark = pytest.mark.slow
TEMPERATURE = 0.8
Rollout = tuple[list[tuple[int, ...]], list[Completion]]
Scores = list[tuple[tuple[int, ...], list[float]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3_moe", seed=2)


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Any:
    return load_policy(model_dir, fp8=True)


@pytest.fixture(scope="module")
def answers(model_dir: Path, policy: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rollout, Scores]:
    """Prompts and one engine's completions with their routes: chunked prefill, prefix hits, changing batches; and its
    prefill log-probs of other sequences."""
    folder = tmp_path_factory.mktemp("rollout")
    ids = prompts(policy.dims.vocab_size, count=32, longest=150)
    scored = prompts(policy.dims.vocab_size, count=6, longest=200, seed=3)
    with engine(model_dir, folder / "engine", record_routes=True) as pool:
        pool.load_weights(publish(policy, folder, version=0))
        completions = pool.generate(requests(ids, TEMPERATURE))
        return (ids, completions), list(zip(scored, pool.score(scored), strict=True))


@pytest.fixture(scope="module")
def rollout(answers: tuple[Rollout, Scores]) -> Rollout:
    return answers[0]


def difference(policy: Any, rollout: Rollout) -> Tensor:
    ids, completions = rollout
    return trainer_logprobs(policy, ids, completions, TEMPERATURE) - engine_logprobs(completions)


def test_generation_equals_training(policy: Any, rollout: Rollout) -> None:
    """More than a thousand log-probs of the engine are the training forward's, to the last bit."""
    gap = difference(policy, rollout)
    assert len(gap) > 1000
    assert float(gap.abs().max()) == 0.0


def test_prefill_scores_equal_training(policy: Any, answers: tuple[Rollout, Scores]) -> None:
    """Prefill log-probs of whole sequences are the training forward's."""
    batches = [pack([(ids, 1)], 1.0, pad_multiple=1) for ids, _ in answers[1]]
    for (_, scores), logprobs in zip(answers[1], compute_logprobs(policy, batches), strict=True):
        assert torch.equal(torch.tensor(scores, dtype=torch.float32), logprobs)


def test_routed_experts_are_equal(policy: Any, rollout: Rollout) -> None:
    """Both sides chose the same experts in the same slots for every token of every layer, prompts included."""
    ids, completions = rollout
    with record_routes(policy.models) as routes:
        trainer_logprobs(policy, ids, completions, TEMPERATURE)
    layers = torch.stack([torch.cat(routes[layer]) for layer in sorted(routes)], dim=1)  # [T, layers, k]
    compared, first = 0, 0
    for prompt, completion in zip(ids, completions, strict=True):
        length = len(prompt) + len(completion.token_ids)
        theirs = torch.from_numpy(completion.routed_experts.copy()).long()
        assert torch.equal(layers[first : first + length - 1], theirs)  # the last token was never run
        compared, first = compared + length - 1, first + length
    assert first == len(layers)
    assert compared > 2000
    assert len(layers.unique()) == 8


def reversed_order(outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return operators.moe_combine(outputs, weights, -experts)


def sums_of_two_ranks(outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """What an all-reduce of bf16 partial sums over two expert-parallel ranks would give."""
    halves = [operators.moe_combine(outputs, weights * held, experts) for held in (experts < 4, experts >= 4)]
    return halves[0] + halves[1]


def rounded_weights(outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return operators.moe_combine(outputs, weights.bfloat16().float(), experts)


@pytest.mark.parametrize("combine", [reversed_order, sums_of_two_ranks, rounded_weights])
def test_another_combine_is_seen(policy: Any, rollout: Rollout, monkeypatch: pytest.MonkeyPatch, combine: Any) -> None:
    """Negative control: training with another order of the sum, or with bf16 weights, is not exact any more."""
    monkeypatch.setattr("jetrl_megatron.ops.moe_combine", combine)
    assert float(difference(policy, rollout).abs().max()) > 0


def test_another_router_is_seen(policy: Any, rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: softmax over all experts, divided by the sum of the chosen, is the same function with other
    roundings."""

    def divided(logits: Tensor, experts: Tensor, _renormalize: bool) -> Tensor:
        chosen = torch.softmax(logits, -1).gather(1, experts)
        return chosen / chosen.sum(-1, keepdim=True)

    monkeypatch.setattr(kernels(), "expert_weights", divided)
    assert float(difference(policy, rollout).abs().max()) > 0


@pytest.mark.multi
@pytest.mark.parametrize(("precision", "expert_parallel"), [("fp8", 1), ("fp8", 2), ("bf16", 1), ("bf16", 2)], ids=str)
def test_two_engine_ranks_are_exact(model_dir: Path, tmp_path: Path, precision: str, expert_parallel: int) -> None:
    """Engines on two ranks, every expert cut in two or the experts shared out, against training on one rank: equal
    log-probs, after an update as well (A, then B, which changes the outputs), and equal precision flows."""
    fp8 = precision == "fp8"
    policy = load_policy(model_dir, fp8)
    ids = prompts(policy.dims.vocab_size, count=12, longest=100)
    spec = {"tensor_parallel": 2, "expert_parallel": expert_parallel}
    with engine(model_dir, tmp_path / "engine", precision, **spec) as pool:
        pool.load_weights(publish(policy, tmp_path, version=0, fp8=fp8))
        first = pool.generate(requests(ids, TEMPERATURE))
        assert float(difference(policy, (ids, first)).abs().max()) == 0.0
        assert describe(judge(training_flow(policy), rollout_flow(pool))) == []
        scale_experts(policy)
        pool.load_weights(publish(policy, tmp_path, version=1, fp8=fp8))
        second = pool.generate(requests(ids, TEMPERATURE))
    gap = difference(policy, (ids, second))
    assert len(gap) > 300
    assert float(gap.abs().max()) == 0.0
    assert changed(first, second)


def test_sync_a_b_a_restores(model_dir: Path, tmp_path: Path) -> None:
    """Every sync ends with equal digests of per-expert tensors; B changes the outputs and stays exact, A again restores
    them bit for bit. BF16 experts."""
    policy = load_policy(model_dir, fp8=False)
    ids = prompts(policy.dims.vocab_size, count=6, longest=60, seed=7)
    with engine(model_dir, tmp_path / "engine", "bf16") as pool:
        a = publish(policy, tmp_path, version=1, fp8=False)
        pool.load_weights(a)
        before = pool.generate(requests(ids, TEMPERATURE))
        assert float(difference(policy, (ids, before)).abs().max()) == 0.0
        scale_experts(policy)
        pool.load_weights(publish(policy, tmp_path, version=2, fp8=False))
        during = pool.generate(requests(ids, TEMPERATURE))
        assert float(difference(policy, (ids, during)).abs().max()) == 0.0
        pool.load_weights(a)
        after = pool.generate(requests(ids, TEMPERATURE))
    assert changed(before, during)
    assert not changed(before, after)


def scale_experts(policy: Any) -> None:
    """A stand-in for an update: only experts and routers change."""
    with torch.no_grad():
        for name, parameter in policy.models[0].named_parameters():
            if ".mlp." in name:
                parameter.mul_(1.0625)
    policy.weights_changed(policy.precision.version.value + 1)


def changed(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    return [c.logprobs for c in first] != [c.logprobs for c in second]
