"""Where a rank's tensors are: the whole training step with its parameters on a device that holds CPU values.

Everything that a forward, a backward or a weight export makes must be where the parameters are; log-probs come back to
the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe
from jetrl_megatron.megatron.gather import export_bf16, export_fp8
from jetrl_megatron.megatron.linear import LinearPrecision
from jetrl_megatron.megatron.step import compute_logprobs, forward_backward
from jetrl_megatron.weights.bundle import write_bundle
from tests.support.models import FAMILIES, assert_same_bits
from tests.support.oracles import rel_error
from tests.support.policies import calm_model, load_policy, micro_batches, sequences, weighted_loss
from tests.support.pretend_device import DEVICE, Pretended, pretending
from tests.support.trainer import one_rank


def to_device(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            moved: Any = nn.Parameter(Pretended(parameter.detach().clone()))
            moved.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != "held"})
            module._parameters[name] = moved


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fp8", [True, False])
def test_a_step_stays_where_the_parameters_are(
    single_process: None, reference_forms: None, tmp_path: Path, family: str, fp8: bool
) -> None:
    """Log-probs and exported weights with the CPU's bits; gradients near the CPU's: stock operators choose their kernel
    by the device."""
    path = calm_model(tmp_path / "model", family, 3, num_hidden_layers=1)

    def run(move: Callable[[nn.Module], None]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        policy = load_policy(path, one_rank(), ParallelConfig(), LinearPrecision(fp8, Fp8Recipe()))
        for model in policy.models:
            move(model)
        seqs = sequences(policy.dims.vocab_size)[:3]
        batches = micro_batches(seqs, 1, 1.0, 4, False)
        logprobs = compute_logprobs(policy, batches)
        forward_backward(policy.models, policy, batches, weighted_loss(10))
        grads = [p.grad for model in policy.models for p in model.parameters() if p.grad is not None]
        exported = [t for _, t in (export_fp8(policy) if fp8 else export_bf16(policy))]
        bundle = write_bundle(tmp_path / "bundle", 1, (export_fp8 if fp8 else export_bf16)(policy), 1 << 20)
        digests.append(bundle.digest)
        return logprobs, grads, exported

    digests: list[str] = []
    expected = run(lambda _model: None)
    with pretending():
        found = run(to_device)
    assert not any(isinstance(t, Pretended) for t in found[0])
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    for there, here in zip(found[1:], expected[1:], strict=True):
        assert len(there) == len(here) >= 9
        assert all(isinstance(t, Pretended) and t.device == DEVICE for t in there)
    for there, here in zip(found[1], expected[1], strict=True):
        assert rel_error(there.held.float(), here.float()) < 2e-2
    for there, here in zip(found[2], expected[2], strict=True):
        assert_same_bits(there.held, here, "exported")
    assert digests[0] == digests[1]
