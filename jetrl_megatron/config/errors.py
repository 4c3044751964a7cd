"""What a user is told about a wrong configuration: one line per fault, `KEY: VALUE; rule: ...; fix: ...`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MAX_VALUE_CHARS = 80


def show(value: Any) -> str:
    """`value` in one line of at most MAX_VALUE_CHARS characters, JSON-like (text in quotes, null, true)."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError):  # circular aliases, non-text keys that JSON cannot hold
        text = " ".join(repr(value).split())
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def one_line(text: object) -> str:
    return " ".join(str(text).split())


@dataclass(frozen=True)
class Violation:
    """One broken rule: the dotted key (or file), its value as shown to the user, the rule, and what to do."""

    key: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value}; rule: {self.rule}; fix: {self.fix}"


class ConfigError(ValueError):
    """A fault of the user's configuration or files. `errors` holds one line per fault; `str()` joins them."""

    def __init__(self, errors: Iterable[str | Violation]) -> None:
        self.errors = [one_line(e) for e in errors]
        super().__init__("\n".join(self.errors))
