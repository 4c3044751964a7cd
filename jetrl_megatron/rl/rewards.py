"""Rewards. A function maps (prompt, response text) to named parts; the reward is their weighted sum:

    reward = answer_weight * parts["answer"] + format_weight * parts["format"] + all other parts

`exact_match`  answer: the text equals the reference. Counts only for a finished response, so EOS is part of the task.
`gsm8k`        answer: the number after `####` in the reference equals the response's, taken from its last `\\boxed{}`,
               `#### x` or `answer is x` / `Answer: x`, else its last number. format: one of the three explicit forms
               is there and the response finished within max_new_tokens. Format is what a small model learns first.
`math_verify`  answer: by the math_verify library (LaTeX, fractions, sets, units). format: `\\boxed{}` and finished.
`package.module:function`  the user's own, called as `function(prompt, text) -> dict[str, float]`.

All but `exact_match` run in a worker process, which is killed when a call exceeds `timeout_s`. A call that raises,
hangs, exits or returns something else fails its sample only: reward 0 and `reward_error` set.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import Protocol

from jetrl_megatron.config.schema import RewardConfig
from jetrl_megatron.rl.reward_worker import RewardFailure, RewardWorker
from jetrl_megatron.samples import Prompt, Sample

log = logging.getLogger(__name__)


class RewardFunction(Protocol):
    """Parts of the reward of `text`, a finite number each. Must be deterministic."""

    def __call__(self, prompt: Prompt, text: str) -> dict[str, float]: ...


def exact_match(prompt: Prompt, text: str) -> dict[str, float]:
    return {"answer": float(text == prompt.answer)}


_NUMBER = re.compile(r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(r"\banswer\b[ \t*]*(?:is|:|=)([^\n]+)", re.IGNORECASE)


def _last_boxed(text: str) -> str | None:
    """Content of the last closed `\\boxed{...}`, braces balanced."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : end].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def explicit_answer(text: str) -> str | None:
    """The final answer that a response states: `\\boxed{x}`, `#### x`, or the number of `answer is x` / `Answer: x`.
    The last statement of the first form found; None without any."""
    boxed = _last_boxed(text)
    if boxed:
        return boxed
    for pattern in (_HASHES, _PHRASE):
        for tail in reversed(pattern.findall(text)):
            numbers = _NUMBER.findall(tail.rsplit("=", 1)[-1])
            if numbers:
                return str(numbers[0])
    return None


def _as_fraction(text: str) -> Fraction | None:
    plain = re.sub(r"[,$%\s]|\\[$%!,]", "", text).rstrip(".")
    if re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:/0*[1-9]\d*)?", plain) is None:
        return None
    numerator, _, denominator = plain.partition("/")
    return Fraction(numerator) / Fraction(denominator or "1")


def _equal(reference: str, candidate: str) -> bool:
    """Equality of two mathematical expressions: exactly as fractions where both are plain numbers, else by math_verify.
    Its own SIGALRM timeouts are off, the worker's deadline takes their place."""
    gold, value = _as_fraction(reference), _as_fraction(candidate)
    if gold is not None and value is not None:
        return gold == value
    import math_verify

    expected = math_verify.parse(f"${reference}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"reference answer {reference!r} is not a mathematical expression")
    got = math_verify.parse(f"${candidate}$", parsing_timeout=None)
    return bool(math_verify.verify(expected, got, timeout_seconds=None))


def gsm8k(prompt: Prompt, text: str) -> dict[str, float]:
    """Raises ValueError for a reference without `#### x`."""
    _, marker, reference = prompt.answer.rpartition("####")
    if not marker:
        raise ValueError(f"row {prompt.row}: answer without '####'; rule: gsm8k references end with '#### x'")
    stated = explicit_answer(text)
    numbers = _NUMBER.findall(text) if stated is None else []
    candidate = stated if stated is not None else (numbers[-1] if numbers else None)
    right = candidate is not None and _equal(reference.strip(), candidate)
    return {"answer": float(right), "format": float(stated is not None)}


def math_verify_reward(prompt: Prompt, text: str) -> dict[str, float]:
    """Raises ValueError for a reference that math_verify cannot parse."""
    import math_verify

    answer = prompt.answer
    wrapped = answer if "$" in answer or "\\boxed" in answer or "\\(" in answer else f"${answer}$"
    expected = math_verify.parse(wrapped, parsing_timeout=None)
    if not expected:
        raise ValueError(f"row {prompt.row}: reference answer {answer!r} is not a mathematical expression")
    right = math_verify.verify(expected, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None)
    return {"answer": float(right), "format": float(bool(_last_boxed(text)))}


@dataclass(frozen=True)
class RewardSpec:
    """in_process: cannot raise or hang. finished_parts: parts that are 0 for a truncated response.
    preload: modules that the worker imports before its first deadline starts."""

    function: RewardFunction
    in_process: bool = False
    finished_parts: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


REWARDS: dict[str, RewardSpec] = {
    "exact_match": RewardSpec(exact_match, in_process=True, finished_parts=("answer",)),
    "gsm8k": RewardSpec(gsm8k, finished_parts=("format",), preload=("math_verify",)),
    "math_verify": RewardSpec(math_verify_reward, finished_parts=("format",), preload=("math_verify",)),
}


def resolve(kind: str) -> RewardSpec:
    """The registered reward, or the user's `package.module:function`, imported. Raises ValueError for an unknown kind
    or a module without such a function; whatever the user's module raises while being imported passes through."""
    if kind in REWARDS:
        return REWARDS[kind]
    module_name, colon, function_name = kind.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"reward.kind: {kind!r}; rule: one of {sorted(REWARDS)} or package.module:function")
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"reward.kind: {kind!r}; rule: {module_name} has a function {function_name}; fix: the name")
    return RewardSpec(function)


def checked_parts(parts: object) -> dict[str, float]:
    """The parts a function returned, as plain floats. Raises ValueError unless a dict of finite numbers."""
    if not isinstance(parts, Mapping) or not parts:
        raise ValueError(f"returned {parts!r:.100}; rule: a dict[str, float] with at least one part")
    values = {str(name): float(value) for name, value in parts.items()}
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"returned {name}: {value}; rule: finite numbers")
    return values


class Scorer:
    """Fills in rewards; owns the worker process. Use as a context manager, or `close` it."""

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        builtin = REWARDS.get(cfg.kind)
        self._finished_parts = builtin.finished_parts if builtin else ()
        self._function = builtin.function if builtin and builtin.in_process else None
        self._worker = None if self._function else RewardWorker(cfg.kind, cfg.timeout_s)

    def score(self, samples: Iterable[Sample]) -> None:
        """Sets reward, reward_parts (unweighted) and reward_error of every sample, in order.

        Reads `sample.text` (see `data.response_text`) and `sample.truncated`. Raises ValueError if reward.kind cannot
        be loaded; a call that fails is the sample's `reward_error`.
        """
        for sample in samples:
            try:
                parts = self._call(sample)
            except RewardFailure as failure:
                sample.reward, sample.reward_parts, sample.reward_error = 0.0, {}, str(failure)
                log.warning("reward %s failed on row %d: %s", self._cfg.kind, sample.prompt.row, failure)
                continue
            if sample.truncated:
                parts = {name: 0.0 if name in self._finished_parts else value for name, value in parts.items()}
            weights = {"answer": self._cfg.answer_weight, "format": self._cfg.format_weight}
            sample.reward = math.fsum(weights.get(name, 1.0) * value for name, value in parts.items())
            sample.reward_parts, sample.reward_error = parts, None

    def _call(self, sample: Sample) -> dict[str, float]:
        if self._function is not None:
            return self._function(sample.prompt, sample.text)
        assert self._worker is not None
        return self._worker.call(sample.prompt, sample.text)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def score(samples: Iterable[Sample], cfg: RewardConfig) -> None:
    """`Scorer(cfg).score(samples)` with a worker for this call only; a loop should keep a Scorer."""
    with Scorer(cfg) as scorer:
        scorer.score(samples)
