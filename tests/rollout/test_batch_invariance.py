"""What surrounds a request in the engine changes nothing: batch, chunk size, prefix cache, retraction, length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.rollout.engine import Completion, Request, Sampling
from jetrl_megatron.rollout.sglang_engine import EnginePool
from tests.support.engines import engine, engine_logprobs, prompts, publish, requests, trainer_logprobs
from tests.support.models import tiny_model
from tests.support.trainer import load_policy

pytestmark = pytest.mark.slow
NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3", max_position_embeddings=4096, eos_token_id=None)


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Any:
    return load_policy(model_dir, fp8=True)


@pytest.fixture(scope="module")
def engines(
    model_dir: Path, policy: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EnginePool, EnginePool]]:
    """One with room for everything, and one whose cache is too small for its batch, with another chunk size."""
    folder = tmp_path_factory.mktemp("engines")
    bundle = publish(policy, folder, version=0)
    with (
        engine(model_dir, folder / "roomy") as roomy,
        engine(model_dir, folder / "tight", max_total_tokens=1400, chunked_prefill_tokens=256) as tight,
    ):
        for pool in (roomy, tight):
            pool.load_weights(bundle)
        yield roomy, tight


def results(completions: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids, c.logprobs) for c in completions]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9)])
def test_batch_chunks_prefixes_and_retractions(
    engines: tuple[EnginePool, EnginePool], policy: Any, temperature: float, top_p: float
) -> None:
    """The same tokens and log-probs alone, in a batch of 16, with other prefill chunks, from a warm prefix cache, and
    when the scheduler takes requests back because the cache is full; equal to training."""
    roomy, tight = engines
    ids = prompts(policy.dims.vocab_size, NUM_REQUESTS, longest=120, seed=21)
    asked = requests(ids, temperature, top_p, max_new_tokens=120)
    together = roomy.generate(asked)
    assert results(roomy.generate(asked)) == results(together)  # every prompt is cached now
    assert results([roomy.generate([request])[0] for request in asked[:3]]) == results(together[:3])
    retracted = tight.generate(asked)
    assert sum(c.num_retractions for c in retracted) > 0
    assert results(retracted) == results(together)
    difference = trainer_logprobs(policy, ids, retracted, temperature) - engine_logprobs(retracted)
    assert len(difference) > 1000
    assert float(difference.abs().max()) == 0.0


def test_long_prompts_and_long_responses(engines: tuple[EnginePool, EnginePool], policy: Any) -> None:
    """A prompt of 1,500 tokens, prefilled in 24 chunks of 64, and responses of 1,000 tokens."""
    (long_prompt,) = prompts(policy.dims.vocab_size, 1, longest=4000, seed=6)
    ids = [long_prompt[:1500], *prompts(policy.dims.vocab_size, 2, longest=30, seed=7)]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1000, stop_token_ids=())
    asked = [Request(prompt, sampling, seed=i) for i, prompt in enumerate(ids)]
    completions = engines[0].generate(asked)
    assert len(ids[0]) == 1500
    assert [len(c.token_ids) for c in completions] == [1000, 1000, 1000]
    difference = trainer_logprobs(policy, ids, completions, 1.0) - engine_logprobs(completions)
    assert float(difference.abs().max()) == 0.0
