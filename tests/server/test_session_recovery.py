"""A server that stops, dies, restarts or forgets: the right error, then right data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmlane import (
    ModelNotReady,
    RequestLost,
    ServerUnreachable,
    Session,
    Timeouts,
)
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import (
    all_free,
    asking,
    fill,
    frame,
    open_sink,
    registered,
    sent_to,
    sink,
    stopped,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")

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


def test_a_restart_on_a_unix_socket_is_not_noticed(tmp_path: Path) -> None:
    with (
        TritonServer(unix_socket=tmp_path / "http.sock") as server,
        Session(server.unix_url, "sink") as session,
    ):
        assert sink(session, 1) == 1
        server.kill()
        server.start()
        assert sink(session, 2) == 2
        all_free(session)


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


@contextlib.contextmanager
def unloaded(server: TritonServer) -> Iterator[None]:
    """The server without `sink`, which it has again behind the block."""
    server.call("/v2/repository/models/sink/unload", {})
    try:
        eventually(lambda: "sink" not in server.model_names(), "sink is not ready")
        yield
    finally:
        server.call("/v2/repository/models/sink/load", {})


def test_a_model_that_was_unloaded_is_named_and_may_return(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        with unloaded(own_server):
            with pytest.raises(ModelNotReady, match="cannot run model 'sink'") as it:
                sink(session, 1)
            assert it.value.retryable
            all_free(session)
        assert sink(session, 2) == 2
        all_free(session)


# --- a server that is away ------------------------------------------------------------


def test_a_server_that_is_away_is_named_and_may_return(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        own_server.kill()
        with pytest.raises(ServerUnreachable, match=own_server.http_url) as it:
            session.infer({"INPUT__0": frame(1)}, timeout=0.2)
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
    hasty, limits = Timeouts(connect=0.05), Timeouts(connect=0.5)
    with pytest.raises(ServerUnreachable, match=own_server.http_url):
        Session(own_server.http_url, "sink", timeouts=hasty).open()
    session = Session(own_server.http_url, "sink", timeouts=limits)
    with pytest.raises(ServerUnreachable, match=own_server.http_url):
        session.open(wait=0.2)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(session.open, wait=30)
        own_server.start()
        assert opening.result() is session
    with session:
        assert sink(session, 7) == 7


def test_opening_can_wait_for_the_model(own_server: TritonServer) -> None:
    session = Session(own_server.http_url, "sink")
    with ThreadPoolExecutor(1) as pool:
        with unloaded(own_server):
            with pytest.raises(ModelNotReady, match=r"not ready.*UN(AVAIL|LOAD)"):
                session.open()
            opening = pool.submit(session.open, wait=30)
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
            sent_to(own_server)
            own_server.kill()
            with pytest.raises(RequestLost, match="connection broke") as it:
                answer.result()
            assert it.value.retryable
            eventually(lambda: session.stats().lost == 1)
            own_server.start()
        assert all_free(session).drains == 1
        for value in (3, 4, 5):
            assert sink(session, value) == value


def test_all_requests_lost_at_once_free_their_slots(own_server: TritonServer) -> None:
    def lose(value: int) -> None:
        with pytest.raises(RequestLost):
            sink(session, value)

    with open_sink(own_server, slots=8) as session:
        session.warmup()
        with stopped(own_server), ThreadPoolExecutor(8) as pool:
            lost = [pool.submit(lose, value) for value in range(8)]
            sent_to(own_server, 8)
            own_server.kill()
            for future in lost:
                future.result()
            own_server.start()
        assert all_free(session).drains == 8
        for value in range(9):
            assert sink(session, value) == value


def test_closing_does_not_wait_for_a_server_that_is_gone(
    own_server: TritonServer,
) -> None:
    session = open_sink(own_server, connect=0.1, infer=600)
    with stopped(own_server), asking(session, 2) as answer:
        sent_to(own_server)
        own_server.kill()
        with pytest.raises(RequestLost):
            answer.result()
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(30)
    own_server.start()
    assert not closing.is_alive()


def test_a_lost_request_is_sent_again_if_asked_for(own_server: TritonServer) -> None:
    with open_sink(own_server, replay=True) as session:
        for value in (1, 2):
            with stopped(own_server), asking(session, value) as answer:
                sent_to(own_server)
                own_server.kill()
                own_server.start()
                assert answer.result() == value
        stats = all_free(session)
        assert (stats.retries, stats.lost) == (2, 0)
        assert sink(session, 3) == 3


def test_a_request_is_not_sent_again_beyond_its_limit(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, replay=True, infer=2.0) as session:
        with stopped(own_server), asking(session, 1) as answer:
            sent_to(own_server)
            own_server.kill()
            with pytest.raises(RequestLost):
                answer.result()
        own_server.start()
        assert all_free(session).drains == 1
        assert sink(session, 2) == 2
