"""Futures when the server, the machine or the order of steps is in the way."""

from __future__ import annotations

import _thread
import errno
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import (
    Connection,
    InferTimeout,
    RequestLost,
    RequestOptions,
    ServerUnreachable,
    receiver,
)
from shmlane.board import Board
from shmlane.testing import Close, Delay, ScriptedServer, Status
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import asked
from tests.unit.flowing import (
    LIMIT,
    Pair,
    answer,
    fill,
    flowing,
    is_free,
    is_idle,
    item,
)

SLOTS = 3


@pytest.fixture(params=["system", "wire"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with flowing(slots=SLOTS, memory=request.param) as pair:
        yield pair


@pytest.fixture
def shared() -> Iterator[Pair]:
    with flowing(slots=SLOTS) as pair:
        yield pair


# --- faults ---------------------------------------------------------------------------


def test_a_server_that_forgot_is_told_again(shared: Pair) -> None:
    server, session = shared
    for number in range(4):
        assert answer(session.submit(item(number))) == number
        server.unregister_all()
    futures = [session.submit(item(number)) for number in range(SLOTS)]
    assert [answer(future) for future in futures] == list(range(SLOTS))
    assert session.stats().retries >= 4
    all_free(session)


def test_dead_idle_connections_are_replaced(pair: Pair) -> None:
    server, session = pair
    for number in range(3):
        futures = [session.submit(item(number)) for _ in range(SLOTS)]
        assert [answer(future) for future in futures] == [number] * SLOTS
        server.restart()
    all_free(session)


def test_a_restart_in_between_loses_what_is_in_flight(shared: Pair) -> None:
    server, session = shared
    server.hold()
    futures = [session.submit(item(number)) for number in range(SLOTS)]
    server.wait_for(SLOTS)
    server.restart()
    server.release()
    for future in futures:
        with pytest.raises(RequestLost) as caught:
            future.result(LIMIT)
        assert caught.value.retryable
    all_free(session)
    assert answer(session.submit(item(1))) == 1


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_what_is_lost_is_sent_again_if_that_is_allowed(memory: str) -> None:
    connection = Connection(replay=True)
    with flowing(slots=2, memory=memory, connection=connection) as (server, session):
        server.script(Close())
        assert answer(session.submit(item(1))) == 1
        server.script(Close(), Close())
        # Once only.
        assert isinstance(session.submit(item(2)).exception(LIMIT), RequestLost)
        all_free(session)
        assert len(asked(server)) == 4


def test_a_server_that_is_away_is_an_error_of_the_future(shared: Pair) -> None:
    server, session = shared
    assert answer(session.submit(item(1))) == 1
    server.stop()
    with session.lease() as lease:
        fill(lease, 2)
        future = lease.submit(timeout=0.05)
    with pytest.raises((ServerUnreachable, InferTimeout)):
        future.result(LIMIT)
    assert is_free(session)
    server.start()
    assert answer(session.submit(item(3))) == 3


def test_many_replies_that_nobody_trusts_end_each_future(shared: Pair) -> None:
    server, session = shared
    server.script(*[Status(502, "bad gateway")] * 6)
    for _ in range(6):
        assert isinstance(session.submit(item(1)).exception(LIMIT), RequestLost)
    all_free(session)
    assert session.stats().drains == 6


def test_a_future_without_a_thread_fails(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, session = shared

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        future = session.submit(item(1))
        with pytest.raises(RequestLost, match="no thread can be started"):
            future.result(LIMIT)
    assert answer(session.submit(item(2))) == 2
    all_free(session)
    assert len(asked(server)) == 2


def test_without_descriptors_time_limits_are_kept(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = shared
    assert answer(session.submit(item(1))) == 1
    is_idle(session)
    monkeypatch.setattr(receiver, "_RETRY_PAUSE", 0.005)

    def refuse() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", refuse)
        future = session.submit(item(2), timeout=0.05)
        longer = session.submit(item(3))
        with pytest.raises(InferTimeout):
            future.result(LIMIT)
    assert answer(longer) == 3
    all_free(session)


def test_a_connection_that_cannot_be_watched_is_lost(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = shared

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Board, "expect", refuse)
        future = session.submit(item(1))
        with pytest.raises(RequestLost, match="No space left"):
            future.result(LIMIT)
    all_free(session)
    assert answer(session.submit(item(2))) == 2


# --- sequences ------------------------------------------------------------------------


def steps(server: ScriptedServer) -> list[int]:
    return [int(each.id) for each in asked(server)]


def step(number: int) -> RequestOptions:
    return RequestOptions(sequence_id=5, sequence_start=number == 0, id=str(number))


def test_steps_submitted_one_after_another_stay_in_order(pair: Pair) -> None:
    server, session = pair
    futures = [session.submit(item(n), options=step(n)) for n in range(12)]
    assert [answer(future) for future in futures] == list(range(12))
    assert steps(server) == list(range(12))


def test_a_step_that_has_to_be_sent_again_is_not_overtaken(shared: Pair) -> None:
    server, session = shared
    for number in range(3):
        session.submit(item(number), options=step(number)).result(LIMIT)
    server.unregister_all()
    registered = threading.Event()
    server.script(Delay(registered), path="/register")
    third = session.submit(item(3), options=step(3))
    # Refused, it is to be sent again, and the server has nothing of it meanwhile.
    eventually(lambda: server.requests[-1].path.endswith("/register"))
    with ThreadPoolExecutor(1) as pool:
        fourth = pool.submit(session.submit, item(4), options=step(4))
        with pytest.raises(TimeoutError):
            fourth.result(0.05)
        assert 4 not in steps(server)
        registered.set()
        assert answer(fourth.result(LIMIT)) == 4
    assert answer(third) == 3
    # Refused ones included.
    assert steps(server) == sorted(steps(server))


def test_a_cancelled_step_is_waited_for(pair: Pair) -> None:
    server, session = pair
    reply = threading.Event()
    server.script(Delay(reply))
    first = session.submit(item(0), options=step(0))
    server.wait_for(1)
    assert first.cancel()
    future = session.submit(item(1), options=step(1), timeout=0.05)
    with pytest.raises(InferTimeout, match="was not sent"):
        future.result(LIMIT)
    reply.set()
    assert answer(session.submit(item(1), options=step(1))) == 1
    all_free(session)
