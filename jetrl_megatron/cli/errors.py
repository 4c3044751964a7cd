"""Users' faults on the command line: one line each on stderr, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from jetrl_megatron.config import ConfigError

USER_ERROR = 2


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """ConfigError, and `kinds` where given, become one line per fault on stderr and exit code 2; anything else is a bug
    and keeps its trace."""
    try:
        yield
    except (ConfigError, *kinds) as error:
        lines = error.errors if isinstance(error, ConfigError) else [" ".join(str(error).split())]
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
