"""Streams in which an item, the source or the caller goes wrong, or is left early.

What came before is handed out, and no slot is lost.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shmlane import (
    InferFailed,
    InputMissing,
    Lease,
    LeaseTimeout,
    Result,
    Timeouts,
)
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import asked, slots_of
from tests.unit.flowing import (
    LIMIT,
    Gates,
    Pair,
    fill,
    flowing,
    number_of,
    outcome,
    unharmed,
)

SLOTS = 4
BAD = 5


class Stop(BaseException):
    """As Ctrl-C, from the caller's own code."""


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture(params=[0, 1, 4], ids=lambda count: f"{count} workers")
def workers(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def shared(gates: Gates) -> Iterator[Pair]:
    with flowing(slots=SLOTS, gates=gates) as pair, unharmed(pair):
        yield pair
        gates.open_all()


def bad_items() -> Iterator[int]:
    yield from range(BAD)
    raise ValueError("no more")


def bad_write(lease: Lease, number: float) -> None:
    lease["X"][...] = number
    if number == BAD:
        raise ValueError("cannot be written")


def no_write(lease: Lease, number: float) -> None:
    if number != BAD:
        fill(lease, number)


def refused(lease: Lease, number: float) -> None:
    fill(lease, -1 if number == BAD else number)


def bad_read(number: float, result: Result) -> float:
    if number == BAD:
        raise ValueError("cannot be read")
    return number_of(number, result)


def released(lease: Lease, number: float) -> None:
    fill(lease, number)
    if number == BAD:
        lease.release()


# --- errors of one item ---------------------------------------------------------------

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"write": bad_write}, "cannot be written"),
    ({"write": no_write}, "nothing was written"),
    ({"write": refused}, "takes no -1"),
    ({"write": released}, "was released"),
    ({"read": bad_read}, "cannot be read"),
]


@pytest.mark.parametrize(("arguments", "words"), ERRORS)
def test_an_error_is_raised_in_its_turn_and_ends_the_stream(
    shared: Pair, workers: int, arguments: dict[str, Any], words: str
) -> None:
    _, session = shared
    told = {"write": fill, "read": number_of} | arguments
    values, error = outcome(session.stream(range(50), workers=workers, **told))
    assert values == list(range(BAD))
    assert words in str(error)
    assert error is not None
    assert error.__notes__ == [f"This is what became of item {BAD} of the stream."]


@pytest.mark.parametrize(("arguments", "words"), ERRORS)
def test_errors_can_be_handed_out_in_the_place_of_results(
    shared: Pair, workers: int, arguments: dict[str, Any], words: str
) -> None:
    _, session = shared
    told = {"write": fill, "read": number_of} | arguments
    stream = session.stream(range(12), workers=workers, return_exceptions=True, **told)
    found: list[Any] = list(stream)
    assert (stream.done, stream.failed) == (12, 1)
    assert words in str(found.pop(BAD))
    assert found == [number for number in range(12) if number != BAD]
    assert not isinstance(stream, BaseException)


def test_without_an_order_others_go_on_until_the_error_comes(shared: Pair) -> None:
    _, session = shared
    values, error = outcome(
        session.stream(range(50), write=refused, read=number_of, ordered=False)
    )
    assert isinstance(error, InferFailed)
    assert len(values) == len(set(values))
    assert BAD not in values


def test_every_item_may_fail(shared: Pair) -> None:
    _, session = shared
    stream = session.stream(
        range(40), write=lambda lease, _: fill(lease, -1), return_exceptions=True
    )
    assert all(isinstance(each, InferFailed) for each in stream)
    stream = session.stream(range(9), write=lambda *_: None, return_exceptions=True)
    assert all(isinstance(each, InputMissing) for each in stream)


# --- errors of the whole --------------------------------------------------------------


@pytest.mark.parametrize("return_exceptions", [True, False])
def test_what_came_before_the_source_broke_is_handed_out_first(
    shared: Pair, workers: int, return_exceptions: bool
) -> None:
    _, session = shared
    stream = session.stream(
        bad_items(),
        write=fill,
        read=number_of,
        workers=workers,
        return_exceptions=return_exceptions,
    )
    values, error = outcome(stream)
    assert values == list(range(BAD))
    assert str(error) == "no more"


@pytest.mark.parametrize("where", ["items", "write", "read", "progress"])
def test_what_is_no_exception_ends_the_stream_at_once(
    shared: Pair, workers: int, where: str
) -> None:
    _, session = shared

    def stop(name: str, number: float) -> None:
        if (name, number) == (where, BAD):
            raise Stop

    def items() -> Iterator[int]:
        for number in range(50):
            stop("items", number)
            yield number

    def write(lease: Lease, number: float) -> None:
        fill(lease, number)
        stop("write", number)

    def read(number: float, result: Result) -> float:
        stop("read", number)
        return number_of(number, result)

    stream = session.stream(
        items(),
        write=write,
        read=read,
        workers=workers,
        progress=lambda done, _: stop("progress", done),
    )
    values, error = outcome(stream)
    assert isinstance(error, Stop)
    assert values == list(range(len(values)))
    assert len(values) <= BAD


def test_no_slot_at_all_is_an_error_in_its_turn() -> None:
    limits = Timeouts(connect=2.0, infer=LIMIT, lease=0.03)
    with flowing(slots=2, timeouts=limits) as (_, session):
        with session.lease(), session.lease():
            values, error = outcome(session.stream(range(3), write=fill))
        assert (values, type(error)) == ([], LeaseTimeout)
        all_free(session)


# --- leaving --------------------------------------------------------------------------


def test_leaving_early_leaves_slots_late_that_come_back(
    shared: Pair, gates: Gates, workers: int
) -> None:
    server, session = shared
    go = gates.shut(3)

    def leave_early() -> None:
        for value in session.stream(
            itertools.count(), write=fill, read=number_of, workers=workers
        ):
            if value == 2:
                break

    leave_early()
    eventually(lambda: session.stats().in_flight == 0)
    assert session.stats().late <= SLOTS
    eventually(lambda: session.stats().free >= SLOTS - 1)
    server.wait_for(1)
    sent = len(asked(server))
    go.set()
    all_free(session)
    assert len(asked(server)) == sent


@pytest.mark.parametrize("how", ["close", "with", "drop", "circle", "error", "twice"])
def test_a_stream_may_end_at_any_time(
    shared: Pair, gates: Gates, workers: int, how: str
) -> None:
    _, session = shared
    gates.shut(2)
    stream: Any = session.stream(
        itertools.count(), write=fill, read=number_of, workers=workers
    )
    gone = weakref.ref(stream)
    assert [next(stream), next(stream)] == [0, 1]
    if how == "with":
        with stream:
            pass
    elif how == "error":
        with contextlib.suppress(ZeroDivisionError), stream:
            raise ZeroDivisionError
    elif how == "circle":
        stream.me = stream
    elif how != "drop":
        stream.close()
        if how == "twice":
            stream.close()
    if how not in ("circle", "drop"):
        assert list(stream) == []
    del stream
    if how == "circle":
        gc.collect()
    assert gone() is None
    assert session.stats().in_flight == 0
    gates.open_all()
    all_free(session)


def test_work_in_the_hands_of_threads_is_finished_before_a_stream_is_left(
    shared: Pair,
) -> None:
    _, session = shared
    begun, go = threading.Event(), threading.Event()
    written: list[float] = []

    def write(lease: Lease, number: float) -> None:
        fill(lease, number)
        if number == 1:
            begun.set()
            assert go.wait(LIMIT)
        # The slot is still that of this item.
        assert (lease["X"] == number).all()
        written.append(number)

    stream = session.stream(range(SLOTS), write=write, read=number_of, workers=2)
    with ThreadPoolExecutor(1) as pool:
        assert next(stream) == 0
        assert begun.wait(LIMIT)
        closing = pool.submit(stream.close)
        with pytest.raises(TimeoutError):
            closing.result(0.03)
        go.set()
        closing.result(LIMIT)
    assert 1 in written
    assert not any(slot.leased for slot in slots_of(session))


def test_a_stream_that_one_of_its_own_threads_ends(shared: Pair) -> None:
    _, session = shared
    ended = threading.Event()

    def write(lease: Lease, number: float) -> None:
        if number == 1:
            # Not while the stream itself is running.
            eventually(lambda: stream.done == 1)
            stream.close()
            ended.set()
        fill(lease, number)

    stream = session.stream(range(2), write=write, read=number_of, workers=2)
    assert next(stream) == 0
    assert ended.wait(LIMIT)
    assert list(stream) == []
