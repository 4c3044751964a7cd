"""Users' faults on the command line: one line each on stderr, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from jetrl_megatron.config import ConfigError

USER_ERROR = 2


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """ConfigError, and `kinds` where given, become one line per fault on stderr and exit code 2; anything else is a bug
    and keeps its trace."""
    try:
        yield
    except ConfigError as error:
        _exit(error.errors)
    except kinds as error:
        _exit([" ".join(str(error).split())])


def _exit(lines: list[str]) -> NoReturn:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    raise typer.Exit(USER_ERROR) from None
