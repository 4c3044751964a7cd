"""Training-rollout mismatch: how far the trainer's log-probs are from those the engine reported.

Shapes: T = packed tokens. d = logp_train - logp_rollout, in fp64: the difference of two fp32 numbers, exactly 0 only if
they are equal. Gate on the maximum, a mean hides the tail. NaN or infinity on either side is a mismatch, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


class MismatchError(RuntimeError):
    """Training and rollout log-probs differ where they must be equal."""


def _worst(a: float, b: float) -> float:
    """Maximum in which NaN wins (Python's max drops it, depending on the order)."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass
class MismatchStats:
    """Sums and maxima over micro-batches; plain numbers, so that ranks can gather `state()` as objects.

    Sum fields add, `max_*` fields take the maximum with NaN winning. Use `metrics()` for the means.
    """

    num_tokens: int = 0
    num_nonzero: int = 0
    num_nonfinite: int = 0
    num_sequences: int = 0
    sum_abs_dlogp: float = 0.0
    sum_k1: float = 0.0
    sum_k3: float = 0.0
    sum_mult: float = 0.0
    sum_seq_ratio: float = 0.0
    sum_seq_ratio_squares: float = 0.0
    max_abs_dlogp: float = 0.0
    max_abs_dprob: float = 0.0
    max_abs_seq_dlogp: float = 0.0

    def update(
        self,
        logp_train_T: Tensor,
        logp_rollout_T: Tensor,
        mask_T: Tensor | None = None,
        seq_ids_T: Tensor | None = None,
    ) -> None:
        """Adds the masked tokens of one micro-batch.

        logp_*: fp32 (or fp64). mask_T: 1 on response tokens; None: all. seq_ids_T: int, any ids; a sequence must lie
        in one call; None: all tokens are one sequence. Raises ValueError for unequal shapes or a lower precision.
        """
        for name, tensor in (("logp_train_T", logp_train_T), ("logp_rollout_T", logp_rollout_T)):
            if tensor.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name}: {tensor.dtype}; rule: log-probs are compared in fp32; fix: no rounding")
        if logp_train_T.shape != logp_rollout_T.shape:
            raise ValueError(
                f"logp_rollout_T: shape {tuple(logp_rollout_T.shape)}; rule: one log-prob per trained token, shape "
                f"{tuple(logp_train_T.shape)}"
            )
        live_T = torch.ones_like(logp_train_T, dtype=torch.bool) if mask_T is None else mask_T.bool()
        train, rollout = logp_train_T.detach()[live_T].double(), logp_rollout_T.detach()[live_T].double()
        if not train.numel():
            return
        ids = torch.zeros_like(train, dtype=torch.int64) if seq_ids_T is None else seq_ids_T[live_T].to(train.device)
        self.merge(_measure(train, rollout, ids))

    def merge(self, other: MismatchStats) -> None:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            combined = _worst(mine, theirs) if field.name.startswith("max_") else mine + theirs
            setattr(self, field.name, combined)

    def state(self) -> dict[str, float]:
        """Plain numbers; `from_states` of all ranks' states gives the global statistics."""
        return asdict(self)

    @classmethod
    def from_states(cls, states: Iterable[Mapping[str, float]]) -> MismatchStats:
        total = cls()
        for state in states:
            total.merge(cls(**state))  # type: ignore[arg-type]
        return total

    def metrics(self) -> dict[str, float]:
        """Per-token means and maxima (nats). Keys:

        max_abs_dlogp, mean_abs_dlogp, max_abs_dprob; kl_k1, kl_k3: estimators of KL(rollout || train);
        token_mult_prob_error: mean exp|d| (a bug above 1.05); max_abs_seq_dlogp: largest |sum of d| of a sequence;
        seq_ess: effective share of sequences under weights exp(sum of d); num_tokens, num_nonzero, num_nonfinite.
        Means of no tokens are 0 (1 for the two ratios), with num_tokens 0 beside them.
        """
        tokens = max(self.num_tokens, 1)
        squares = self.num_sequences * self.sum_seq_ratio_squares
        return {
            "max_abs_dlogp": self.max_abs_dlogp,
            "mean_abs_dlogp": self.sum_abs_dlogp / tokens,
            "max_abs_dprob": self.max_abs_dprob,
            "kl_k1": self.sum_k1 / tokens,
            "kl_k3": self.sum_k3 / tokens,
            "token_mult_prob_error": self.sum_mult / tokens if self.num_tokens else 1.0,
            "max_abs_seq_dlogp": self.max_abs_seq_dlogp,
            "seq_ess": self.sum_seq_ratio**2 / squares if self.num_sequences else 1.0,
            "num_tokens": self.num_tokens,
            "num_nonzero": self.num_nonzero,
            "num_nonfinite": self.num_nonfinite,
        }


def _measure(train: Tensor, rollout: Tensor, seq_ids: Tensor) -> MismatchStats:
    """Statistics of fp64 log-probs. A non-finite log-prob makes every difference of its token NaN (also -inf on both
    sides, and +inf, which `clamp` would hide)."""
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    d = torch.where(finite, train - rollout, math.nan)
    clamped = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    unique_ids, positions = torch.unique(seq_ids, return_inverse=True)
    seq_d = torch.zeros(len(unique_ids), dtype=torch.float64, device=d.device).index_add_(0, positions, d)
    seq_ratio = seq_d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    dprob = torch.where(finite, train.exp() - rollout.exp(), math.nan)
    return MismatchStats(
        num_tokens=d.numel(),
        num_nonzero=int((d != 0).sum()),
        num_nonfinite=int((~finite).sum()),
        num_sequences=len(unique_ids),
        sum_abs_dlogp=float(d.abs().sum()),
        sum_k1=float(-d.sum()),
        sum_k3=float((torch.expm1(clamped) - clamped).sum()),
        sum_mult=float(clamped.abs().exp().sum()),
        sum_seq_ratio=float(seq_ratio.sum()),
        sum_seq_ratio_squares=float(seq_ratio.square().sum()),
        max_abs_dlogp=float(d.abs().amax()),
        max_abs_dprob=float(dprob.abs().amax()),
        max_abs_seq_dlogp=float(seq_d.abs().amax()),
    )


def require_exact(stats: MismatchStats) -> None:
    """Raises MismatchError unless tokens were compared and every one was equal (max |dlogp| == 0.0)."""
    if not stats.num_tokens:
        raise MismatchError("no token was compared; an exact run must compare every response token")
    if stats.max_abs_dlogp == 0.0 and stats.num_nonzero == 0:
        return
    raise MismatchError(
        f"max |logp_train - logp_rollout| = {stats.max_abs_dlogp:.9g}, must be 0.0: {stats.num_nonzero} of "
        f"{stats.num_tokens} tokens differ, {stats.num_nonfinite} of them not finite "
        "(mismatch.require_exact; see `jetrl check` for the operator that differs)"
    )
