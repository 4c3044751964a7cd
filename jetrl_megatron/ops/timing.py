"""Where the time of a process goes: seconds per operator. Off by default; a call then costs one `if`.

Every `@operator` of `ops` is timed, and so is any other function marked `@timed(name)`. A function that calls another
timed one is charged for its own part only, so the totals add up to the time spent inside operators. One thread per
process runs operators.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

OperatorSeconds = dict[str, float]

_totals: list[OperatorSeconds] = []
_inner_s: list[float] = []  # per running timed function: seconds spent in the timed functions it called


def start_operator_times() -> OperatorSeconds:
    """Time operators until the process ends, or until the returned totals are given to `stop_operator_times`."""
    totals: OperatorSeconds = {}
    _totals.append(totals)
    return totals


def stop_operator_times(totals: OperatorSeconds) -> None:
    _totals[:] = [other for other in _totals if other is not totals]


def timing() -> bool:
    """Whether operators are timed now."""
    return bool(_totals)


@contextlib.contextmanager
def time_operators() -> Iterator[OperatorSeconds]:
    """Seconds per operator name of this process inside the block."""
    totals = start_operator_times()
    try:
        yield totals
    finally:
        stop_operator_times(totals)


def timed(name: str) -> Callable[[F], F]:
    """Charge a function's time to `name` while operators are timed."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _totals:
                return function(*args, **kwargs)
            _inner_s.append(0.0)
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed_s = perf_counter() - start
                own_s = elapsed_s - _inner_s.pop()
                if _inner_s:
                    _inner_s[-1] += elapsed_s
                for totals in _totals:
                    totals[name] = totals.get(name, 0.0) + own_s

        return call  # type: ignore[return-value]

    return decorate
