"""Time limits: what may be said, and the one deadline of a call."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.errors import UsageError
from shmlane.timing import DEFAULT, Deadline, Timeouts, check_timeout

seconds = st.floats(0, 1e6)
limits = st.none() | seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `time.monotonic` tells; set its only element."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


# --- what may be said -----------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, 0, 0.0, 1, 0.25, 1e9, threading.TIMEOUT_MAX, np.float32(2)],
    ids=repr,
)
def test_a_limit_is_none_or_seconds_from_zero_on(value: float | None) -> None:
    assert check_timeout(value) is value
    assert Timeouts(infer=value).infer is value


@pytest.mark.parametrize(
    "value",
    [-1, -1e-9, math.inf, -math.inf, math.nan, 1e300, "5", "", [1], b"1", DEFAULT],
    ids=repr,
)
def test_anything_else_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        check_timeout(value, "wait")
    assert str(caught.value) == (
        f"wait={value!r} is not a time limit: give seconds >= 0, or None to wait for"
        " ever."
    )


@pytest.mark.parametrize("name", ["connect", "lease", "infer"])
def test_every_limit_of_a_session_is_checked(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=-1 is not a time limit"):
        Timeouts(**{name: -1})


def test_waiting_for_ever_has_to_be_asked_for() -> None:
    limits = Timeouts()
    assert (limits.connect, limits.lease, limits.infer) == (2.0, 5.0, 60.0)
    assert Timeouts(infer=None).infer is None
    assert repr(DEFAULT) == "DEFAULT"


# --- deadlines ------------------------------------------------------------------------


def test_a_deadline_counts_down_to_zero_and_stays_there(clock: list[float]) -> None:
    deadline = Deadline(2.0)
    assert (deadline.remaining, deadline.has_passed) == (2.0, False)
    clock[0] += 1.5
    assert (deadline.remaining, deadline.has_passed) == (0.5, False)
    clock[0] += 0.5
    assert (deadline.remaining, deadline.has_passed) == (0.0, True)
    clock[0] += 9.0
    assert (deadline.remaining, deadline.has_passed) == (0.0, True)
    assert deadline.limit == 2.0


def test_without_a_limit_there_is_no_end(clock: list[float]) -> None:
    deadline = Deadline(None)
    clock[0] += 1e12
    assert (deadline.remaining, deadline.has_passed) == (None, False)


def test_a_limit_of_zero_has_passed_at_once() -> None:
    assert (Deadline(0).remaining, Deadline(0).has_passed) == (0.0, True)


@given(limits, seconds, limits)
def test_the_earlier_of_two_deadlines_counts(
    outer: float | None, passed: float, inner: float | None
) -> None:
    now = [1000.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        deadline = Deadline(outer)
        now[0] += passed
        left = [limit for limit in (deadline.remaining, inner) if limit is not None]
        remaining = deadline.within(inner).remaining
    if left:
        assert remaining == pytest.approx(min(left), abs=1e-6)
    else:
        assert remaining is None


def test_a_deadline_shows_what_is_left(clock: list[float]) -> None:
    deadline = Deadline(2.0)
    clock[0] += 1.5
    assert repr(deadline) == "<Deadline 0.5 of 2.0 s left>"
    assert repr(Deadline(None)) == "<Deadline None of None s left>"
