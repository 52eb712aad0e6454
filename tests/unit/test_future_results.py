"""Results that have their slot, the thread that brings them, and the end of both."""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmlane import (
    ForkedSession,
    InferFailed,
    InferTimeout,
    LeaseExpired,
    LeaseTimeout,
    PoolClosed,
    Session,
    receiver,
)
from shmlane.inventory import clean_up
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import slots_of
from tests.unit.children import run_python
from tests.unit.flowing import (
    LIMIT,
    Pair,
    answer,
    flowing,
    in_a_child,
    is_free,
    is_idle,
    item,
    open_descriptors,
    owned,
    receiver_of,
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


@pytest.mark.usefixtures("uncollected")
def test_an_error_keeps_none_of_the_memory_that_was_being_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stuck(_line: HttpConnection, _box: object, _deadline: Deadline) -> bool:
        raise InferTimeout("it reads nothing")

    with flowing(slots=1, memory="wire") as (_, session):
        with monkeypatch.context() as patch:
            patch.setattr(HttpConnection, "_send_some", stuck)
            future = session.submit(item(1))
        with pytest.raises(InferTimeout):
            future.result(LIMIT)
        assert future.done()
        assert is_free(session)


def test_views_of_a_result_outlive_it(shared: Pair) -> None:
    _, session = shared
    views = []
    for number in range(SLOTS):
        with owned(session, number).result(LIMIT) as result:
            views.append(result["Y"])
    assert session.stats().pinned == SLOTS
    for number in range(3 * SLOTS):
        assert answer(session.submit(item(10 + number))) == 10 + number
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
        assert answer(waiting.result(LIMIT)) == 9
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
        assert answer(session.submit(item(number))) == number
    assert receiver_of(session).is_busy
    assert starts == 1
    is_idle(session)
    assert answer(session.submit(item(1))) == 1
    assert starts == 2
    is_idle(session)


def test_a_thousand_futures_leave_no_descriptor_and_no_thread() -> None:
    with flowing(slots=8) as (_, session):
        session.warmup()
        gc.collect()
        before, threads = open_descriptors(), threading.active_count()
        futures = [session.submit(item(number)) for number in range(1000)]
        assert [answer(future) for future in futures] == list(range(1000))
        is_idle(session)
        eventually(lambda: open_descriptors() <= before, "descriptors are closed")
        eventually(lambda: threading.active_count() <= threads, "threads have ended")
        assert session.stats().connections == 8


def test_a_future_between_two_looks_of_the_thread_is_not_overlooked(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is about to end whenever the next one comes."""
    _, session = shared
    monkeypatch.setattr(receiver, "_LINGER", 0.0)
    for number in range(200):
        assert answer(session.submit(item(number))) == number
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
        assert [answer(future) for future in futures] == list(range(SLOTS))
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


def test_a_session_that_is_dropped_answers_its_futures_first() -> None:
    with flowing() as (server, session):

        def drop(told: pytest.WarningsRecorder) -> None:
            dropped = Session(server.url, "doubling", slots=2, shapes={"X": (8,)})
            with server.hold():
                futures = [dropped.submit(item(number)) for number in range(2)]
                server.wait_for(2)
                del dropped
            assert [answer(future) for future in futures] == [0, 1]
            # The thread that read the replies says so when the session has ended.
            eventually(lambda: list(told), "the session has ended")

        with pytest.warns(ResourceWarning, match="Session .* was dropped") as told:
            drop(told)
        session.close()
        assert server.regions == {}


def test_a_fork_leaves_futures_to_the_parent(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        futures = [session.submit(item(0)), session.submit(item(1))]
        kept = owned(session, 2)
        server.wait_for(SLOTS)

        def use() -> None:
            with pytest.raises(ForkedSession):
                session.submit(item(9))
            assert futures[0].cancel()
            with pytest.raises(TimeoutError):
                futures[1].result(0.01)
            kept.cancel()
            session.close()

        assert in_a_child(use) == ""
    assert [answer(future) for future in futures] == [0, 1]
    with kept.result(LIMIT) as result:
        assert value_of(result) == 2
    all_free(session)
    assert session.stats().connections == SLOTS


EXIT = """
import sys
import numpy as np
from shmlane import Session

session = Session(sys.argv[1], "doubling", slots=2, shapes={"X": (8,)})
for number in range(2):
    future = session.submit({"X": np.full(8, number, np.float32)})
    future.add_done_callback(lambda done: print(type(done.exception()).__name__))
"""


def test_futures_end_with_the_interpreter(shared: Pair) -> None:
    server, session = shared
    with server.hold():
        assert run_python(EXIT, server.url) == "PoolClosed\n" * 2
        # What it had sent may still lie in its connections.
        server.wait_for(2)
    eventually(lambda: server.in_model == 0)
    clean_up(only=server.url)
    assert len(server.regions) == SLOTS
    assert session.stats().free == SLOTS


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
