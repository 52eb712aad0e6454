"""The fault proxy does what it says, and a session lives through it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmlane import (
    ProtocolError,
    RequestLost,
    ServerUnreachable,
    Session,
    Timeouts,
)
from shmlane.testing import ScriptedServer, identity_model
from shmlane.testing.listener import reset
from tests.fault_proxy import FaultProxy, How, Link, Way
from tests.patience import given_up
from tests.polling import eventually
from tests.raw_http import HEALTH, RawConnection
from tests.sessions import all_free, frame

NAME = "INPUT__0"
OUTPUT = "OUTPUT__0"
SHAPE = (1, 1, 1, 8)


@pytest.fixture(params=["tcp", "unix"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultProxy]:
    """A proxy and a scripted server, both on ports or both on Unix sockets."""
    before = set(threading.enumerate())
    paths = [tmp_path / "server.sock", tmp_path / "proxy.sock"]
    mine, its = paths if request.param == "unix" else (None, None)
    with (
        ScriptedServer([identity_model()], unix_socket=its) as server,
        FaultProxy(server.url, unix_socket=mine) as proxy,
    ):
        yield proxy
        assert server.regions == {}
    assert set(threading.enumerate()) <= before
    assert not any(path.exists() for path in paths)


@pytest.fixture
def session(proxy: FaultProxy) -> Iterator[Session]:
    with Session(
        proxy.url,
        "identity",
        slots=2,
        shapes={NAME: SHAPE},
        outputs={OUTPUT: SHAPE},
        timeouts=Timeouts(infer=5.0, lease=5.0, connect=1.0),
    ) as session:
        echo(session, 0.5)
        echo(session, 0.25)
        yield session


def echo(session: Session, value: float) -> None:
    came = session.infer({NAME: frame(value)})[OUTPUT]
    assert came.tolist() == frame(value).tolist()


def works_again(session: Session) -> None:
    """All slots are free, and values are right on each."""
    all_free(session)
    for value in (1.0, 2.0, 3.0, 4.0):
        echo(session, value)


def test_bytes_pass_in_both_directions(proxy: FaultProxy) -> None:
    with RawConnection(proxy.url) as client:
        assert client.ask(HEALTH).status == 200
        link = proxy.link
        assert link.requests.passed == len(HEALTH)
        assert link.replies.passed > 0
        assert link.is_idle
    eventually(lambda: proxy.links == (), "the connection has ended on both sides")


def test_stalled_bytes_arrive_once_released(proxy: FaultProxy) -> None:
    with RawConnection(proxy.url) as client, ThreadPoolExecutor(1) as run:
        with proxy.stalled():
            client.send(HEALTH)
            reply = run.submit(client.read)
            eventually(lambda: len(proxy.links) == 1, "the connection is accepted")
            assert not reply.done()
            assert proxy.links[0].requests.passed == 0
        came = reply.result(10.0)
        assert came is not None
        assert came.status == 200


def test_stalled_connections_end_with_the_proxy(proxy: FaultProxy) -> None:
    with RawConnection(proxy.url) as client, proxy.stalled():
        client.send(HEALTH)
        eventually(lambda: len(proxy.links) == 1, "the connection is accepted")
        proxy.stop()
        assert client.read() is None


def test_delay_holds_each_reply_back(proxy: FaultProxy) -> None:
    proxy.on_replies(delay=0.05)
    with RawConnection(proxy.url) as client:
        started = time.monotonic()
        client.ask(HEALTH)
        assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("after", [0, 1, 20])
def test_reply_is_cut_after_exactly_so_many_bytes(
    proxy: FaultProxy, after: int
) -> None:
    with RawConnection(proxy.url) as client:
        whole = len(HEALTH)
        client.ask(HEALTH)
        link = proxy.link
        before = link.replies.passed
        link.replies.change(cut_after=after)
        client.send(HEALTH)
        assert client.read() is None
        assert (link.replies.passed - before, link.requests.passed) == (
            after,
            2 * whole,
        )


def test_request_is_cut_before_the_server_has_it_all(proxy: FaultProxy) -> None:
    proxy.on_requests(cut_after=len(HEALTH) - 1)
    with RawConnection(proxy.url) as client:
        client.send(HEALTH)
        assert client.read() is None


def test_reset_is_an_error_and_not_an_end(tmp_path: Path) -> None:
    with (
        ScriptedServer([identity_model()]) as server,
        FaultProxy(server.url) as proxy,
        RawConnection(proxy.url) as client,
    ):
        client.ask(HEALTH)
        proxy.break_off(How.RESET)
        with pytest.raises(ConnectionResetError):
            client.socket.recv(1)


def test_target_that_resets_is_not_waited_for() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        FaultProxy(f"127.0.0.1:{target.getsockname()[1]}") as proxy,
        RawConnection(proxy.url) as client,
    ):
        client.send(HEALTH)
        reset(target.accept()[0])
        assert client.read() is None


def test_half_closed_connection_still_takes_requests(proxy: FaultProxy) -> None:
    with RawConnection(proxy.url) as client:
        client.ask(HEALTH)
        link = proxy.link
        link.half_close()
        assert client.read() is None
        client.send(HEALTH)
        eventually(
            lambda: link.requests.passed == 2 * len(HEALTH), "the request is passed on"
        )


def test_reply_comes_twice_once(proxy: FaultProxy) -> None:
    proxy.on_replies(copies=2)
    with RawConnection(proxy.url) as client:
        assert client.ask(HEALTH) == client.read()
        client.ask(HEALTH)
        assert client.is_alive()


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nCon", b""])
def test_what_is_no_whole_reply_ends_its_connection_and_does_not_come_twice(
    begun: bytes,
) -> None:
    """A reply that had begun before it was to come twice, or that breaks off."""
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        FaultProxy(f"127.0.0.1:{target.getsockname()[1]}") as proxy,
        RawConnection(proxy.url) as client,
    ):
        client.send(HEALTH)
        server, _ = target.accept()
        with server:
            link = eventually(lambda: proxy.links, "it is connected")[0]
            server.sendall(begun)
            eventually(lambda: link.replies.passed == len(begun))
            proxy.on_replies(copies=2)
            server.sendall(b"tent-Length: 0\r\n\r\n" if begun else b"HTTP/1.1 200")
            # The proxy may have ended the connection by now.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            assert client.read() is None
            assert link.replies.passed == len(begun)


def test_earlier_reply_comes_again_ahead_of_the_next_request(proxy: FaultProxy) -> None:
    with RawConnection(proxy.url) as client:
        client.ask(HEALTH)
        link = proxy.link
        proxy.on_requests(echo_before=b"/v2 ")
        assert client.is_alive()
        earlier = client.ask(HEALTH)
        assert client.ask(b"GET /v2 HTTP/1.1\r\n\r\n") == earlier
        answer = client.read()
        assert answer is not None
        assert "version" in answer.json()
        assert client.is_alive()
        assert [len(reply) > 0 for reply in link.replied] == [True, True]


def test_only_idle_connections_are_closed(proxy: FaultProxy) -> None:
    with RawConnection(proxy.url) as busy, RawConnection(proxy.url) as idle:
        busy.ask(HEALTH)
        idle.ask(HEALTH)
        proxy.on_replies(is_stalled=True)
        busy.send(HEALTH)
        eventually(
            lambda: sum(link.is_idle for link in proxy.links) == 1,
            "the request is passed on",
        )
        proxy.close_idle()
        assert idle.read() is None
        proxy.on_replies(is_stalled=False)
        assert busy.read() is not None


def test_healed_proxy_leaves_new_connections_alone(proxy: FaultProxy) -> None:
    proxy.on_replies(cut_after=0)
    proxy.heal()
    with RawConnection(proxy.url) as client:
        assert client.is_alive()


def test_proxy_returns_on_its_address(proxy: FaultProxy) -> None:
    url = proxy.url
    proxy.stop()
    with pytest.raises((ConnectionError, FileNotFoundError)):
        RawConnection(url)
    proxy.start()
    assert proxy.url == url
    with RawConnection(url) as client:
        assert client.is_alive()


# --- a session through it -------------------------------------------------------------


def test_idle_connection_that_was_closed_is_replaced(
    proxy: FaultProxy, session: Session
) -> None:
    accepted = proxy.accepted
    proxy.close_idle()
    works_again(session)
    assert proxy.accepted > accepted


def test_bytes_on_an_idle_connection_answer_no_request(
    proxy: FaultProxy, session: Session
) -> None:
    proxy.inject(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
    # They may arrive just when the next request has left.
    with contextlib.suppress(RequestLost):
        echo(session, 9.0)
    works_again(session)


def test_connection_half_closed_while_idle_is_replaced(
    proxy: FaultProxy, session: Session
) -> None:
    for link in proxy.links:
        link.half_close()
    works_again(session)


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("after", [0, 30])
def test_reply_that_is_cut_loses_the_request_and_the_slot_comes_back(
    proxy: FaultProxy, session: Session, how: How, after: int
) -> None:
    for link in proxy.links:
        link.replies.change(cut_after=after, how=how)
    with pytest.raises(RequestLost):
        echo(session, 9.0)
    works_again(session)


def test_request_that_is_cut_is_lost_for_all_the_client_knows(
    proxy: FaultProxy, session: Session
) -> None:
    for link in proxy.links:
        link.requests.change(cut_after=50)
    with pytest.raises(RequestLost):
        echo(session, 9.0)
    works_again(session)


def test_stalled_reply_times_out_and_frees_its_slot_when_it_comes(
    proxy: FaultProxy, session: Session
) -> None:
    with proxy.stalled():
        given_up(lambda limit: session.infer({NAME: frame(9.0)}, timeout=limit))
        assert session.stats().late == 1
    assert all_free(session).late_replies == 1
    works_again(session)


def test_garbage_during_a_request_is_told(proxy: FaultProxy, session: Session) -> None:
    with ThreadPoolExecutor(1) as run, proxy.stalled():
        lost = run.submit(echo, session, 9.0)
        eventually(lambda: session.stats().in_flight == 1, "the request has left")
        proxy.inject(b"\x00\xff")
        with pytest.raises(ProtocolError):
            lost.result(10.0)
    works_again(session)


def test_session_outlives_a_proxy_that_is_away(
    proxy: FaultProxy, session: Session
) -> None:
    proxy.stop()
    with pytest.raises((ServerUnreachable, RequestLost)):
        session.infer({NAME: frame(9.0)}, timeout=0.1)
    proxy.start()
    works_again(session)


def test_nothing_comes_between_the_bytes_of_one_reply() -> None:
    near, client = socket.socketpair()
    far, target = socket.socketpair()
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabcdef"
    stray = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
    with near, client, far, target:
        link = Link(client, target, Way(), Way())
        link.send(target, b"POST / HTTP/1.1\r\n\r\n")
        link.send(client, reply[:-3])
        link.inject_between(stray)
        assert not link.is_idle
        link.send(client, reply[-3:])
        assert link.is_idle
        assert near.recv(4096) == reply
        link.inject_between(stray)
        assert near.recv(4096) == stray
