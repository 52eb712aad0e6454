"""Inputs whose writing ended early: they count as not given, whatever ended it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import InputMissing, Session, TensorMismatch
from tests.sessions import Array
from tests.unit.asked import doubling, session_on, words
from tests.unit.scripted import OPEN, Desk, output

OLD = np.full(4, 9, np.float32)
GOOD = np.arange(4, dtype=np.float32)


class Bad:
    """A number that raises when somebody asks for it."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error("bad")


def ending_with(error: type[BaseException]) -> Array:
    return np.array([1, 2, Bad(error), 4], object)


# What NumPy makes of a value it cannot take is told by name; the rest is the caller's.
TOLD = (TypeError, ValueError, OverflowError)
PASSED_ON = (
    ZeroDivisionError,
    RuntimeError,
    KeyError,
    MemoryError,
    KeyboardInterrupt,
    SystemExit,
)
CASES = [(each, TensorMismatch) for each in TOLD] + [(each, each) for each in PASSED_ON]


def serves(session: Session) -> None:
    assert session.infer({"X": GOOD})["Y"].tolist() == (2 * GOOD).tolist()
    assert session.stats().free == 1


@pytest.mark.parametrize(("raised", "told"), CASES)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_what_was_half_written_is_not_sent(
    memory: str, raised: type[BaseException], told: type[BaseException]
) -> None:
    with session_on(doubling(), memory=memory, shapes={"X": (4,)}) as (
        server,
        session,
    ):
        session.infer({"X": OLD})
        sent = len(server.requests)
        with session.lease() as lease:
            # Also where it was given before, in another shape or in this one.
            for before in (None, OLD[:2], OLD):
                if before is not None:
                    lease.write("X", before)
                with pytest.raises(told):
                    lease.write("X", ending_with(raised), cast=True)
                with pytest.raises(InputMissing, match="'X'"):
                    lease.infer()
            with pytest.raises(told):
                lease._lend("X", ending_with(raised), cast=True)
            with pytest.raises(InputMissing, match="'X'"):
                lease.infer()
            assert len(server.requests) == sent
            lease.write("X", GOOD)
            assert lease.infer()["Y"].tolist() == (2 * GOOD).tolist()
        with pytest.raises(told):
            session.infer({"X": ending_with(raised)}, cast=True)
        serves(session)


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_an_input_that_was_refused_is_not_sent_either(memory: str) -> None:
    refused: list[Any] = [GOOD.astype(float), np.ones((2, 2), np.float32), "text", None]
    with (
        session_on(doubling(), memory=memory, shapes={"X": (4,)}) as (_, session),
        session.lease() as lease,
    ):
        for given in refused:
            lease.write("X", OLD)
            with pytest.raises(TensorMismatch, match="'X'"):
                lease.write("X", given)
            with pytest.raises(InputMissing):
                lease.infer()


def test_elements_that_end_early_are_not_sent() -> None:
    bad: Any
    with session_on(words()) as (_, session), session.lease() as lease:
        for bad in (["a", 5], [b"x", None], ["\ud800"], [["a"], ["b"]]):
            lease.write("W", ["before"])
            with pytest.raises(TensorMismatch, match="'W'"):
                lease.write("W", bad)
            with pytest.raises(InputMissing):
                lease.infer()
        lease.write("W", ["after"])
        assert lease.infer()["W_OUT"].tolist() == [b"after"]


def test_a_view_gives_an_input_that_was_half_written_to_whoever_asks_for_it() -> None:
    desk = Desk(OPEN, shapes={"X": (4,)}, outputs={"Y": (4,)})
    with desk.lease() as lease:
        with pytest.raises(RuntimeError):
            lease.write("X", ending_with(RuntimeError), cast=True)
        # What it contains is undefined, as ever: the caller fills it.
        lease["X"][...] = GOOD
        lease.infer(output("Y", (1,)))
