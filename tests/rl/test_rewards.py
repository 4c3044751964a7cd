"""Rewards: right and wrong answers by hand, and functions that raise, hang, exit or return nonsense."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jetrl_megatron.config.schema import RewardConfig
from jetrl_megatron.rl.rewards import Scorer, exact_match, explicit_answer, gsm8k, math_verify_reward, resolve, score
from jetrl_megatron.samples import FinishReason, Prompt, Sample

USER_MODULE = """
import os, sys, time, threading, subprocess
def f(prompt, text):
    if text == "raise": raise KeyError("lost")
    if text == "hang":
        while True: pass
    if text == "regex":
        import re; re.match(r"(a+)+$", "a" * 64 + "b")
    if text == "exit": sys.exit(3)
    if text == "crash": os._exit(9)
    if text == "nan": return {"x": float("nan")}
    if text == "none": return None
    if text == "print": print("noise")
    return {"answer": float(text == prompt.answer), "style": 0.5}
"""


def sample(text: str, answer: str = "42", finish: FinishReason = "stop") -> Sample:
    return Sample(Prompt(0, 3, "q", (1,), answer), 0, [1], [0.0], finish, 0, text=text)


@pytest.fixture
def user_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_reward_module.py").write_text(USER_MODULE)
    (tmp_path / "broken_reward_module.py").write_text("raise RuntimeError('no such model')")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_reward_module:f"


def test_exact_match_needs_eos() -> None:
    """The text must be equal, to the character, and the response finished."""
    samples = [sample("42"), sample("42", finish="length"), sample("42 "), sample("4"), sample("42<pad>")]
    score(samples, RewardConfig())
    assert [s.reward for s in samples] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert exact_match(samples[0].prompt, "42") == {"answer": 1.0}


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{unclosed", None),
        ("#### 18", "18"),
        ("The answer is 1,234.50 dollars.", "1,234.50"),
        ("**Answer:** $18", "$18"),
        ("the answer is 3 + 4 = 7.", "7"),
        ("The answer is not known", None),
        ("it is 18", None),
        ("", None),
    ],
)
def test_explicit_answer(text: str, stated: str | None) -> None:
    """Forms of a final answer, and texts that state none."""
    assert explicit_answer(text) == stated


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        ("9 * 2 = 18\n#### 18", 1, 1),
        ("She makes 9*2 = $18.", 1, 0),
        ("The answer is 18.0", 1, 1),
        (r"\boxed{\frac{36}{2}}", 1, 1),
        ("The answer is 17, not 18", 0, 1),
        ("18 or 19", 0, 0),
        ("no idea", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k(text: str, answer: int, form: int) -> None:
    """The stated answer wins over the last number; format is a part of its own."""
    prompt = Prompt(0, 0, "q", (1,), "16 - 3 - 4 = <<16-3-4=9>>9\n#### 18")
    assert gsm8k(prompt, text) == {"answer": answer, "format": form}


def test_gsm8k_weights_and_truncation() -> None:
    """reward = 1 * answer + .2 * format; a truncated response keeps its answer and loses its format."""
    samples = [sample(t, "#### 5") for t in ("#### 5", "#### 6", "5", "6")]
    samples += [sample("#### 5", "#### 5", "length"), sample("5", "no marker")]
    score(samples, RewardConfig(kind="gsm8k", format_weight=0.2))
    assert [s.reward for s in samples] == [1.2, 0.2, 1.0, 0.0, 1.0, 0.0]
    assert samples[1].reward_parts == {"answer": 0.0, "format": 1.0}
    assert [s.reward_error is None for s in samples] == [True] * 5 + [False]
    assert "####" in str(samples[5].reward_error)


def test_math_verify() -> None:
    """Equal values in other notations are right; a reference that is no expression is an error."""
    half = Prompt(0, 0, "q", (1,), r"\frac{1}{2}")
    assert math_verify_reward(half, r"thus \boxed{0.5}") == {"answer": 1.0, "format": 1.0}
    assert math_verify_reward(half, "it is $1/2$") == {"answer": 1.0, "format": 0.0}
    assert math_verify_reward(half, r"\boxed{0.6}")["answer"] == 0.0
    assert math_verify_reward(half, "")["answer"] == 0.0
    with pytest.raises(ValueError, match="reference"):
        math_verify_reward(Prompt(0, 0, "q", (1,), ""), "1")


def test_failing_function_fails_its_sample_only(user_kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Raising, hanging (in Python and inside C), exiting, crashing and bad results cost one sample each, named in
    reward_error; samples before, between and after are scored, and nothing is left running."""
    bad = ["raise", "hang", "regex", "exit", "crash", "nan", "none"]
    samples = [sample(text) for name in bad for text in ("42", name)] + [sample("print"), sample("42")]
    start = time.perf_counter()
    with Scorer(RewardConfig(kind=user_kind, timeout_s=0.5, answer_weight=2.0)) as scorer:
        scorer.score(samples)
    assert time.perf_counter() - start < 30
    good = [s for s in samples if s.text == "42"]
    assert {s.reward for s in good} == {2.5}
    assert {s.reward_error for s in good} == {None}
    errors = {s.text: s.reward_error for s in samples if s.reward_error}
    assert sorted(errors) == sorted(bad)
    assert all(s.reward == 0.0 and s.reward_parts == {} for s in samples if s.reward_error)
    for name, word in zip(bad, ["lost", "timeout_s", "timeout_s", "code 3", "code 9", "nan", "None"], strict=True):
        assert word in str(errors[name])
    assert "noise" not in capfd.readouterr().out


def test_unknown_reward_stops_the_run(user_kind: str) -> None:
    """A reward that cannot be loaded is the user's error, not a failed sample."""
    for kind, message in [
        ("my_reward_module:g", "has a function g"),
        ("broken_reward_module:f", "no such model"),
        ("absent_module:f", "absent_module"),
        ("nonsense", "one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            score([sample("42")], RewardConfig(kind=kind))
    with pytest.raises(ValueError, match="one of"):
        resolve("exact-match")
