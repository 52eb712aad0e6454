"""Streams whose replies are late, lost or cut, and whose session is closed.

What came before is handed out, and no slot is lost.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shmlane import (
    Connection,
    ForkedSession,
    InferTimeout,
    Lease,
    PoolClosed,
    RequestLost,
    Result,
    Session,
)
from shmlane.board import Board
from shmlane.testing import Close, Garbage, Status, Truncate
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import asked
from tests.unit.flowing import (
    LIMIT,
    Gates,
    Pair,
    all_came,
    ends,
    fill,
    flowing,
    in_a_child,
    let_time_pass,
    number_of,
    outcome,
    unharmed,
    view_of,
)

SLOTS = 4
BAD = 5


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


# --- time limits ----------------------------------------------------------------------


def test_one_item_that_takes_too_long_is_an_error_like_another(
    shared: Pair, gates: Gates
) -> None:
    _, session = shared
    gates.shut(BAD)
    stream: Any = session.stream(
        range(12), write=fill, read=number_of, timeout=0.5, return_exceptions=True
    )
    found = list(stream)
    assert isinstance(found.pop(BAD), InferTimeout)
    assert found == [number for number in range(12) if number != BAD]
    assert session.stats().late == 1


def test_a_stuck_item_is_found_among_many_that_are_not(
    shared: Pair, gates: Gates
) -> None:
    """Replies keep coming, and somebody always looks at them first."""
    server, session = shared
    gates.shut(0)
    stream = session.stream(
        itertools.count(), write=fill, read=number_of, ordered=False, timeout=0.1
    )

    def take_slowly() -> None:
        for _ in stream:
            eventually(lambda: server.in_model <= 1)

    with pytest.raises(InferTimeout):
        take_slowly()
    assert stream.done < 5000


def test_what_came_in_time_counts_though_it_is_looked_at_late(
    shared: Pair, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = shared
    go = gates.shut(1)
    stream = session.stream(
        range(3), write=fill, read=number_of, timeout=LIMIT, in_flight=3
    )
    assert next(stream) == 0
    go.set()
    eventually(lambda: all_came(session), "all replies have come")
    with monkeypatch.context() as patch:
        let_time_pass(patch)
        assert list(stream) == [1, 2]


def test_a_reply_that_is_found_when_its_time_is_up_is_read_once(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it there is nothing of the item's: its connection may have ended."""
    server, session = shared
    # Answered in full, and its connection ends then.
    server.script(*[Truncate(10**6)] * SLOTS)
    stream = session.stream(range(12), write=fill, read=number_of, timeout=LIMIT)
    wait = Board.wait
    with monkeypatch.context() as patch:

        def wait_too_long(board: Board[Any], timeout: float | None) -> list[Any]:
            patch.undo()
            eventually(lambda: all_came(session), "all replies have come")
            eventually(lambda: ends(session) == SLOTS, "all connections have ended")
            let_time_pass(patch)
            return wait(board, timeout)

        patch.setattr(Board, "wait", wait_too_long)
        assert list(stream) == list(range(12))


# --- faults of the server -------------------------------------------------------------


def test_a_restart_in_mid_stream(shared: Pair) -> None:
    server, session = shared
    stream: Any = session.stream(
        range(40), write=fill, read=number_of, return_exceptions=True
    )
    found = [next(stream) for _ in range(10)]
    server.restart()
    found += stream
    lost = [each for each in found if isinstance(each, RequestLost)]
    assert len(found) == 40
    # Those whose replies had not been read.
    assert len(lost) <= SLOTS
    assert all(each in (number, *lost) for number, each in enumerate(found))


def test_a_server_that_forgot_is_told_again(shared: Pair) -> None:
    server, session = shared
    stream = session.stream(range(60), write=fill, read=number_of)
    for number, value in enumerate(stream):
        assert value == number
        if number % 10 == 5:
            server.unregister_all()
    assert session.stats().retries > 0


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_what_is_lost_is_sent_again_if_that_is_allowed(memory: str) -> None:
    connection = Connection(replay=True)
    with flowing(slots=2, memory=memory, connection=connection) as (server, session):
        # Only one: a second might meet the same item again.
        server.script(Close())
        stream = session.stream(range(9), write=fill, read=number_of)
        assert list(stream) == list(range(9))
        assert len(asked(server)) == 10
        all_free(session)


@pytest.mark.parametrize(
    "fault", [Close(), Truncate(40), Garbage(), Status(504, "gateway")]
)
def test_a_connection_that_breaks_costs_its_item_only(shared: Pair, fault: Any) -> None:
    server, session = shared
    server.script(fault)
    stream: Any = session.stream(
        range(20), write=fill, read=number_of, return_exceptions=True
    )
    found = list(stream)
    assert stream.failed == 1
    assert sum(each == number for number, each in enumerate(found)) == 19


# --- the session ----------------------------------------------------------------------


def test_another_thread_closes_the_session_in_mid_stream(workers: int) -> None:
    """What is in flight is handed out, and then the reason why no more comes."""
    with flowing(slots=SLOTS) as (server, session):
        stream = session.stream(
            itertools.count(), write=fill, read=number_of, workers=workers
        )
        assert [next(stream) for _ in range(6)] == list(range(6))
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(session.close)
            eventually(lambda: "closed" in repr(session))
            values, error = outcome(stream)
            closing.result(LIMIT)
        assert isinstance(error, PoolClosed)
        assert values == list(range(6, 6 + len(values)))
        assert server.regions == {}


@pytest.mark.parametrize("wait", [True, False])
def test_a_session_that_is_closed_at_once_lets_streams_end(wait: bool) -> None:
    with flowing(slots=SLOTS) as (server, session):
        stream = session.stream(itertools.count(), write=fill, read=number_of)
        assert [next(stream) for _ in range(6)] == list(range(6))
        session.close(wait=wait)
        values, error = outcome(stream)
        assert isinstance(error, PoolClosed)
        assert values == list(range(6, 6 + len(values)))
        assert server.regions == {}


def test_a_stream_that_was_left_lying_does_not_keep_the_session_from_closing(
    gates: Gates,
) -> None:
    """Nobody else would read what this thread has in flight."""
    with flowing(slots=SLOTS, gates=gates) as (server, session):
        go = gates.shut(2)
        stream = session.stream(itertools.count(), write=fill, read=number_of)
        assert [next(stream), next(stream)] == [0, 1]
        threading.Timer(0.03, go.set).start()
        begun = time.monotonic()
        session.close()
        assert time.monotonic() - begun < LIMIT / 2
        assert server.regions == {}
        with pytest.raises(PoolClosed):
            list(stream)


@pytest.mark.parametrize("where", ["write", "read", "items"])
def test_a_stream_may_close_its_own_session(where: str) -> None:
    with flowing(slots=SLOTS) as (server, session):

        def close(name: str, number: float) -> None:
            if (name, number) == (where, BAD):
                session.close()

        def items() -> Iterator[int]:
            for number in itertools.count():
                close("items", number)
                yield number

        def write(lease: Lease, number: float) -> None:
            fill(lease, number)
            close("write", number)

        def read(number: float, result: Result) -> float:
            value = number_of(number, result)
            close("read", number)
            return value

        values, error = outcome(session.stream(items(), write=write, read=read))
        assert isinstance(error, PoolClosed)
        assert values == list(range(len(values)))
        assert server.regions == {}


def test_views_outlive_their_stream_and_its_session() -> None:
    with flowing(slots=2) as (_, session):
        stream = session.stream(range(2), write=fill, read=view_of)
        views = list(stream)
        session.close()
        assert [float(view[0]) for view in views] == [0, 2]


def test_a_fork_in_mid_stream_leaves_it_to_the_parent(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = shared
    stream = session.stream(range(30), write=fill, read=number_of)
    values = [next(stream)]
    eventually(lambda: all_came(session), "all replies have come")
    # Others wait to be handed out then.
    values.append(next(stream))

    def use() -> None:
        # What it would find there is the parent's, and so is the bell.
        monkeypatch.setattr(Board, "wait", lambda *_: pytest.fail("it looked"))
        with pytest.raises(ForkedSession):
            next(stream)
        assert list(stream) == []

    assert in_a_child(use) == ""
    assert [*values, *stream] == list(range(30))


@pytest.mark.parametrize("where", ["items", "write", "read"])
def test_a_child_that_goes_on_with_a_stream_harms_nothing(where: str) -> None:
    """Whatever it finds on connections that are the parent's is not its to repair."""
    home = os.getpid()
    near, far = os.pipe()
    connection = Connection(replay=True)
    with flowing(slots=SLOTS, connection=connection) as (_, session):

        def fork(name: str, number: float) -> None:
            if (name, number) == (where, BAD):
                eventually(lambda: all_came(session), "all replies have come")
                if child := os.fork():
                    os.waitpid(child, 0)

        def items() -> Iterator[int]:
            for number in range(20):
                fork("items", number)
                yield number

        def write(lease: Lease, number: float) -> None:
            fill(lease, number)
            fork("write", number)

        def read(number: float, result: Result) -> float:
            fork("read", number)
            return number_of(number, result)

        values, error = outcome(session.stream(items(), write=write, read=read))
        if os.getpid() != home:
            os.write(far, type(error).__name__.encode())
            os._exit(0)
        os.close(far)
        assert (values, error) == (list(range(20)), None)
        with os.fdopen(near) as told:
            assert told.read() == "ForkedSession"
        assert session.stats().retries == 0
        all_free(session)


@pytest.mark.filterwarnings("ignore:<Session .* was dropped:ResourceWarning")
def test_a_dropped_session_lives_as_long_as_its_stream() -> None:
    with flowing(slots=2) as (server, session):
        other = Session(server.url, "doubling", slots=2, shapes={"X": (8,)})
        stream = other.stream(range(30), write=fill, read=number_of)
        del other
        assert list(stream) == list(range(30))
        session.close()
        assert server.regions == {}
