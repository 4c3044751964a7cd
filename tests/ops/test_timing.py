"""Operator times: what ran is charged once, and only while asked for."""

from __future__ import annotations

import time

import pytest
import torch

from jetrl_megatron import ops
from jetrl_megatron.ops.timing import time_operators, timed


@timed("inner")
def _inner() -> None:
    time.sleep(0.02)


@timed("outer")
def _outer() -> None:
    time.sleep(0.01)
    _inner()
    _inner()


def test_nested_time_is_charged_once() -> None:
    """A caller gives away the time of the timed functions it calls, so the totals never exceed the wall time."""
    start = time.perf_counter()
    with time_operators() as totals:
        _outer()
    wall_s = time.perf_counter() - start
    assert totals["inner"] >= 0.04
    assert totals["outer"] >= 0.01
    assert sum(totals.values()) <= wall_s


def test_operators_are_timed_under_their_names_and_only_inside_the_block() -> None:
    """Every operator that runs has a total; nothing is added before or after."""
    x, w = torch.randn(2, 8).bfloat16(), torch.ones(8).bfloat16()
    ops.rmsnorm(x, w, 1e-6)
    with time_operators() as outer:
        ops.swiglu(x)
        with time_operators() as inner:
            ops.add_rmsnorm(x, x, w, 1e-6)
    before = dict(outer)
    ops.swiglu(x)
    assert set(inner) == {"rmsnorm"}
    assert set(outer) == {"swiglu", "rmsnorm"}
    assert outer == before
    assert all(seconds > 0 for seconds in outer.values())


def test_a_call_that_raises_is_charged_too() -> None:
    """An exception leaves no half-open clock behind: later calls are charged as usual."""

    @timed("fails")
    def fails() -> None:
        raise RuntimeError("inside")

    with time_operators() as totals:
        with pytest.raises(RuntimeError, match="inside"):
            fails()
        _inner()
    assert set(totals) == {"fails", "inner"}
    assert totals["inner"] >= 0.02
