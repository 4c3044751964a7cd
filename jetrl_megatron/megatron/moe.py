"""Mixture of experts: Megatron-Core's MoELayer and dispatcher with our router, experts and combine.

Megatron multiplies the router's weights into the activation before fc2, which changes its FP8 codes, and sums expert
outputs by scatter-add. Here experts return unweighted bf16 rows and each token's k rows are combined in ascending
expert id, so the result depends neither on expert parallelism nor on the other tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.megatron.linear import LinearPrecision, grouped_linear


class ExactRouter(TopKRouter):
    """fp32 logits from the bf16 weight, ties to the lower expert id. `configure` must be called once. No auxiliary
    loss, no token dropping."""

    recorded: list[Tensor] | None = None  # expert ids [T, k] per forward, while they are recorded

    def configure(self, precision: LinearPrecision, renormalize: bool) -> None:
        self._version, self._renormalize = precision.version, renormalize
        self._cached: tuple[int, ops.ExactWeight] | None = None

    def gating(self, input: Tensor) -> Tensor:
        if self._cached is None or self._cached[0] != self._version.value:
            self._cached = (self._version.value, ops.ExactWeight.of(self.weight))
        return ops.router(input, self.weight, self._cached[1])

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, E] -> weights [T, E], 0 where not chosen, and the map of the chosen [T, E] bool."""
        logits = logits.view(-1, logits.shape[-1])
        experts, weights = ops.route(logits, self.topk, self._renormalize)
        if self.recorded is not None:
            self.recorded.append(experts)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits).scatter(1, experts, weights), chosen


class SequentialExperts(SequentialMLP):
    """One expert after the other; rows sorted by expert [R, H] -> unweighted outputs [R, H]."""

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, _permuted_weights: Tensor) -> tuple[Tensor, None]:
        parts = rows.split(tokens_per_expert.tolist())
        return torch.cat([expert(part)[0] for expert, part in zip(self.local_experts, parts, strict=True)]), None


class GroupedExperts(SequentialExperts):
    """The same parameters and bits with one grouped GEMM for all fc1 and one for all fc2."""

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, _permuted_weights: Tensor) -> tuple[Tensor, None]:
        num_rows = tokens_per_expert.tolist()
        gate_up = grouped_linear(rows, num_rows, [expert.linear_fc1 for expert in self.local_experts])
        hidden = ops.swiglu(gate_up, self.local_experts[0].activation_func.fmt)
        return grouped_linear(hidden, num_rows, [expert.linear_fc2 for expert in self.local_experts]), None


class FixedOrderMoELayer(MoELayer):
    """Combines with the router's weights after the experts' rows came back to their tokens."""

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """output [T * k, H]: rows expert-major over all experts, tokens ascending in each."""
        assert shared_expert_output is None
        dispatcher = self.token_dispatcher
        chosen = dispatcher.routing_map
        num_tokens, top_k = chosen.shape[0], dispatcher.config.moe_router_topk
        experts = chosen.nonzero()[:, 1].view(num_tokens, top_k)
        row_of = torch.empty(chosen.shape[1], num_tokens, dtype=torch.int64, device=chosen.device)
        row_of[chosen.t()] = torch.arange(num_tokens * top_k, device=chosen.device)
        rows = output[row_of.t().gather(1, experts)]
        return ops.moe_combine(rows, dispatcher.probs.gather(1, experts), experts).view(dispatcher.hidden_shape)


@contextlib.contextmanager
def record_routes(models: Sequence[nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """Layer number (1 is the first) -> expert ids [T, k] of every forward inside the block, T this rank's tokens of a
    micro-batch with its padding, slots as the router chose them."""
    routers: list[Any] = [m for model in models for m in model.modules() if isinstance(m, ExactRouter)]
    recorded: dict[int, list[Tensor]] = {}
    for router in routers:
        router.recorded = recorded[int(router.layer_number)] = []
    try:
        yield recorded
    finally:
        for router in routers:
            router.recorded = None
