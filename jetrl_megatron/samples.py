"""What flows between rollout, reward and training: prompts and samples. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a step.

    index: position in the step's prompt list (the group id). row: dataset row (or counter of a generated task).
    """

    index: int
    row: int
    text: str
    token_ids: tuple[int, ...]
    answer: str


@dataclass
class Sample:
    """One response. `logprobs[i]` is the engine's fp32 log-prob of `response_ids[i]` over the full vocabulary, after
    temperature (raw logits at temperature 0); EOS is part of the response when it was generated."""

    prompt: Prompt
    sample_index: int
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    text: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str | None = None
    advantage: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt.token_ids, *self.response_ids]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    def as_record(self) -> dict[str, Any]:
        """Row of `samples/step_*.jsonl`."""
        return {
            "prompt_index": self.prompt.index,
            "row": self.prompt.row,
            "sample_index": self.sample_index,
            "prompt": self.prompt.text,
            "prompt_ids": list(self.prompt.token_ids),
            "response_ids": self.response_ids,
            "text": self.text,
            "answer": self.prompt.answer,
            "reward": self.reward,
            "reward_parts": self.reward_parts,
            "reward_error": self.reward_error,
            "advantage": self.advantage,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "weight_version": self.weight_version,
        }
