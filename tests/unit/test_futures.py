"""Futures of requests do what any future of Python does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from shmlane import (
    InferFailed,
    InferTimeout,
    InputMissing,
    LeaseExpired,
    LeaseTimeout,
    PoolClosed,
    UsageError,
)
from shmlane.testing import Delay
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import asked
from tests.unit.flowing import (
    LIMIT,
    Outputs,
    Pair,
    all_came,
    answer,
    fill,
    flowing,
    is_free,
    is_idle,
    item,
    let_time_pass,
    value_of,
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


# --- results and errors ---------------------------------------------------------------


def test_a_future_gives_the_outputs_of_its_own_inputs(pair: Pair) -> None:
    _, session = pair
    futures = [session.submit(item(number)) for number in range(30)]
    assert [answer(future) for future in futures] == list(range(30))
    assert all(future.done() and not future.running() for future in futures)
    all_free(session)


def test_inputs_may_be_changed_after_submit(pair: Pair) -> None:
    server, session = pair
    inputs = item(1)
    with server.hold():
        future = session.submit(inputs)
        server.wait_for(1)
        inputs["X"][...] = 9
    assert answer(future) == 1


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
    assert answer(session.submit(item(1))) == 1


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
    assert answer(future) == 4


def test_submit_waits_for_a_slot_as_lease_does(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        futures = [session.submit(item(number)) for number in range(SLOTS)]
        with pytest.raises(LeaseTimeout, match=f"{SLOTS} in flight"):
            session.submit(item(9), timeout=0.01)
    assert [answer(future) for future in futures] == list(range(SLOTS))


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
        return [answer(future) for future in futures]

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
        future.add_done_callback(lambda done: told.append(("a", answer(done))))
        future.add_done_callback(lambda done: told.append(("b", answer(done))))
    eventually(lambda: len(told) == 2)
    future.add_done_callback(lambda done: told.append(("late", answer(done))))
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
            assert answer(future) == number
        eventually(lambda: len(ended) == SLOTS)
        all_free(session)
    assert "Traceback" in caplog.text
    is_idle(session)


def test_a_callback_may_submit_again(pair: Pair) -> None:
    _, session = pair
    values: list[float] = []
    done = threading.Event()

    def go_on(future: Future[Outputs]) -> None:
        values.append(answer(future))
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
        one = session.submit(item(1))
        server.wait_for(1)
        other = session.submit(item(2))
        server.wait_for(2)
        closed = threading.Event()

        def close(_: Future[Outputs]) -> None:
            session.close(wait=wait)
            closed.set()

        one.add_done_callback(close)
        go.set()
        assert answer(one) == 1
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
        assert answer(session.submit(item(2))) == 2


def test_after_the_reply_nothing_can_be_cancelled(pair: Pair) -> None:
    _, session = pair
    future = session.submit(item(1))
    assert answer(future) == 1
    assert not future.cancel()
    assert answer(future) == 1


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
        assert answer(future) == number
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
    assert [answer(futures[0]), answer(futures[2])] == [0, 2]


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
        soon = session.submit(item(2), timeout=0.1)
        begun = time.monotonic()
        with pytest.raises(InferTimeout, match=r"within 0\.\d+ s"):
            soon.result(LIMIT)
        assert time.monotonic() - begun < LIMIT / 2
        assert not slow.done()
        assert (session.stats().in_flight, session.stats().late) == (1, 1)
    assert answer(slow) == 1
    all_free(session)
    assert session.stats().late_replies == 1


def test_without_a_limit_a_future_waits_for_ever(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        future = session.submit(item(1), timeout=None)
        with pytest.raises(InferTimeout):
            session.submit(item(2), timeout=0.02).result(LIMIT)
        assert not future.done()
    assert answer(future) == 1


def test_a_reply_that_came_in_time_counts_though_nobody_could_look(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, session = shared
    go, slow, quick = (threading.Event() for _ in range(3))
    server.script(Delay(slow), Delay(quick))
    held = session.submit(item(1))
    server.wait_for(1)
    other = session.submit(item(2), timeout=LIMIT)
    server.wait_for(2)
    stands_still = threading.Event()

    def stand_still(_: Future[Outputs]) -> None:
        stands_still.set()
        go.wait(LIMIT)

    held.add_done_callback(stand_still)
    slow.set()
    assert answer(held) == 1
    assert stands_still.wait(LIMIT)
    # The thread stands still in the callback while the reply comes.
    quick.set()
    eventually(lambda: all_came(session), "the reply lies in its connection")
    let_time_pass(monkeypatch)
    go.set()
    assert answer(other) == 2
