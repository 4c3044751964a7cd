"""Generated tasks for models of a few hundred thousand parameters, and their character tokenizer.

chain:      prompt = N random digits, left-justified in a fixed field, then `=`; answer = the N running sums mod 10.
sort:       same prompt; answer = the digits in ascending order.
arithmetic: prompt = `a+b` in the field, then `=`; answer = the sum, least significant digit first.

The fixed field keeps the distance from a digit to its place in the answer constant, which is what makes `chain`
learnable within about a hundred supervised steps.
The demonstrator of the warm start is sloppy: each step of an answer is wrong with probability `error` and the error
propagates. So supervised training ends near a pass rate that leaves reinforcement learning something to do.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Split = Literal["train", "eval", "warmstart"]
FIELD_WIDTH = 24
PAD, EOS = "<pad>", "<eos>"
TASK_CHARACTERS = string.digits + "+= "
EVAL_SHARE = 10
MAX_DRAWS = 1000


@dataclass(frozen=True)
class Task:
    """One generated task. `draw(rng, min_digits, max_digits)` gives the problem (what the field holds);
    `solve(problem, rng, error)` its answer, each step wrong with probability `error`."""

    name: str
    draw: Callable[[random.Random, int, int], str]
    solve: Callable[[str, random.Random, float], str]
    width: Callable[[int], int]

    def prompt(self, problem: str, max_digits: int) -> str:
        """Prompt text: the problem, left-justified in the field, then `=`."""
        return problem.ljust(self.width(max_digits)) + "="

    def answer(self, problem: str) -> str:
        """The right response text, without EOS."""
        return self.solve(problem, random.Random(0), 0.0)

    def demonstration(self, problem: str, rng: random.Random, error: float) -> str:
        """Response text of the sloppy demonstrator, without EOS. error: probability per step."""
        return self.solve(problem, rng, error)


def _digits(rng: random.Random, min_digits: int, max_digits: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(rng.randint(min_digits, max_digits)))


def _slip(value: int, rng: random.Random, error: float) -> int:
    """Another digit than `value` with probability `error`. Draws nothing when error is 0."""
    return (value + rng.randint(1, 9)) % 10 if error and rng.random() < error else value


def _solve_chain(problem: str, rng: random.Random, error: float) -> str:
    running, answer = 0, ""
    for digit in problem:
        running = _slip((running + int(digit)) % 10, rng, error)
        answer += str(running)
    return answer


def _solve_sort(problem: str, rng: random.Random, error: float) -> str:
    remaining, answer = sorted(problem), ""
    while remaining:
        position = rng.randrange(len(remaining)) if error and rng.random() < error else 0
        answer += remaining.pop(position)
    return answer


def _draw_sum(rng: random.Random, min_digits: int, max_digits: int) -> str:
    lengths = [rng.randint(min_digits, max_digits) for _ in range(2)]
    return "+".join(str(rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n)) for n in lengths)


def _solve_sum(problem: str, rng: random.Random, error: float) -> str:
    a, b = (int(part) for part in problem.split("+"))
    answer = "" if a or b else str(_slip(0, rng, error))
    carry = 0
    while a or b or carry:
        column = a % 10 + b % 10 + carry
        digit = _slip(column % 10, rng, error)
        carry = column // 10 if digit == column % 10 else rng.randint(0, 1)
        answer += str(digit)
        a, b = a // 10, b // 10
    return answer


TASKS: dict[str, Task] = {
    "chain": Task("chain", _digits, _solve_chain, lambda max_digits: max(FIELD_WIDTH, max_digits)),
    "sort": Task("sort", _digits, _solve_sort, lambda max_digits: max(FIELD_WIDTH, max_digits)),
    "arithmetic": Task("arithmetic", _draw_sum, _solve_sum, lambda max_digits: max(FIELD_WIDTH, 2 * max_digits + 1)),
}


def get_task(name: str) -> Task:
    """Raises ValueError for an unknown task."""
    if name not in TASKS:
        raise ValueError(f"data.task: {name!r}; rule: one of {sorted(TASKS)}; fix: choose one")
    return TASKS[name]


def problem(task: Task, split: Split, seed: int, row: int, min_digits: int, max_digits: int) -> str:
    """Problem number `row` of a split: a pure function of the arguments.

    Splits differ by random stream, and a hash of the problem assigns every problem to either evaluation (1 in 10) or
    training and warm start, so no held-out problem is ever trained on. Raises ValueError if the task has too few
    problems to find one of the split.
    """
    rng = random.Random(f"{task.name}/{split}/{seed}/{row}")
    for _ in range(MAX_DRAWS):
        candidate = task.draw(rng, min_digits, max_digits)
        held_out = hashlib.sha256(f"{task.name}:{candidate}".encode()).digest()[0] % EVAL_SHARE == 0
        if held_out == (split == "eval"):
            return candidate
    raise ValueError(
        f"data.max_digits: {max_digits}; rule: task {task.name} has problems for the {split} split; fix: more digits"
    )


def build_char_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per character and exactly `vocab_size` ids, so that every id a model can emit decodes.

    Ids: <pad>, <eos>, the characters of the tasks, other printable ASCII as far as there is room, then <unused_i>.
    Decoding joins characters without adding or removing any. A character outside the vocabulary is an error.
    Raises ValueError if the characters of the tasks do not fit.
    """
    needed = 2 + len(TASK_CHARACTERS)
    if vocab_size < needed:
        raise ValueError(f"vocab_size: {vocab_size}; rule: at least {needed} (tasks, eos, pad); fix: raise it")
    others = string.ascii_lowercase + string.ascii_uppercase + string.punctuation + "\n"
    tokens = [PAD, EOS, *TASK_CHARACTERS, *(c for c in others if c not in TASK_CHARACTERS)][:vocab_size]
    tokens += [f"<unused_{i}>" for i in range(len(tokens), vocab_size)]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<no unknown token>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
