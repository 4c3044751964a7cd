"""Forward-only and forward-backward passes over packed micro-batches through Megatron's pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from jetrl_megatron.megatron.model import LogprobRequest, Policy
from jetrl_megatron.megatron.modules import PackedSequences


@dataclass
class MicroBatch:
    """Packed sequences of one forward, on the host until then. T tokens incl. the padding tail, n response tokens.

    token_ids [T]; sequences: their offsets; request: the n rows and targets; loss_inputs: tensors [n] that the loss
    function reads.
    """

    token_ids: Tensor
    sequences: PackedSequences
    request: LogprobRequest
    loss_inputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        request = replace(self.request, rows=self.request.rows.to(device), targets=self.request.targets.to(device))
        inputs = {name: value.to(device) for name, value in self.loss_inputs.items()}
        return MicroBatch(self.token_ids.to(device), self.sequences.to(device), request, inputs)


LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, float]]]


def pack(
    sequences: Sequence[tuple[Sequence[int], int]], temperature: float, pad_multiple: int, pad_to: int = 0
) -> MicroBatch:
    """Pack (token ids, prompt length) pairs. The log-prob of response token j is read at row j - 1.

    pad_multiple: the packed length is a multiple of it (sequence parallelism); pad_to: or this length at least.
    """
    lengths = [len(ids) for ids, _ in sequences]
    total = sum(lengths)
    padded = max(-(-total // pad_multiple) * pad_multiple, pad_to)
    flat = [token for ids, _ in sequences for token in ids] + [0] * (padded - total)
    rows: list[int] = []
    targets: list[int] = []
    start = 0
    for ids, prompt_length in sequences:
        rows.extend(range(start + prompt_length - 1, start + len(ids) - 1))
        targets.extend(ids[prompt_length:])
        start += len(ids)
    request = LogprobRequest(torch.tensor(rows), torch.tensor(targets), temperature)
    return MicroBatch(torch.tensor(flat), PackedSequences.of(lengths, padded), request)


def compute_logprobs(policy: Policy, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """fp32 log-probs [n] per micro-batch on the host, on the last pipeline stage; an empty list on other stages."""
    results: list[Tensor] = []

    def collect(logprobs: Tensor, _batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        results.append(logprobs.detach().cpu())
        return logprobs.sum(), {}

    with torch.no_grad():
        _run(policy.models, policy, micro_batches, collect, forward_only=True)
    return results


def forward_backward(
    models: Sequence[nn.Module], policy: Policy, micro_batches: Sequence[MicroBatch], loss_fn: LossFn
) -> list[dict[str, float]]:
    """Accumulate gradients of the summed micro-batch losses. Returns the loss functions' metrics on the last stage.

    models: the policy's, as wrapped for gradients. loss_fn must already be normalised over the global batch: nothing is
    divided here, and sees a micro-batch on the model's device."""
    return _run(models, policy, micro_batches, loss_fn, forward_only=False)


def _run(
    models: Sequence[nn.Module],
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    forward_only: bool,
) -> list[dict[str, float]]:
    def forward_step(batches: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches).to(policy.device)
        output = model(
            batch.token_ids.unsqueeze(0),
            batch.sequences.positions.unsqueeze(0) if batch.sequences.positions is not None else None,
            None,
            packed_seq_params=batch.sequences,
            output_processor=policy.head,
            output_processor_context=batch.request,
        )

        def loss(logprobs: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            value, metrics = loss_fn(logprobs, batch)
            return value, torch.tensor(1, dtype=torch.int, device=value.device), metrics

        return output, loss

    lengths = {batch.num_tokens for batch in micro_batches}
    if policy.ranks.pipeline_size > 1 and len(lengths) > 1:
        raise ValueError(f"micro-batch lengths {sorted(lengths)}; rule: equal under pipeline parallelism; fix: pad_to")
    if len(models) > 1 and len(micro_batches) % policy.ranks.pipeline_size:
        raise ValueError(
            f"micro-batches: {len(micro_batches)}; rule: a multiple of parallel.pipeline ({policy.ranks.pipeline_size})"
            " with virtual pipeline stages; fix: add masked ones"
        )
    results: list[dict[str, float]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in models],
        model=list(models),
        num_microbatches=len(micro_batches),
        seq_length=max(lengths),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results
