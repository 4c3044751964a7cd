"""The policy loss against hand-computed numbers and an independent fp64 implementation in plain Python."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_megatron.config.schema import AlgorithmConfig, MismatchConfig
from jetrl_megatron.rl.correction import WeightStats, correction_weights
from jetrl_megatron.rl.losses import BatchNorm, LossOutput, kl_estimate, policy_loss

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
ESTIMATORS = ["k1", "k2", "k3"]


def one_sequence(logp: list[float], old: list[float], advantages: list[float], **overrides: Any) -> LossOutput:
    n = len(logp)
    defaults: dict[str, Any] = {"weights_T": None, "ref_logp_T": None, "cfg": AlgorithmConfig()}
    return policy_loss(
        torch.tensor(logp, requires_grad=True),
        torch.tensor(old),
        torch.tensor(advantages),
        torch.ones(n),
        torch.zeros(n, dtype=torch.int64),
        norm=BatchNorm(n, 1, (n,)),
        **{**defaults, **overrides},
    )


def test_clip_by_hand() -> None:
    """Ratios 2, 2, .5, .5 with A = 1, -1, 1, -1 and clip .2: losses -1.2, 2, -.5, .8; two clips are active."""
    old = [-1.0] * 4
    logp = [-1 + math.log(2), -1 + math.log(2), -1 - math.log(2), -1 - math.log(2)]
    out = one_sequence(logp, old, [1.0, -1.0, 1.0, -1.0])
    assert out.loss.item() == pytest.approx((-1.2 + 2.0 - 0.5 + 0.8) / 4, rel=1e-6)
    assert out.clip_fraction.item() == 0.5
    assert out.ratio_max.item() == pytest.approx(2.0, rel=1e-6)


def test_asymmetric_clip_by_hand() -> None:
    """clip-higher: ratio 1.25 is inside [1 - .2, 1 + .28], so its gradient is alive: -A r."""
    logp = torch.tensor([math.log(1.25)], requires_grad=True)
    cfg = AlgorithmConfig(clip_low=0.2, clip_high=0.28)
    one = torch.ones(1)
    out = policy_loss(logp, torch.zeros(1), one, one, torch.zeros(1, dtype=torch.int64), None, None, cfg,
                      BatchNorm(1, 1, (1,)))  # fmt: skip
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(-1.25, rel=1e-6)


def test_on_policy_gradient_is_policy_gradient() -> None:
    """At ratio exactly 1 the gradient is -A/n per token and nothing is clipped, also with clip 0."""
    for cfg in (AlgorithmConfig(), AlgorithmConfig(clip_low=0.0, clip_high=0.0)):
        logp = torch.tensor([-0.3, -2.0], requires_grad=True)
        out = policy_loss(logp, logp.detach(), torch.tensor([2.0, -4.0]), torch.ones(2),
                          torch.zeros(2, dtype=torch.int64), None, None, cfg, BatchNorm(2, 1, (2,)))  # fmt: skip
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        assert logp.grad.tolist() == [-1.0, 2.0]
        assert out.clip_fraction.item() == 0.0
        assert out.approx_kl.item() == 0.0


def test_token_mean_counts_dead_groups() -> None:
    """Tokens of groups with equal rewards (A = 0) stay in the denominator: 1 live token of 4 gives -1/4."""
    assert one_sequence([-1.0] * 4, [-1.0] * 4, [1.0, 0.0, 0.0, 0.0]).loss.item() == -0.25


def test_kl_by_hand() -> None:
    """logp -1, ref -2: k1 = 1, k2 = 1/2, k3 = e^-1 - 1 + 1."""
    logp, ref = torch.tensor([-1.0]), torch.tensor([-2.0])
    got = [kl_estimate(logp, ref, name).item() for name in ESTIMATORS]
    assert got == pytest.approx([1.0, 0.5, math.exp(-1)], rel=1e-6)


def test_k3_is_never_negative() -> None:
    """k3 >= 0 for any pair, also for differences near the resolution of fp32 and beyond the clamp."""
    logp = -torch.logspace(-7, 2, 500)
    ref = logp + torch.randn(500, generator=torch.Generator().manual_seed(0)) * torch.logspace(-7, 2, 500)
    assert (kl_estimate(logp, ref, "k3") >= 0).all()


def random_batch(seed: int) -> dict[str, Tensor]:
    """Sequences of 0, 1, 5, 17 and 30 response tokens with two masked tokens around each, ratios around the clip."""
    g = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 0, 30, 17]
    mask = torch.cat([torch.tensor([0] + [1] * n + [0]) for n in lengths])
    seq_ids = torch.cat([torch.full((n + 2,), i) for i, n in enumerate(lengths)])
    size = len(mask)
    logp = -torch.rand(size, generator=g) * 3 - 0.05
    return {
        "logp_T": logp,
        "logp_old_T": logp + 0.2 * torch.randn(size, generator=g),
        "advantages_T": torch.randn(5, generator=g)[seq_ids],
        "mask_T": mask,
        "seq_ids_T": seq_ids,
        "weights_T": torch.rand(size, generator=g) * 2,
        "ref_logp_T": logp + 0.3 * torch.randn(size, generator=g),
    }


NORM = BatchNorm(num_tokens=53, num_sequences=5, sequence_tokens=(5, 1, 0, 30, 17))


def oracle(batch: dict[str, Tensor], cfg: AlgorithmConfig) -> tuple[float, list[float]]:
    """Loss and gradient in Python floats, token by token, the gradient by its own formula."""
    columns = {name: tensor.tolist() for name, tensor in batch.items()}
    total, gradient = 0.0, []
    for t, live in enumerate(columns["mask_T"]):
        if not live:
            gradient.append(0.0)
            continue
        length = NORM.sequence_tokens[columns["seq_ids_T"][t]]
        coefficient = {"token_mean": 1 / 53, "seq_mean_token_mean": 1 / (5 * length), "seq_mean_token_sum": 1 / 5}
        c = coefficient[cfg.aggregation]
        advantage, weight = columns["advantages_T"][t], columns["weights_T"][t]
        ratio = math.exp(columns["logp_T"][t] - columns["logp_old_T"][t])
        bounded = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        is_clipped = -advantage * bounded > -advantage * ratio
        x = columns["ref_logp_T"][t] - columns["logp_T"][t]
        kl, kl_grad = {
            "k1": (-x, 1.0), "k2": (x * x / 2, -x), "k3": (math.exp(x) - 1 - x, 1 - math.exp(x)),
        }[cfg.kl_estimator]  # fmt: skip
        total += c * (weight * max(-advantage * ratio, -advantage * bounded) + cfg.kl_coef * kl)
        gradient.append(c * (weight * (0.0 if is_clipped else -advantage * ratio) + cfg.kl_coef * kl_grad))
    return total, gradient


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_fp64(aggregation: Any, estimator: Any) -> None:
    """Value and gradient agree with fp64 within 2e-6 relative to the largest term (fp32 arithmetic)."""
    cfg = AlgorithmConfig(aggregation=aggregation, kl_estimator=estimator, kl_coef=0.1, clip_high=0.28)
    batch = random_batch(1)
    expected, expected_grad = oracle(batch, cfg)
    batch["logp_T"].requires_grad_()
    out = policy_loss(**batch, cfg=cfg, norm=NORM)
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert out.loss.item() == pytest.approx(expected, abs=2e-6)
    assert batch["logp_T"].grad is not None
    assert batch["logp_T"].grad.tolist() == pytest.approx(expected_grad, abs=2e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_micro_batches_do_not_matter(aggregation: Any, num_parts: int) -> None:
    """Any split, even through sequences, gives bitwise the same gradient per token; values agree within 1e-6, the
    reordering of an fp32 sum of 53 terms (field bug 37)."""
    cfg = AlgorithmConfig(aggregation=aggregation, kl_coef=0.05)
    whole = random_batch(2)
    whole["logp_T"].requires_grad_()
    out = policy_loss(**whole, cfg=cfg, norm=NORM)
    out.loss.backward()  # type: ignore[no-untyped-call]
    order = list(range(len(whole["mask_T"])))
    random.Random(num_parts).shuffle(order)
    grad, parts = torch.zeros(len(order)), []
    for k in range(num_parts):
        chosen = torch.tensor(order[k::num_parts])
        micro = {name: tensor.detach()[chosen] for name, tensor in whole.items()}
        micro["logp_T"].requires_grad_()
        part = policy_loss(**micro, cfg=cfg, norm=NORM)
        part.loss.backward()  # type: ignore[no-untyped-call]
        assert micro["logp_T"].grad is not None
        grad[chosen] = micro["logp_T"].grad
        parts.append(part)
    assert torch.equal(grad, whole["logp_T"].grad)  # type: ignore[arg-type]
    for name in ("loss", "policy", "kl", "clip_fraction", "approx_kl"):
        assert sum(getattr(p, name).item() for p in parts) == pytest.approx(getattr(out, name).item(), abs=1e-6)
    assert max(p.ratio_max.item() for p in parts) == out.ratio_max.item()


def test_masked_tokens_are_never_read() -> None:
    """NaN in every column at masked positions changes neither value nor gradient."""
    cfg = AlgorithmConfig(kl_coef=0.1)
    clean, dirty = random_batch(3), random_batch(3)
    for name in ("logp_T", "logp_old_T", "advantages_T", "weights_T", "ref_logp_T"):
        dirty[name][dirty["mask_T"] == 0] = math.nan
    grads, values = [], []
    for batch in (clean, dirty):
        batch["logp_T"].requires_grad_()
        out = policy_loss(**batch, cfg=cfg, norm=NORM)
        out.loss.backward()  # type: ignore[no-untyped-call]
        grads.append(batch["logp_T"].grad)
        values.append(out.loss.item())
    assert values[0] == values[1]
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])


def test_extreme_ratios_stay_finite() -> None:
    """A log-ratio of 200 with either sign of A gives a finite loss and gradient."""
    for advantage in (1.0, -1.0):
        logp = torch.tensor([0.0, -200.0], requires_grad=True)
        out = policy_loss(logp, torch.tensor([-200.0, 0.0]), torch.full((2,), advantage), torch.ones(2),
                          torch.zeros(2, dtype=torch.int64), None, None, AlgorithmConfig(),
                          BatchNorm(2, 1, (2,)))  # fmt: skip
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert math.isfinite(out.loss.item())
        assert logp.grad is not None
        assert torch.isfinite(logp.grad).all()


def test_empty_micro_batch() -> None:
    """A rank without tokens contributes 0 and can run backward."""
    empty = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    out = policy_loss(empty, none, none, none, torch.zeros(0, dtype=torch.int64), None, None, AlgorithmConfig(), NORM)
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert out.loss.item() == 0.0
    assert out.ratio_max.item() == 0.0


def test_nothing_is_broadcast() -> None:
    """Per-sequence weights against per-token log-probs are refused (field bug 33); so is KL without a reference."""
    with pytest.raises(ValueError, match=r"weights_T: shape \(1,\)"):
        one_sequence([-1.0] * 3, [-1.0] * 3, [1.0] * 3, weights_T=torch.ones(1))
    with pytest.raises(ValueError, match="kl_coef"):
        one_sequence([-1.0], [-1.0], [1.0], cfg=AlgorithmConfig(kl_coef=0.1))


def test_tis_weights_by_hand() -> None:
    """Log-ratios .1, -1.5, .8, -10, .3 with C = 2 (field bug 32): e^x, the third truncated to 2; +-20 is the clamp."""
    log_ratios = [0.1, -1.5, 0.8, -10.0, 0.3, -500.0]
    old = torch.tensor(log_ratios, requires_grad=True)
    cfg = MismatchConfig(correction="tis", tis_clip=2.0)
    weights = correction_weights(old, torch.zeros(6), cfg)
    assert weights is not None
    assert not weights.requires_grad
    expected = [math.exp(0.1), math.exp(-1.5), 2.0, math.exp(-10), math.exp(0.3), math.exp(-20)]
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert correction_weights(old, torch.zeros(6), MismatchConfig()) is None


def test_weight_statistics_merge() -> None:
    """Ratios 1, 2, 4 in two parts: mean 7/3, population std sqrt(14/9), ESS 49/63, one above C = 3; masked out: 100."""
    cfg = MismatchConfig(tis_clip=3.0)
    a, b = WeightStats(), WeightStats()
    a.update(torch.tensor([1.0, 2.0, 100.0]).log(), torch.zeros(3), torch.tensor([1, 1, 0]), cfg)
    b.update(torch.tensor([4.0]).log(), torch.zeros(1), None, cfg)
    a.merge(b)
    expected = {"mean": 7 / 3, "std": math.sqrt(14 / 9), "min": 1, "max": 4, "ess": 49 / 63, "clip_fraction": 1 / 3}
    assert a.metrics() == pytest.approx(expected, rel=1e-6)


def test_correction_multiplies_the_surrogate_only() -> None:
    """With weights 0 the policy term vanishes and the KL term stays."""
    cfg = AlgorithmConfig(kl_coef=0.5, kl_estimator="k1")
    out = one_sequence([-1.0], [-1.0], [3.0], cfg=cfg, weights_T=torch.zeros(1), ref_logp_T=torch.tensor([-3.0]))
    assert out.policy.item() == 0.0
    assert out.kl.item() == 2.0
    assert out.loss.item() == 1.0
