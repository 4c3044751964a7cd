"""Prompts of a step, as a pure function of (seed, step): a resumed run needs no data state.

Position p = step * n + i of an endless stream; a stream is the rows, shuffled anew for every epoch by the seed, or the
counter of a generated task. Rows are read, checked and tokenized when the source is made, so a bad row fails the run
before its first step.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jetrl_megatron.config.schema import DataConfig
from jetrl_megatron.rl import tasks
from jetrl_megatron.samples import Prompt

Row = tuple[str, dict[str, Any]]
"""(where: `file:line` for error messages, columns)."""


def _read_jsonl(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise ValueError(f"data.path: {path}; rule: an existing JSONL file; fix: set data.path (or eval.path)")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}; rule: one JSON object per line; fix: the line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: {type(row).__name__}; rule: a JSON object per line; fix: the line")
            yield f"{path}:{number}", row


def _read_hf(cfg: DataConfig) -> Iterator[Row]:
    """A folder written by `save_to_disk`, a local folder of data files, or a dataset name."""
    import datasets

    assert cfg.path is not None
    folder = Path(cfg.path)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(cfg.path)
        if isinstance(loaded, datasets.DatasetDict):
            if cfg.split not in loaded:
                raise ValueError(f"data.split: {cfg.split!r}; rule: one of {sorted(loaded)}; fix: choose one")
            loaded = loaded[cfg.split]
    else:
        loaded = datasets.load_dataset(cfg.path, name=cfg.subset, split=cfg.split)
    for number, row in enumerate(loaded):
        yield f"{cfg.path}[{cfg.split}]:{number}", row


def _read_rows(cfg: DataConfig) -> Iterator[Row]:
    assert cfg.path is not None
    return _read_hf(cfg) if cfg.task == "hf" else _read_jsonl(Path(cfg.path))


def _column(where: str, row: dict[str, Any], key: str, name: str) -> str:
    """Column `name`, which the configuration key `data.<key>` asks for, as text."""
    if name not in row:
        raise ValueError(
            f"{where}: no column {name!r} (data.{key}); rule: every row has it, this one has {sorted(row)}; "
            f"fix: the row or data.{key}"
        )
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: {name}: {type(value).__name__}; rule: text or a number; fix: the row or data.{key}")
    return str(value)


class PromptSource:
    """Prompts for training steps and for the evaluation.

    cfg: the data section. tokenizer: of the model. seed: trainer.seed. eval_path: JSONL with held-out rows (eval.path),
    read with the same fields and template. Raises ValueError naming file:row, key, rule and fix for a row without its
    field or with a prompt that is empty or longer than `data.max_prompt_tokens`.
    """

    def __init__(
        self, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, eval_path: str | Path | None = None
    ) -> None:
        self._cfg, self._tokenizer, self._seed = cfg, tokenizer, seed
        self._rows = [] if cfg.generated else self._load(_read_rows(cfg), str(cfg.path))
        self._eval_rows = None if eval_path is None else self._load(_read_jsonl(Path(eval_path)), str(eval_path))

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None for a generated task."""
        return None if self._cfg.generated else len(self._rows)

    def prompts_for_step(self, step: int, n: int) -> list[Prompt]:
        """The `n` prompts of step `step` (>= 0), `index` 0..n-1. Equal arguments give equal prompts, always."""
        if self._cfg.generated:
            return [self._generated("train", step * n + i, i) for i in range(n)]
        count, prompts, orders = len(self._rows), [], {}
        for i in range(n):
            epoch, position = divmod(step * n + i, count)
            if epoch not in orders:
                orders[epoch] = self._order(epoch)
            prompts.append(self._prompt(self._rows, orders[epoch][position], i))
        return prompts

    def eval_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts, the same at every call; fewer if eval.path has fewer rows."""
        if self._eval_rows is not None:
            return [self._prompt(self._eval_rows, row, row) for row in range(min(n, len(self._eval_rows)))]
        if self._cfg.generated:
            return [self._generated("eval", i, i) for i in range(n)]
        raise ValueError(
            f"eval.path: missing; rule: task {self._cfg.task} has no held-out rows of its own; "
            "fix: set eval.path to a JSONL file or eval.every_steps=0"
        )

    def _order(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._rows)))
        if self._cfg.shuffle:
            random.Random(f"rows/{self._seed}/{epoch}").shuffle(order)
        return order

    def _prompt(self, rows: list[Prompt], row: int, index: int) -> Prompt:
        return dataclasses.replace(rows[row], index=index)

    def _generated(self, split: tasks.Split, row: int, index: int) -> Prompt:
        cfg, task = self._cfg, tasks.get_task(self._cfg.task)
        problem = tasks.problem(task, split, self._seed, row, cfg.min_digits, cfg.max_digits)
        text = task.prompt(problem, cfg.max_digits)
        token_ids = self._encode([text], special=False)[0]
        return self._checked(f"{cfg.task}:{row}", Prompt(index, row, text, token_ids, task.answer(problem)))

    def _load(self, rows: Iterator[Row], path: str) -> list[Prompt]:
        cfg, wheres, texts, answers = self._cfg, [], [], []
        for where, row in rows:
            wheres.append(where)
            texts.append(self._render(_column(where, row, "prompt_field", cfg.prompt_field)))
            answers.append(_column(where, row, "answer_field", cfg.answer_field))
        if not texts:
            raise ValueError(f"data.path: {path}; rule: at least one row; fix: another file")
        encoded = self._encode(texts, special=not cfg.chat_template)
        return [self._checked(wheres[i], Prompt(0, i, texts[i], encoded[i], answers[i])) for i in range(len(texts))]

    def _render(self, prompt: str) -> str:
        """The text the model sees: template, then the tokenizer's chat template if asked for."""
        cfg = self._cfg
        user = cfg.prompt_template.replace("{prompt}", prompt)
        if not cfg.chat_template:
            return user if cfg.system_prompt is None else f"{cfg.system_prompt}\n{user}"
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "data.chat_template: true; rule: the tokenizer has a chat template, this one has none; "
                "fix: set data.chat_template=false"
            )
        system = [] if cfg.system_prompt is None else [{"role": "system", "content": cfg.system_prompt}]
        messages = [*system, {"role": "user", "content": user}]
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def _encode(self, texts: list[str], special: bool) -> list[tuple[int, ...]]:
        """special: let the tokenizer add BOS; a chat template has written its own."""
        encoded = self._tokenizer(texts, add_special_tokens=special)["input_ids"]
        return [tuple(ids) for ids in encoded]

    def _checked(self, where: str, prompt: Prompt) -> Prompt:
        limit = self._cfg.max_prompt_tokens
        if not 0 < len(prompt.token_ids) <= limit:
            raise ValueError(
                f"{where}: {self._cfg.prompt_field}: {len(prompt.token_ids)} tokens; rule: 1 to "
                f"data.max_prompt_tokens = {limit}; fix: drop the row or set data.max_prompt_tokens"
            )
        return prompt


def response_text(
    tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int], stop_token_ids: Collection[int]
) -> str:
    """Text of a response as rewards read it: without the final stop token, other special tokens kept.

    Dropping all special tokens would let a policy pass with special tokens inside an otherwise right answer.
    """
    ids = list(response_ids)
    if ids and ids[-1] in stop_token_ids:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
