"""Megatron's DDP, mixed-precision Adam and learning-rate schedule around a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from jetrl_megatron.config.schema import OptimizerConfig
from jetrl_megatron.megatron.model import Policy
from jetrl_megatron.megatron.step import LossFn, MicroBatch, forward_backward
from jetrl_megatron.weights.rules import Rule


@dataclass
class Trainable:
    """A policy with gradients, fp32 masters and a schedule."""

    policy: Policy
    ddp: list[DistributedDataParallel]  # one per chunk of the policy
    optimizer: Any
    scheduler: OptimizerParamScheduler

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> list[dict[str, float]]:
        """Gradients of the summed loss, reduced over data-parallel ranks; metrics of the loss on the last stage."""
        for chunk in self.ddp:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return forward_backward(self.ddp, self.policy, micro_batches, loss_fn)

    def apply(self) -> float:
        """One optimizer step with the accumulated gradients; returns their global norm before clipping.

        Raises FloatingPointError for a non-finite norm; the weights are then unchanged.
        """
        self.scheduler.step(increment=1)
        self._require_finite_gradients()
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded:
            raise FloatingPointError("the optimizer refused the step (non-finite gradients)")
        self.policy.weights_changed(self.policy.precision.version.value + 1)
        return float(grad_norm)

    def _require_finite_gradients(self) -> None:
        """Raises FloatingPointError on every rank if any rank holds a NaN or Inf gradient."""
        parameters: Iterator[tuple[Rule, Any, Any]] = self.policy.named_rules()
        bad = [rule.megatron_name for rule, p, _ in parameters if not bool(p.main_grad.isfinite().all())]
        everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, bad)
        names = sorted({name for names in everywhere for name in names})
        if names:
            raise FloatingPointError(f"non-finite gradient of {', '.join(names[:5])} ({len(names)} parameters)")

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def make_trainable(policy: Policy, cfg: OptimizerConfig, num_updates: int) -> Trainable:
    """Wrap `policy`, whose weights must already be loaded (the fp32 masters are copied from them)."""
    config = policy.config
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    ddp = [DistributedDataParallel(config, ddp_config, model) for model in policy.models]
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=cfg.lr,
            min_lr=cfg.min_lr,
            weight_decay=cfg.weight_decay,
            adam_beta1=cfg.beta1,
            adam_beta2=cfg.beta2,
            adam_eps=cfg.eps,
            clip_grad=cfg.clip_grad,
            bf16=True,
            params_dtype=config.params_dtype,
        ),
        ddp,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr if cfg.schedule != "constant" else cfg.lr,
        lr_warmup_steps=cfg.warmup_steps,
        lr_decay_steps=max(num_updates, cfg.warmup_steps + 1),
        lr_decay_style=cfg.schedule,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=max(num_updates, 1),
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = _finalize
    return Trainable(policy, ddp, optimizer, scheduler)


def _finalize(model: Any, _num_tokens: Any, **kwargs: Any) -> None:
    """Gradients are sums of an already normalised loss: reduce, never divide by the token count."""
    finalize_model_grads(model, None, **kwargs)
