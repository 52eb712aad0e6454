"""A server that stops, dies, restarts or forgets: the right error, then right data."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from shmlane import (
    InferTimeout,
    Lease,
    LeaseBusy,
    ModelNotReady,
    RequestLost,
    ServerUnreachable,
    Session,
    Timeouts,
)
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import all_free, frame, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")

SHAPES = {"INPUT__0": (1, 1, 1, 8)}
# Connections that are still open delay its end for at most a second.
ARGUMENTS = [
    "--model-control-mode=explicit",
    "--load-model=*",
    "--exit-timeout-secs=1",
]


@pytest.fixture(scope="module")
def shared() -> Iterator[TritonServer]:
    with TritonServer(extra_args=ARGUMENTS) as server:
        yield server


@pytest.fixture
def own_server(shared: TritonServer) -> Iterator[TritonServer]:
    """A server that the test may stop, kill and restart, and leaves answering."""
    if not shared.is_alive:
        shared.start()
    yield shared
    with Session(shared.http_url, "sink") as session:
        assert sink(session, 5) == 5


@contextlib.contextmanager
def stopped(server: TritonServer) -> Iterator[None]:
    """The server does not run, as on a machine that is overloaded."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if server.is_alive:
            os.kill(server.pid, signal.SIGCONT)


def open_sink(
    server: TritonServer,
    *,
    slots: int = 2,
    connect: float = 2.0,
    infer: float = 30.0,
) -> Session:
    limits = Timeouts(connect=connect, infer=infer)
    return Session(
        server.http_url, "sink", slots=slots, shapes=SHAPES, timeouts=limits
    ).open()


def fill(lease: Lease, value: float) -> None:
    lease["INPUT__0"][...] = value


@contextlib.contextmanager
def asking(session: Session, value: float) -> Iterator[Future[float]]:
    """A request in another thread, which is in flight when the block begins."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sink, session, value)
        eventually(lambda: session.stats().in_flight == 1, "a request is in flight")
        yield future


# --- a server that forgets ------------------------------------------------------------


def test_a_restart_between_requests_is_not_noticed(own_server: TritonServer) -> None:
    with open_sink(own_server) as session:
        for end in (own_server.stop, own_server.kill, own_server.kill):
            assert sink(session, 1) == 1
            assert sink(session, 2, size=5000) == 2
            end()
            own_server.start()
        assert sink(session, 9) == 9
        assert all_free(session).slots == 2


def test_a_restart_within_a_lease_keeps_its_inputs(own_server: TritonServer) -> None:
    with open_sink(own_server) as session, session.lease() as lease:
        fill(lease, 4)
        assert lease.infer()["OUTPUT__0"] == [4]
        own_server.restart()
        assert lease.infer()["OUTPUT__0"] == [4]
        assert session.stats().registrations == 3


def test_regions_that_another_client_unregistered_come_back(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=3) as session:
        for size in (8, 5000, 8):
            with session.lease() as first, session.lease() as second:
                for lease in (first, second):
                    lease.view("INPUT__0", (1, 1, 1, size))[...] = size
                assert first.infer()["OUTPUT__0"] == [size]
                status, _ = own_server.call("/v2/systemsharedmemory/unregister", {})
                assert status == 200
                assert not registered(own_server)
                assert second.infer()["OUTPUT__0"] == [size]
        all_free(session)


def test_a_model_that_was_unloaded_is_named_and_may_return(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        own_server.call("/v2/repository/models/sink/unload", {})
        eventually(lambda: "sink" not in own_server.model_names())
        with pytest.raises(ModelNotReady, match="cannot run model 'sink' now") as it:
            sink(session, 1)
        assert it.value.retryable
        all_free(session)
        own_server.call("/v2/repository/models/sink/load", {})
        assert sink(session, 2) == 2
        all_free(session)


# --- a server that is away ------------------------------------------------------------


def test_a_server_that_is_away_is_named_and_may_return(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, connect=0.1) as session:
        own_server.kill()
        with pytest.raises(ServerUnreachable, match=own_server.http_url) as it:
            sink(session, 1)
        assert it.value.retryable
        assert all_free(session).lost == 0
        own_server.start()
        assert sink(session, 2) == 2


def test_a_server_that_comes_back_in_time_is_waited_for(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, connect=30.0) as session:
        own_server.kill()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(sink, session, 6)
            own_server.start()
            assert answer.result() == 6


def test_opening_can_wait_for_the_server(own_server: TritonServer) -> None:
    own_server.kill()
    limits = Timeouts(connect=0.05)
    session = Session(own_server.http_url, "sink", timeouts=limits)
    with pytest.raises(ServerUnreachable, match=own_server.http_url):
        session.open()
    with pytest.raises(ServerUnreachable, match=own_server.http_url):
        session.open(wait=0.2)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(session.open, wait=30)
        own_server.start()
        assert opening.result() is session
    with session:
        assert sink(session, 7) == 7


def test_opening_can_wait_for_the_model(own_server: TritonServer) -> None:
    own_server.call("/v2/repository/models/sink/unload", {})
    eventually(lambda: "sink" not in own_server.model_names())
    session = Session(own_server.http_url, "sink")
    with pytest.raises(ModelNotReady, match=r"not ready.*UNAVAILABLE"):
        session.open()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(session.open, wait=30)
        own_server.call("/v2/repository/models/sink/load", {})
        opening.result()
    with session:
        assert sink(session, 8) == 8


# --- a server that dies with a request ------------------------------------------------


def test_a_request_lost_in_a_crash_frees_its_slot_after_the_restart(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        sink(session, 1)
        with stopped(own_server), asking(session, 2) as answer:
            own_server.kill()
            with pytest.raises(RequestLost, match="connection broke") as it:
                answer.result()
            assert it.value.retryable
            eventually(lambda: session.stats().lost == 1)
            own_server.start()
        assert all_free(session).drains == 1
        for value in (3, 4, 5):
            assert sink(session, value) == value


def test_closing_does_not_wait_for_a_server_that_is_gone(
    own_server: TritonServer,
) -> None:
    session = open_sink(own_server, connect=0.1, infer=600)
    with stopped(own_server), asking(session, 2) as answer:
        own_server.kill()
        with pytest.raises(RequestLost):
            answer.result()
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(30)
    own_server.start()
    assert not closing.is_alive()


# --- a caller that gives up -----------------------------------------------------------


def test_a_late_reply_frees_its_slot_and_is_nobodys_answer(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        sink(session, 1)
        with stopped(own_server):
            with session.lease() as lease:
                fill(lease, 2)
                with pytest.raises(InferTimeout, match="no complete reply"):
                    lease.infer(timeout=0.05)
                assert session.stats().in_flight == 1
            stats = session.stats()
            assert (stats.late, stats.free) == (1, 1)
            assert "1 late" in repr(session)
            # The other slot is not kept from anybody.
            with session.lease() as other:
                fill(other, 3)
        assert all_free(session).late_replies == 1
        for value in (4, 5, 6):
            assert sink(session, value) == value


def test_a_lease_that_waits_for_a_late_reply_is_not_usable(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as session:
        with stopped(own_server), session.lease() as lease:
            fill(lease, 2)
            with pytest.raises(InferTimeout):
                lease.infer(timeout=0.05)
            for use in (
                lambda: lease["INPUT__0"],
                lambda: lease.view("INPUT__0", (1, 1, 1, 8)),
                lambda: lease.write("INPUT__0", frame(1)),
                lease.infer,
            ):
                with pytest.raises(LeaseBusy, match="still waits for the reply"):
                    use()
        assert sink(session, 3) == 3
        all_free(session)


def test_views_of_a_late_slot_keep_it_pinned_after_the_reply(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as session:
        with stopped(own_server):
            lease = session.lease()
            view = lease["INPUT__0"]
            view[...] = 7
            with pytest.raises(InferTimeout):
                lease.infer(timeout=0.05)
            lease.release()
        eventually(lambda: session.stats().late_replies == 1)
        assert session.stats().pinned == 1
        assert sink(session, 8) == 8
        assert (view == 7).all()
        del view
        all_free(session)


def test_late_slots_come_back_all_at_once(own_server: TritonServer) -> None:
    def give_up(number: int) -> None:
        with session.lease() as lease:
            fill(lease, number)
            with pytest.raises(InferTimeout):
                lease.infer(timeout=0.2)

    with open_sink(own_server, slots=8) as session:
        session.warmup()
        with stopped(own_server), ThreadPoolExecutor(8) as pool:
            list(pool.map(give_up, range(8)))
            assert session.stats().late == 8
        assert all_free(session).late_replies == 8
        assert sink(session, 9) == 9


def test_one_limit_covers_every_part_of_a_call(own_server: TritonServer) -> None:
    with open_sink(own_server, slots=1) as session, stopped(own_server):
        started = time.monotonic()
        with pytest.raises(InferTimeout):
            session.infer({"INPUT__0": frame(1)}, timeout=0.2)
        # A limit of its own for each part would be the session's 30 seconds.
        assert time.monotonic() - started < 10
    assert session.stats().slots == 0


def test_closing_waits_for_late_replies(own_server: TritonServer) -> None:
    session = open_sink(own_server)
    with stopped(own_server):
        with session.lease() as lease:
            fill(lease, 2)
            with pytest.raises(InferTimeout):
                lease.infer(timeout=0.05)
        closing = threading.Thread(target=session.close)
        closing.start()
        eventually(lambda: "closed" in repr(session))
        assert closing.is_alive()
    closing.join()
    assert not registered(own_server)


def test_a_request_in_flight_ends_well_while_its_session_closes(
    own_server: TritonServer,
) -> None:
    session = open_sink(own_server)
    with stopped(own_server), asking(session, 5) as answer:
        closing = threading.Thread(target=session.close)
        closing.start()
        eventually(lambda: "closed" in repr(session))
        os.kill(own_server.pid, signal.SIGCONT)
        assert answer.result() == 5
    closing.join()


# --- Ctrl-C ---------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(when: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C in this thread as soon as `when()` is true; it must come out as itself."""
    target = threading.get_ident()

    def press() -> None:
        eventually(when)
        signal.pthread_kill(target, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


def test_ctrl_c_during_an_inference_sets_the_slot_aside(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        sink(session, 1)
        with stopped(own_server):
            with session.lease() as lease:
                fill(lease, 2)
                with interrupted(lambda: session.stats().in_flight == 1):
                    lease.infer()
            assert session.stats().lost == 1
        assert all_free(session).drains == 1
        for value in (3, 4, 5):
            assert sink(session, value) == value


def test_ctrl_c_during_a_registration_leaves_its_reply_to_nobody(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as session, session.lease() as lease:
        fill(lease, 1)
        lease.infer()
        before = session.stats()
        lease.view("INPUT__0", (1, 1, 1, 5000))[...] = 2
        with stopped(own_server):
            with interrupted(
                lambda: session.stats().registrations > before.registrations
            ):
                lease.infer()
            with pytest.raises(ServerUnreachable):
                lease.infer(timeout=0.05)
            # On the old connection a reply is still to come.
            assert session.stats().connections == before.connections + 1
        assert lease.infer()["OUTPUT__0"] == [2]
