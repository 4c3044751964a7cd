"""Where the engine's sampler puts its tensors: on the device of the model, with the CPU's bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.rollout.sampler import sample_tokens
from tests.support.pretend_device import DEVICE, Pretended, pretending

pytestmark = pytest.mark.usefixtures("reference_forms")


def values(x: Tensor) -> Tensor:
    assert isinstance(x, Pretended)
    return x.held


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampler(top_p: float) -> None:
    """Draws and their log-probs, with and without a cut."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))

    def run(to: Any) -> tuple[Tensor, Tensor]:
        output = SimpleNamespace(next_token_logits=to(logits), next_token_logprobs=None)
        info = SimpleNamespace(
            need_min_p_sampling=False,
            temperatures=to(torch.full((5, 1), 0.7)),
            is_all_greedy=False,
            sampling_seed=to(torch.arange(5)),
            top_ps=to(torch.full((5,), top_p)),
            top_ks=to(torch.full((5,), 1 << 30)),
        )
        ids = sample_tokens(None, output, info, True, [], [], to(torch.arange(5)))
        return ids, output.next_token_logprobs

    expected = run(lambda t: t)
    with pretending():
        found = run(lambda t: t.to(DEVICE))
    assert all(torch.equal(values(a), b) for a, b in zip(found, expected, strict=True))
