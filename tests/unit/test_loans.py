"""Arrays that are sent from where they lie, and outputs that lie in nobody's slot."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from shmlane import RequestOptions, Session
from shmlane.slots import Slot
from tests.sessions import Array
from tests.unit.asked import asked, doubling, scores, session_on, slots_of, words

STALE = np.full(2, 66, np.float32)
FRESH = np.array([1, 2], np.float32)
ROW = np.arange(4, dtype=np.float32)[None]


class Stop:
    """Raises KeyboardInterrupt before one line of one function."""

    def __init__(self, function: Any, at: int) -> None:
        self._code = function.__code__
        self._left = at
        self.was_reached = False

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code is not self._code:
            return None
        if event == "line":
            self._left -= 1
            if self._left == -1:
                self.was_reached = True
                raise KeyboardInterrupt
        return self

    def interrupts(self, session: Session, array: Array) -> bool:
        """Whether it came to that line."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            session.infer({"X": array})
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.was_reached


@pytest.mark.parametrize("function", [Slot.lend, Slot.end_loans])
def test_a_loan_that_was_interrupted_anywhere_is_not_sent_by_the_next(
    function: Any,
) -> None:
    with session_on(doubling(), memory="wire") as (_, session):
        at = 0
        while Stop(function, at).interrupts(session, STALE):
            at += 1
            with session.lease() as lease:
                lease.write("X", FRESH)
                assert lease.infer()["Y"].tolist() == (2 * FRESH).tolist()
            assert slots_of(session)[0].inputs["X"].lent is None
            assert session.stats().free == 1
        assert at > 1


# --- copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["system", "wire"])
@pytest.mark.parametrize("classes", [0, 2])
def test_a_copy_of_a_result_changes_with_nothing(memory: str, classes: int) -> None:
    options = RequestOptions(classification={"Y": classes} if classes else {})
    with session_on(scores(), memory=memory) as (_, session), session.lease() as lease:
        lease.write("X", ROW)
        result = lease.infer(options=options)
        wanted = result["Y"].tolist()
        first, second = result.copy()["Y"], result.copy()["Y"]
        first[...] = first.flat[0]
        result["Y"][...] = result["Y"].flat[-1]
        assert second.tolist() == wanted
        lease.write("X", ROW + 5)
        lease.infer(options=options)
        assert second.tolist() == wanted


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_copy_of_bytes_changes_with_nothing(memory: str) -> None:
    with session_on(words(), memory=memory) as (_, session), session.lease() as lease:
        lease.write("W", ["a", "bc"])
        result = lease.infer()
        copy = result.copy()
        result["W_OUT"][...] = b"changed"
        result["LENGTHS"][...] = 0
        assert copy["W_OUT"].tolist() == [b"a", b"bc"]
        assert copy["LENGTHS"].tolist() == [1, 2]


def test_results_of_short_calls_share_nothing() -> None:
    with session_on(scores(), memory="wire") as (server, session):
        came = [session.infer({"X": ROW + number})["Y"] for number in range(3)]
        for array in came:
            array += 100
        assert [array[0, 0] for array in came] == [100, 101, 102]
        assert len(asked(server)) == 3
