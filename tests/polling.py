"""Waiting in tests: for a condition, with a deadline, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "the condition",
    *,
    timeout: float = 10.0,
) -> T:
    """The first true value of `condition()`; the test fails after `timeout` seconds.

    `what` should have become true, in words; a function tells it as things are then.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            pytest.fail(f"not so within {timeout:g} s: {told}")
        time.sleep(0.01)
    return value
