"""Connections of a stream, which go from item to item: what ends them, what lies there.

None is used that has ended, however seldom they are looked at.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmlane import Lease, ProtocolError, board, streams, upcoming
from shmlane.testing import Answer, Truncate
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import slots_of
from tests.unit.flowing import (
    LIMIT,
    SIZE,
    Pair,
    all_came,
    ends,
    fill,
    flowing,
    item,
    number_of,
)

SLOTS = 4


def test_connections_are_not_looked_at_one_by_one(
    single: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But before the first item, and where it took long to get the next one."""
    looks: list[bool] = []
    look: Any = HttpConnection.is_quiet

    def is_quiet(self: HttpConnection) -> bool:
        looks.append(look.fget(self))
        return looks[-1]

    _, session = single
    monkeypatch.setattr(HttpConnection, "is_quiet", property(is_quiet))
    monkeypatch.setattr(upcoming, "_SLOW", LIMIT)
    for fresh, count in ((LIMIT, 1), (0.0, 9)):
        monkeypatch.setattr(streams, "_FRESH", fresh)
        looks.clear()
        stream = session.stream(range(9), write=fill, read=number_of)
        assert list(stream) == list(range(9))
        assert looks == [True] * count


@pytest.mark.parametrize("slots", [1, SLOTS])
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_connections_that_end_while_an_item_is_written_cost_nothing(
    memory: str, slots: int
) -> None:
    """The first of several whose replies have been read: nothing is in flight then."""

    def write(lease: Lease, number: float) -> None:
        fill(lease, number)
        if number in (slots - 1, slots):
            eventually(lambda: all_came(session), "all replies have come")
        if number == slots:
            server.restart()
            eventually(lambda: ends(session) == slots, "the ends of all have come")
            # What was seen of the connections before that counts for so long.
            over = time.monotonic() + streams._FRESH
            eventually(lambda: time.monotonic() > over, "that time is over")

    with flowing(slots=slots, memory=memory) as (server, session):
        session.warmup()
        stream = session.stream(range(4 * slots), write=write, read=number_of)
        assert list(stream) == list(range(4 * slots))
        assert session.stats().lost == 0
        all_free(session)


def test_connections_that_end_while_they_are_looked_at_cost_nothing(
    single: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look tells of the moment when it began, however long it takes."""
    server, session = single
    look, looks = board.Board.stirred, itertools.count()

    def stirred(self: board.Board[Any]) -> set[int]:
        found = look(self)
        if next(looks) == 3:
            server.restart()
            eventually(lambda: ends(session) == 1, "the end of the connection has come")
            over = time.monotonic() + streams._FRESH
            eventually(lambda: time.monotonic() > over, "what was seen is old")
        return found

    monkeypatch.setattr(board.Board, "stirred", stirred)
    stream = session.stream(range(9), write=fill, read=number_of)
    assert list(stream) == list(range(9))
    assert next(looks) > 3


@pytest.mark.parametrize("user", ["source", "write"])
def test_a_connection_that_ended_when_it_was_used_in_between_costs_nothing(
    user: str, single: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However lately the stream has looked at it: that was before."""
    server, session = single
    monkeypatch.setattr(streams, "_FRESH", LIMIT)

    def use(infer: Callable[[], Any]) -> None:
        server.script(Truncate(10**6))
        infer()
        eventually(lambda: ends(session) == 1, "the end of the connection has come")

    def items() -> Iterator[float]:
        for number in range(9):
            if user == "source":
                use(lambda: session.infer(item(9), timeout=LIMIT))
            yield number

    def write(lease: Lease, number: float) -> None:
        fill(lease, number)
        if user == "write":
            use(lease.infer)

    stream = session.stream(items(), write=write, read=number_of)
    assert list(stream) == list(range(9))


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_what_was_seen_of_one_connection_tells_nothing_of_another(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the next item is on another slot, which looks as if nobody had it."""
    monkeypatch.setattr(streams, "_FRESH", LIMIT)
    with flowing(slots=2, memory=memory) as (server, session):
        session.warmup()

        def items() -> Iterator[float]:
            yield 0
            with session.lease() as lease:
                # This one has the slot of the item before, and the next has the other.
                mine = lease.held
                (other,) = (each for each in slots_of(session) if each is not mine)
                assert mine is not None
                other.epoch = mine.epoch
                server.restart()
                eventually(lambda: ends(session) == 2, "both connections have ended")
                yield 1
            yield 2

        stream = session.stream(items(), write=fill, read=number_of, in_flight=1)
        assert list(stream) == [0, 1, 2]
        all_free(session)


@pytest.mark.parametrize("size", [SIZE, 40_000])
def test_what_comes_behind_a_reply_answers_no_later_item(size: int) -> None:
    """As from something in between that repeats each reply once more, one too late."""
    sent: list[bytes] = [b"", b""]

    def repeat(reply: bytes) -> bytes:
        sent.append(reply)
        return reply + sent[-2]

    whole = {"X": (size,)}, {"Y": (size,)}
    with flowing(slots=1, memory="wire", shapes=whole[0], outputs=whole[1]) as pair:
        server, session = pair
        session.warmup()
        server.script(*[Answer(repeat)] * 20)
        stream: Any = session.stream(
            map(float, range(20)),
            write=lambda lease, number: lease["X"].fill(number),
            read=lambda _, result: float(result["Y"][-1]) / 2,
            return_exceptions=True,
        )
        for number, found in enumerate(stream):
            assert found == number or isinstance(found, ProtocolError)
        # A large reply is received to its end, and what lies behind it is found before
        # the next request is sent.
        assert not stream.failed or size == SIZE
        all_free(session)


@pytest.mark.parametrize("slots", [1, SLOTS])
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_connection_that_ended_behind_its_reply_costs_nothing(
    memory: str, slots: int
) -> None:
    with flowing(slots=slots, memory=memory) as (server, session):
        session.warmup()
        connected, scripted = session.stats().connections, 0

        def all_ended() -> bool:
            """Whether the end of each connection that is to end has come, too."""
            renewed = session.stats().connections - connected
            waiting = len(server.faults)
            return ends(session) == scripted - waiting - renewed

        stream = session.stream(range(20 * slots), write=fill, read=number_of)
        for number, value in enumerate(stream):
            assert value == number
            eventually(lambda: all_came(session), "all replies have come")
            eventually(all_ended, "so have the ends of their connections")
            if number % 5 == 0:
                # The next request is answered in full, and its connection ends then.
                server.script(Truncate(10**6))
                scripted += 1
        all_free(session)


def test_replies_that_end_their_connection_are_no_retries(single: Pair) -> None:
    server, session = single
    before = session.stats().connections

    def announced(reply: bytes) -> bytes:
        return reply.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)

    server.script(*[Answer(announced)] * 9)
    assert list(session.stream(range(9), write=fill, read=number_of)) == list(range(9))
    assert session.stats().retries == 0
    # The last one leaves its connection to whoever comes next.
    assert session.stats().connections == before + 8
