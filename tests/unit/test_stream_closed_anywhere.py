"""A session that is closed at any moment of its own stream, as by a signal handler."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from shmlane import (
    Lease,
    PoolClosed,
    ProtocolError,
    RequestLost,
    Result,
    engine,
    exchange,
    fleet,
    flights,
    gathering,
    leases,
    passages,
    session,
    session_base,
    streams,
    upcoming,
)
from shmlane.testing import Garbage, Reset
from tests.polling import eventually
from tests.unit.asked import asked
from tests.unit.flowing import LIMIT, Gates, fill, flowing, number_of, outcome
from tests.unit.one_slot import files_of, one_slot, serving

ITEMS = 3
WHERE = (exchange, fleet, flights, passages, session, streams, upcoming)
FILES = {module.__file__ for module in WHERE}


class At:
    """Calls `action` once, before line number `moment` that runs of these files."""

    def __init__(
        self,
        moment: int,
        action: Callable[[], object],
        *,
        files: Container[str | None] = FILES,
    ) -> None:
        self._left = moment
        self._action = action
        self._files = files

    @property
    def was_reached(self) -> bool:
        return self._left < 0

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._left -= 1
            if self._left == -1:
                sys.settrace(None)
                self._action()
        return self


def in_time(begin: Callable[[], Future[None]]) -> None:
    begin().result(LIMIT)


@pytest.mark.parametrize(
    ("slots", "least"),
    [(1, 3), (2, 3), pytest.param(2, 2, id="2, whose replies are waited for together")],
)
def test_a_stream_ends_and_nothing_is_left(
    slots: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_LEAST_IN_FLIGHT", least)
    monkeypatch.setattr(gathering, "_PART", 1)
    moment, reached = 0, True
    while reached:
        with flowing(slots=slots) as (server, session):
            stream = session.stream(range(ITEMS), write=fill, read=number_of)
            at = At(moment, session.close)
            begun = time.monotonic()
            sys.settrace(at)
            try:
                values, error = outcome(stream)
            finally:
                sys.settrace(None)
            # It waits for nothing that nobody will read.
            assert time.monotonic() - begun < LIMIT / 2, moment
            del stream
            session.close()
            assert values == list(range(len(values))), moment
            assert isinstance(error, PoolClosed) or len(values) == ITEMS, error
            assert (server.regions, files_of(server)) == ({}, []), moment
        moment, reached = moment + 1, at.was_reached
    assert moment > 50


def in_turn(*actions: Callable[[], object]) -> None:
    for action in actions:
        action()


def test_a_stream_that_is_just_being_left_ends_as_well() -> None:
    """What it was leaving just then may stay for the next session."""
    watched = (fleet, leases, session_base, streams)
    files = {module.__file__ for module in watched}
    moment, reached = 0, True
    while reached:
        # Two are in flight, always.
        gates = Gates({number: threading.Event() for number in (1, 2)})
        with flowing(slots=2, gates=gates) as (_, session):
            close = functools.partial(in_turn, gates.open_all, session.close)
            stream = session.stream(range(9), write=fill, read=number_of)
            assert next(stream) == 0
            at = At(moment, close, files=files)
            begun = time.monotonic()
            sys.settrace(at)
            try:
                stream.close()
            finally:
                sys.settrace(None)
            close()
            assert time.monotonic() - begun < LIMIT / 2, moment
        moment, reached = moment + 1, at.was_reached
    assert moment > 20


def test_a_session_that_its_own_thread_is_opening_is_closed_in_the_end() -> None:
    files = {engine.__file__, session_base.__file__}
    moment, reached = 0, True
    with serving() as server:
        while reached:
            opened = one_slot(server.url)
            at = At(moment, opened.close, files=files)
            sys.settrace(at)
            try:
                opened.open()
            except PoolClosed:
                assert at.was_reached
            finally:
                sys.settrace(None)
            reached = at.was_reached
            if reached:
                with pytest.raises(PoolClosed):
                    opened.lease()
            opened.close()
            assert (server.regions, files_of(server)) == ({}, []), moment
            moment += 1
    assert moment > 50


@pytest.mark.parametrize("where", ["write", "read"])
def test_a_stream_whose_own_functions_infer_ends_as_any_other(where: str) -> None:
    """Their inference goes on, and what it is for: closing cannot wait for it."""
    leases: dict[float, Lease] = {}
    gates = Gates()
    gate = gates.shut(9)

    def infer(number: float) -> None:
        if number == 1:
            fill(leases[number], 9)
            interrupting.start()
            leases[number].infer()

    def write(lease: Lease, number: float) -> None:
        leases[number] = lease
        if where == "write":
            infer(number)
        fill(lease, number)

    def read(number: float, result: Result) -> float:
        value = number_of(number, result)
        if where == "read":
            infer(number)
        return value

    with flowing(slots=1, gates=gates) as (server, opened):

        def interrupt() -> None:
            count = 2 if where == "write" else 3
            eventually(lambda: len(asked(server)) == count, "its request has come")
            signal.pthread_kill(home, signal.SIGUSR1)

        def close(*_: object) -> None:
            opened.close()
            gate.set()

        home, interrupting = threading.get_ident(), threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGUSR1, close)
        try:
            values, error = outcome(opened.stream(range(3), write=write, read=read))
        finally:
            signal.signal(signal.SIGUSR1, before)
        interrupting.join()
        assert isinstance(error, PoolClosed)
        assert values == [0, 1]
        assert (server.regions, files_of(server)) == ({}, [])


def test_a_stream_may_end_in_another_thread_while_its_own_closes_the_session() -> None:
    """As one does that is dropped: the collector runs anywhere."""
    moment, reached = 0, True
    while reached:
        with flowing(slots=2) as (server, opened), ThreadPoolExecutor(1) as pool:
            stream = opened.stream(range(9), write=fill, read=number_of)
            assert next(stream) == 0
            ending = functools.partial(pool.submit, stream.close)
            at = At(moment, functools.partial(in_time, ending))
            sys.settrace(at)
            try:
                opened.close()
            finally:
                sys.settrace(None)
            assert (server.regions, files_of(server)) == ({}, []), moment
        moment, reached = moment + 1, at.was_reached
    assert moment > 10


def test_a_stream_belongs_to_the_thread_that_asked_last() -> None:
    """Which closes the session without a wait for what it would have to read itself."""
    with flowing(slots=2) as (server, opened), ThreadPoolExecutor(1) as pool:
        stream = opened.stream(range(9), write=fill, read=number_of)
        assert pool.submit(next, stream).result(LIMIT) == 0
        assert next(stream) == 1
        begun = time.monotonic()
        opened.close()
        assert time.monotonic() - begun < LIMIT / 2
        assert (server.regions, files_of(server)) == ({}, [])


def test_closing_waits_for_what_ctrl_c_left_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with flowing(slots=1) as (server, opened):
        stream = opened.stream(range(ITEMS), write=fill, read=number_of)
        assert next(stream) == 0
        with monkeypatch.context() as patched:
            patched.setattr(exchange.Exchange, "matches", interrupt)
            # Whoever keeps the error keeps the stream.
            with pytest.raises(KeyboardInterrupt) as kept:
                next(stream)
        opened.close()
        assert (server.regions, files_of(server)) == ({}, [])
        assert kept.traceback


@pytest.mark.parametrize(
    ("fault", "expected"), [(Reset(), RequestLost), (Garbage(), ProtocolError)]
)
def test_closing_waits_for_what_was_lost_before(
    fault: Reset | Garbage, expected: type[Exception]
) -> None:
    with flowing(slots=1) as (server, opened):
        stream = opened.stream(
            range(ITEMS), write=fill, read=number_of, return_exceptions=True
        )
        assert next(stream) == 0
        server.script(fault)
        # The next one may be on its way already.
        while not isinstance(next(stream), expected):
            pass
        opened.close()
        assert (server.regions, files_of(server)) == ({}, [])
