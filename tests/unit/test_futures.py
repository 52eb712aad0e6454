"""Futures of requests: what any future of Python does, and slots that come back."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import itertools
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmlane import (
    Connection,
    InferFailed,
    InferTimeout,
    InputMissing,
    LeaseExpired,
    LeaseTimeout,
    PoolClosed,
    RequestLost,
    RequestOptions,
    ServerUnreachable,
    Session,
    UsageError,
    receiver,
)
from shmlane.board import Board
from shmlane.futures import OwnedResult
from shmlane.testing import Close, Delay, ScriptedServer, Status
from tests.polling import eventually
from tests.sessions import Array, all_free
from tests.unit.asked import asked, slots_of
from tests.unit.flowing import (
    LIMIT,
    Pair,
    fill,
    flowing,
    is_idle,
    item,
    open_descriptors,
    receiver_of,
    value_of,
)

SLOTS = 3
Outputs = dict[str, Array]


@pytest.fixture(params=["system", "wire"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with flowing(slots=SLOTS, memory=request.param) as pair:
        yield pair


@pytest.fixture
def shared() -> Iterator[Pair]:
    with flowing(slots=SLOTS) as pair:
        yield pair


def value(future: Future[Outputs]) -> float:
    return value_of(future.result(LIMIT))


def owned(session: Session, number: float) -> Future[OwnedResult]:
    with session.lease() as lease:
        fill(lease, number)
        return lease.submit()


def is_free(session: Session) -> bool:
    stats = session.stats()
    return stats.free == stats.slots


# --- results and errors ---------------------------------------------------------------


def test_a_future_gives_the_outputs_of_its_own_inputs(pair: Pair) -> None:
    _, session = pair
    futures = [session.submit(item(number)) for number in range(30)]
    assert [value(future) for future in futures] == list(range(30))
    assert all(future.done() and not future.running() for future in futures)
    all_free(session)


def test_inputs_may_be_changed_after_submit(pair: Pair) -> None:
    server, session = pair
    inputs = item(1)
    with server.hold():
        future = session.submit(inputs)
        server.wait_for(1)
        inputs["X"][...] = 9
    assert value(future) == 1


def test_outputs_are_copies_that_hold_no_slot(shared: Pair) -> None:
    _, session = shared
    kept = [session.submit(item(number)).result(LIMIT) for number in range(4 * SLOTS)]
    all_free(session)
    assert [value_of(each) for each in kept] == list(range(4 * SLOTS))
    assert session.stats().spare_slots == 0


def test_what_the_model_refuses_is_the_exception_of_the_future(pair: Pair) -> None:
    _, session = pair
    future = session.submit(item(-1))
    assert isinstance(future.exception(LIMIT), InferFailed)
    with pytest.raises(InferFailed, match="takes no -1"):
        future.result()
    all_free(session)
    assert value(session.submit(item(1))) == 1


def test_what_is_wrong_with_a_call_is_raised_at_once(shared: Pair) -> None:
    server, session = shared
    with pytest.raises(InputMissing), session.lease() as lease:
        lease.submit()
    nonsense: Any = 7
    with session.lease() as lease:
        fill(lease, 1)
        with pytest.raises(UsageError):
            lease.submit(options=nonsense)
    with pytest.raises(UsageError):
        session.submit(item(1), timeout=-1)
    with pytest.raises(UsageError):
        session.submit(nonsense)
    assert asked(server) == []
    all_free(session)


def test_a_future_can_be_waited_for_in_parts(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        future = session.submit(item(4))
        for _ in range(2):
            with pytest.raises(TimeoutError):
                future.result(0.01)
            with pytest.raises(TimeoutError):
                future.exception(0)
        assert not future.done()
        assert session.stats().in_flight == 1
    assert value(future) == 4


def test_submit_waits_for_a_slot_as_lease_does(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        futures = [session.submit(item(number)) for number in range(SLOTS)]
        with pytest.raises(LeaseTimeout, match=f"{SLOTS} in flight"):
            session.submit(item(9), timeout=0.01)
    assert [value(future) for future in futures] == list(range(SLOTS))


def test_the_lease_ends_with_submit(shared: Pair) -> None:
    server, session = shared
    with server.hold(), session.lease() as lease:
        fill(lease, 1)
        future = lease.submit()
        for use in (lease.infer, lease.submit, lambda: lease["X"]):
            with pytest.raises(LeaseExpired):
                use()
        lease.release()
        assert session.stats().in_flight == 1
    with future.result(LIMIT) as result:
        assert value_of(result) == 1
    all_free(session)


def test_many_threads_may_submit(pair: Pair) -> None:
    _, session = pair
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def ask(thread: int) -> list[float]:
        numbers = range(100 * thread, 100 * thread + 25)
        futures = [session.submit(item(number)) for number in numbers]
        return [value(future) for future in futures]

    try:
        with ThreadPoolExecutor(6) as pool:
            for thread, found in enumerate(pool.map(ask, range(6))):
                assert found == [100 * thread + number for number in range(25)]
    finally:
        sys.setswitchinterval(before)
    all_free(session)
    is_idle(session)


# --- callbacks ------------------------------------------------------------------------


def test_callbacks_are_called_in_order_and_at_once_when_it_is_done(
    shared: Pair,
) -> None:
    server, session = shared
    told: list[tuple[str, float]] = []
    with server.hold():
        future = session.submit(item(5))
        future.add_done_callback(lambda done: told.append(("a", value(done))))
        future.add_done_callback(lambda done: told.append(("b", value(done))))
    eventually(lambda: len(told) == 2)
    future.add_done_callback(lambda done: told.append(("late", value(done))))
    assert told == [("a", 5), ("b", 5), ("late", 5)]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_harms_nobody(
    shared: Pair, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    server, session = shared
    ended: list[Future[Outputs]] = []

    def fail(future: Future[Outputs]) -> None:
        ended.append(future)
        raise error

    with server.hold():
        futures = [session.submit(item(number)) for number in range(SLOTS)]
        server.wait_for(SLOTS)
        for future in futures:
            future.add_done_callback(fail)
    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        for number, future in enumerate(futures):
            assert value(future) == number
        eventually(lambda: len(ended) == SLOTS)
        all_free(session)
    assert "Traceback" in caplog.text
    is_idle(session)


def test_a_callback_may_submit_again(pair: Pair) -> None:
    _, session = pair
    values: list[float] = []
    done = threading.Event()

    def go_on(future: Future[Outputs]) -> None:
        values.append(value(future))
        if len(values) < 40:
            session.submit(item(len(values))).add_done_callback(go_on)
        else:
            done.set()

    session.submit(item(0)).add_done_callback(go_on)
    assert done.wait(LIMIT)
    assert values == list(range(40))
    all_free(session)
    is_idle(session)


@pytest.mark.parametrize("wait", [True, False])
def test_a_callback_may_close_the_session(wait: bool) -> None:
    """It does not wait for replies that only its own thread could read."""
    with flowing(slots=SLOTS) as (server, session):
        first, second = Delay(go := threading.Event()), Delay(threading.Event())
        server.script(first, second)
        one, other = session.submit(item(1)), session.submit(item(2))
        server.wait_for(2)
        closed = threading.Event()

        def close(_: Future[Outputs]) -> None:
            session.close(wait=wait)
            closed.set()

        one.add_done_callback(close)
        go.set()
        assert value(one) == 1
        assert closed.wait(LIMIT / 2)
        with pytest.raises(PoolClosed):
            other.result(LIMIT)
        assert isinstance(second.until, threading.Event)
        second.until.set()
        is_idle(session)


# --- cancelling -----------------------------------------------------------------------


def test_a_future_in_flight_can_be_cancelled_and_its_slot_is_late(
    shared: Pair,
) -> None:
    server, session = shared
    with server.hold():
        future = session.submit(item(1))
        server.wait_for(1)
        assert future.cancel()
        assert future.cancelled()
        assert future.done()
        with pytest.raises(CancelledError):
            future.result(0)
        assert (session.stats().late, session.stats().free) == (1, SLOTS - 1)
    all_free(session)
    assert session.stats().late_replies == 1
    is_idle(session)


def test_a_cancelled_request_over_the_wire_is_given_up_at_once() -> None:
    with flowing(slots=1, memory="wire") as (server, session):
        with server.hold():
            future = session.submit(item(1))
            server.wait_for(1)
            assert future.cancel()
            assert is_free(session)
            is_idle(session)
        assert value(session.submit(item(2))) == 2


def test_after_the_reply_nothing_can_be_cancelled(pair: Pair) -> None:
    _, session = pair
    future = session.submit(item(1))
    assert value(future) == 1
    assert not future.cancel()
    assert value(future) == 1


def test_futures_may_be_cancelled_at_any_time(pair: Pair) -> None:
    """While they are sent, in flight, or answered: the next gets its own value."""
    _, session = pair
    for number in range(150):
        future = session.submit(item(number))
        if number % 3:
            for _ in range(number % 7):
                time.sleep(0)
            if future.cancel():
                continue
        assert value(future) == number
    all_free(session)
    is_idle(session)


def test_waiting_for_many_knows_those_that_were_cancelled(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        futures = [session.submit(item(number)) for number in range(SLOTS)]
        server.wait_for(SLOTS)
        done, open_ = concurrent.futures.wait(futures, timeout=0.01)
        assert (len(done), len(open_)) == (0, SLOTS)
        waiting = threading.Thread(target=futures[1].cancel)
        waiting.start()
        done, open_ = concurrent.futures.wait(
            futures, LIMIT, return_when=concurrent.futures.FIRST_COMPLETED
        )
        waiting.join()
        assert done == {futures[1]}
    ended = list(concurrent.futures.as_completed(futures, LIMIT))
    assert sorted(map(id, ended)) == sorted(map(id, futures))
    assert [value(futures[0]), value(futures[2])] == [0, 2]


def test_a_task_may_wait_for_a_future(shared: Pair) -> None:
    server, session = shared

    async def ask() -> list[float]:
        futures = [asyncio.wrap_future(session.submit(item(n))) for n in range(SLOTS)]
        return [value_of(each) for each in await asyncio.gather(*futures)]

    async def leave() -> None:
        future = session.submit(item(7))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.02)
        assert future.cancelled()

    assert asyncio.run(ask()) == list(range(SLOTS))
    with server.hold():
        asyncio.run(leave())
        assert session.stats().late == 1
    all_free(session)


# --- time limits ----------------------------------------------------------------------


def test_a_reply_that_does_not_come_in_time_is_an_error_and_its_slot_is_late(
    shared: Pair,
) -> None:
    server, session = shared
    with server.hold():
        slow = session.submit(item(1), timeout=5 * LIMIT)
        soon = session.submit(item(2), timeout=0.03)
        begun = time.monotonic()
        with pytest.raises(InferTimeout, match=r"within 0.0\d+ s"):
            soon.result(LIMIT)
        assert time.monotonic() - begun < LIMIT / 2
        assert not slow.done()
        assert (session.stats().in_flight, session.stats().late) == (1, 1)
    assert value(slow) == 1
    all_free(session)
    assert session.stats().late_replies == 1


def test_without_a_limit_a_future_waits_for_ever(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        future = session.submit(item(1), timeout=None)
        with pytest.raises(InferTimeout):
            session.submit(item(2), timeout=0.02).result(LIMIT)
        assert not future.done()
    assert value(future) == 1


def test_a_reply_that_came_in_time_counts_though_nobody_could_look(
    shared: Pair,
) -> None:
    server, session = shared
    go, slow, quick = (threading.Event() for _ in range(3))
    server.script(Delay(slow), Delay(quick))
    held, other = session.submit(item(1)), session.submit(item(2), timeout=0.1)
    server.wait_for(2)
    deadline = time.monotonic() + 0.1
    held.add_done_callback(lambda _: go.wait(LIMIT))
    slow.set()
    assert value(held) == 1
    # The thread stands still in the callback while the reply comes.
    quick.set()
    eventually(lambda: server.in_model == 0)
    eventually(lambda: time.monotonic() > deadline + 0.01)
    go.set()
    assert value(other) == 2


# --- faults ---------------------------------------------------------------------------


def test_a_server_that_forgot_is_told_again(shared: Pair) -> None:
    server, session = shared
    for number in range(4):
        assert value(session.submit(item(number))) == number
        server.unregister_all()
    futures = [session.submit(item(number)) for number in range(SLOTS)]
    assert [value(future) for future in futures] == list(range(SLOTS))
    assert session.stats().retries >= 4
    all_free(session)


def test_dead_idle_connections_are_replaced(pair: Pair) -> None:
    server, session = pair
    for number in range(3):
        futures = [session.submit(item(number)) for _ in range(SLOTS)]
        assert [value(future) for future in futures] == [number] * SLOTS
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
    assert value(session.submit(item(1))) == 1


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_what_is_lost_is_sent_again_if_that_is_allowed(memory: str) -> None:
    connection = Connection(replay=True)
    with flowing(slots=2, memory=memory, connection=connection) as (server, session):
        server.script(Close())
        assert value(session.submit(item(1))) == 1
        server.script(Close(), Close())
        # Once only.
        assert isinstance(session.submit(item(2)).exception(LIMIT), RequestLost)
        all_free(session)
        assert len(asked(server)) == 4


def test_a_server_that_is_away_is_an_error_of_the_future(shared: Pair) -> None:
    server, session = shared
    assert value(session.submit(item(1))) == 1
    server.stop()
    with session.lease() as lease:
        fill(lease, 2)
        future = lease.submit(timeout=0.05)
    with pytest.raises((ServerUnreachable, InferTimeout)):
        future.result(LIMIT)
    assert is_free(session)
    server.start()
    assert value(session.submit(item(3))) == 3


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
    assert value(session.submit(item(2))) == 2
    all_free(session)
    assert len(asked(server)) == 2


def test_without_descriptors_time_limits_are_kept(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = shared
    assert value(session.submit(item(1))) == 1
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
    assert value(longer) == 3
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
    assert value(session.submit(item(2))) == 2


# --- sequences ------------------------------------------------------------------------


def steps(server: ScriptedServer) -> list[int]:
    return [int(each.id) for each in asked(server)]


def step(number: int) -> RequestOptions:
    return RequestOptions(sequence_id=5, sequence_start=number == 0, id=str(number))


def test_steps_submitted_one_after_another_stay_in_order(pair: Pair) -> None:
    server, session = pair
    futures = [session.submit(item(n), options=step(n)) for n in range(12)]
    assert [value(future) for future in futures] == list(range(12))
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
        assert value(fourth.result(LIMIT)) == 4
    assert value(third) == 3
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
    assert value(session.submit(item(1), options=step(1))) == 1
    all_free(session)


# --- results that have their slot -----------------------------------------------------


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What goes back does so without the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("how", ["with", "release", "drop", "twice"])
def test_a_result_has_its_slot_until_it_is_let_go(shared: Pair, how: str) -> None:
    _, session = shared
    for number in range(2 * SLOTS):
        result = owned(session, number).result(LIMIT)
        assert value_of(result) == number
        assert (session.stats().leased, session.stats().free) == (1, SLOTS - 1)
        if how == "with":
            with result as same:
                assert same is result
        elif how == "drop":
            del result
        else:
            result.release()
            if how == "twice":
                result.release()
        assert is_free(session)
        if how != "drop":
            with pytest.raises(LeaseExpired):
                result["Y"]
            assert repr(result) == "<Result expired>"


@pytest.mark.usefixtures("uncollected")
def test_a_future_that_is_dropped_gives_the_slot_back(shared: Pair) -> None:
    server, session = shared
    for number in range(2 * SLOTS):
        future = owned(session, number)
        concurrent.futures.wait([future], LIMIT)
        assert session.stats().leased == 1
        del future
        assert is_free(session)
    # Also one that is dropped before its reply.
    with server.hold():
        for number in range(SLOTS):
            owned(session, number)
        server.wait_for(SLOTS)
        assert session.stats().in_flight == SLOTS
    eventually(lambda: is_free(session), lambda: repr(session))


@pytest.mark.usefixtures("uncollected")
def test_errors_keep_no_slot(shared: Pair) -> None:
    server, session = shared
    kept = [owned(session, -1) for _ in range(SLOTS)]
    concurrent.futures.wait(kept, LIMIT)
    assert is_free(session)
    with server.hold():
        kept += [owned(session, 1) for _ in range(SLOTS)]
        assert all(future.cancel() for future in kept[SLOTS:])
    eventually(lambda: is_free(session), lambda: repr(session))


def test_views_of_a_result_outlive_it(shared: Pair) -> None:
    _, session = shared
    views = []
    for number in range(SLOTS):
        with owned(session, number).result(LIMIT) as result:
            views.append(result["Y"])
    assert session.stats().pinned == SLOTS
    for number in range(3 * SLOTS):
        assert value(session.submit(item(10 + number))) == 10 + number
    assert [float(view[0]) for view in views] == [0, 2, 4]
    views[0][...] = 7
    del views
    eventually(lambda: is_free(session), lambda: repr(session))


def test_a_slot_that_a_result_let_go_serves_the_next(shared: Pair) -> None:
    _, session = shared
    results = [owned(session, number).result(LIMIT) for number in range(SLOTS)]
    with pytest.raises(LeaseTimeout, match=f"{SLOTS} leased"):
        session.lease(timeout=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(session.submit, item(9))
        eventually(lambda: session.stats().waits >= 1)
        results.pop().release()
        assert value(waiting.result(LIMIT)) == 9
    assert [value_of(result) for result in results] == [0, 1]


# --- the thread -----------------------------------------------------------------------


def test_a_thread_comes_with_the_first_future_stays_a_while_and_ends(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = shared
    starts = 0
    start = _thread.start_new_thread

    def counted(run: Callable[..., object], arguments: tuple[()]) -> int:
        nonlocal starts
        starts += 1
        return start(run, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", counted)
    monkeypatch.setattr(receiver, "_LINGER", 0.3)
    assert not receiver_of(session).is_busy
    for number in range(20):
        assert value(session.submit(item(number))) == number
    assert receiver_of(session).is_busy
    assert starts == 1
    is_idle(session)
    assert value(session.submit(item(1))) == 1
    assert starts == 2
    is_idle(session)


def test_a_thousand_futures_leave_no_descriptor_and_no_thread() -> None:
    with flowing(slots=8) as (_, session):
        session.warmup()
        gc.collect()
        before, threads = open_descriptors(), threading.active_count()
        futures = [session.submit(item(number)) for number in range(1000)]
        assert [value(future) for future in futures] == list(range(1000))
        is_idle(session)
        assert open_descriptors() <= before
        assert threading.active_count() <= threads
        assert session.stats().connections == 8


def test_a_future_between_two_looks_of_the_thread_is_not_overlooked(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is about to end whenever the next one comes."""
    _, session = shared
    monkeypatch.setattr(receiver, "_LINGER", 0.0)
    for number in range(200):
        assert value(session.submit(item(number))) == number
    is_idle(session)


# --- the end --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_closing_waits_for_futures(memory: str) -> None:
    with flowing(slots=SLOTS, memory=memory) as (server, session):
        server.hold()
        futures = [session.submit(item(number)) for number in range(SLOTS)]
        server.wait_for(SLOTS)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(session.close)
            with pytest.raises(TimeoutError):
                closing.result(0.03)
            with pytest.raises(PoolClosed):
                session.submit(item(9))
            server.release()
            closing.result(LIMIT)
        assert [value(future) for future in futures] == list(range(SLOTS))
        assert server.regions == {}


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_closing_at_once_ends_futures(memory: str) -> None:
    with flowing(slots=SLOTS, memory=memory) as (server, session):
        server.hold()
        futures = [session.submit(item(number)) for number in range(SLOTS)]
        server.wait_for(SLOTS)
        session.close(wait=False)
        for future in futures:
            with pytest.raises(PoolClosed, match="before the reply came"):
                future.result(0)
        server.release()
        is_idle(session)


def test_results_may_be_released_after_the_session_was_closed() -> None:
    with flowing(slots=SLOTS) as (server, session):
        results = [owned(session, number).result(LIMIT) for number in range(SLOTS)]
        session.close()
        assert [value_of(result) for result in results] == list(range(SLOTS))
        view = results[0]["Y"]
        assert len(server.regions) == SLOTS
        for result in results:
            result.release()
        assert server.regions == {}
        assert float(view[0]) == 0


@pytest.mark.filterwarnings("ignore:<Session .* was dropped:ResourceWarning")
def test_a_session_that_is_dropped_answers_its_futures_first() -> None:
    with flowing() as (server, session):
        dropped = Session(server.url, "doubling", slots=2, shapes={"X": (8,)}).open()
        with server.hold():
            futures = [dropped.submit(item(number)) for number in range(2)]
            server.wait_for(2)
            del dropped
        assert [value(future) for future in futures] == [0, 1]
        del futures
        session.close()
        eventually(lambda: server.regions == {}, lambda: repr(server.regions))


def test_slots_of_futures_are_whole(shared: Pair) -> None:
    """After all that, each slot serves, with both of its requests."""
    _, session = shared
    with contextlib.suppress(InferFailed):
        session.submit(item(-1)).result(LIMIT)
    session.submit(item(1)).cancel()
    all_free(session)
    assert len(set(map(id, slots_of(session)))) == SLOTS
    for number in itertools.chain(range(2 * SLOTS), range(3)):
        outputs = session.infer(item(number))
        np.testing.assert_array_equal(outputs["Y"], 2 * item(number)["X"])
