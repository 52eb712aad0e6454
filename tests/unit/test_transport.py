"""Connections: usable after a time-out, closed by everything else that goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest

from shmlane.errors import InferTimeout, ProtocolError, RequestLost
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.unit.loopback import (
    LONG,
    REPLY,
    REQUEST,
    SHORT,
    during,
    readable,
    reset,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs poll")

CLOSING = REPLY.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")


# --- sending --------------------------------------------------------------------------


def test_a_connection_leads_to_the_server_without_delay(
    connection: HttpConnection, peer: socket.socket
) -> None:
    assert connection.send(REQUEST)
    assert peer.recv(100) == REQUEST
    peer.send(REPLY)
    assert connection.receive(LONG) == REPLY
    with socket.socket(fileno=os.dup(connection.fileno())) as twin:
        assert twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
def test_a_peer_that_vanishes_without_a_word_is_noticed_within_a_minute(
    connection: HttpConnection,
) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as twin:
        assert twin.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        first, pause, times = (
            twin.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
            )
        )
        # Probes come only behind bytes that were acknowledged: those have a limit too.
        unanswered = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert first + pause * times <= 60
    assert 0 < unanswered <= 60_000


def test_what_cannot_be_sent_at_all_says_so_and_closes(
    connection: HttpConnection, peer: socket.socket
) -> None:
    reset(peer)
    assert readable(connection)
    assert not connection.send(REQUEST)
    assert not connection.is_open


def test_what_was_sent_in_part_did_not_leave(
    connection: HttpConnection, peer: socket.socket
) -> None:
    """The peer goes while the kernel still takes in bytes."""

    def read_a_little() -> None:
        assert peer.recv(1)
        reset(peer)

    more_than_buffers_hold = bytes(64 << 20)
    assert not during(lambda: connection.send(more_than_buffers_hold), read_a_little)
    assert not connection.is_open


def test_a_closed_connection_sends_nothing(connection: HttpConnection) -> None:
    connection.close()
    assert not connection.send(REQUEST)


# --- receiving ------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.0, 1e-9, SHORT])
def test_a_receive_that_times_out_leaves_the_connection_usable(
    connection: HttpConnection, peer: socket.socket, timeout: float
) -> None:
    for _ in range(2):
        with pytest.raises(InferTimeout) as caught:
            connection.receive(timeout)
    assert caught.value.context == {"timeout": timeout}
    assert connection.is_open
    assert connection.is_quiet
    peer.send(REPLY)
    assert connection.receive(LONG) == REPLY
    assert connection.send(REQUEST)
    assert peer.recv(100) == REQUEST


def test_a_receive_waits_as_long_as_it_was_told_each_time(
    connection: HttpConnection, peer: socket.socket
) -> None:
    for timeout in (SHORT, 2 * SHORT, SHORT):
        start = time.monotonic()
        with pytest.raises(InferTimeout):
            connection.receive(timeout)
        assert time.monotonic() - start >= timeout
    late = threading.Timer(3 * SHORT, peer.send, [REPLY])
    assert during(lambda: connection.receive(None), late.run) == REPLY


@pytest.mark.parametrize("timeout", [3e6, 1e9, threading.TIMEOUT_MAX])
def test_a_limit_of_many_days_is_a_limit_like_any_other(
    connection: HttpConnection, peer: socket.socket, timeout: float
) -> None:
    peer.send(REPLY)
    assert connection.receive(timeout) == REPLY


def test_signals_do_not_put_off_the_end_of_a_wait(connection: HttpConnection) -> None:
    main, given_up, in_vain = threading.get_ident(), threading.Event(), []

    def interrupt() -> None:
        end = Deadline(LONG / 3)
        while not given_up.wait(SHORT / 4):
            if end.has_passed:
                in_vain.append("the wait went on")
                connection.close()
                return
            signal.pthread_kill(main, signal.SIGUSR1)

    def wait() -> None:
        try:
            with pytest.raises(InferTimeout):
                connection.receive(4 * SHORT)
        finally:
            given_up.set()

    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
    try:
        during(wait, interrupt)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert in_vain == []


def test_a_reply_that_came_while_a_signal_handler_took_all_the_time_is_read(
    connection: HttpConnection, peer: socket.socket
) -> None:
    """Python waits no longer after such a handler, and does not look either."""
    poll = connection._poll

    def wait_in_vain(_limit: float | None) -> object:
        connection._poll = poll
        peer.send(REPLY)
        eventually(lambda: readable(connection), "the reply has come")
        return []

    connection._poll = wait_in_vain
    assert connection.receive(SHORT) == REPLY


def test_a_reply_cut_by_a_time_out_is_read_on_later(
    connection: HttpConnection, peer: socket.socket
) -> None:
    peer.send(REPLY[:20])
    with pytest.raises(InferTimeout):
        connection.finish(connection.receive(LONG), Deadline(SHORT))
    assert connection.is_open
    peer.send(REPLY[20:])
    reply = connection.finish(connection.receive(LONG), Deadline(LONG))
    assert (reply.status, bytes(reply.body)) == (200, b"{}")


def test_a_reply_is_not_read_on_behind_the_deadline(
    connection: HttpConnection, peer: socket.socket
) -> None:
    """However much of it is there: a reply without end would hold the caller."""
    peer.send(REPLY[20:])
    assert readable(connection)
    with pytest.raises(InferTimeout, match=r"no complete reply came within 0 s"):
        connection.finish(REPLY[:20], Deadline(0))
    assert not connection.is_quiet
    reply = connection.finish(connection.receive(LONG), Deadline(LONG))
    assert bytes(reply.body) == b"{}"


def test_the_end_of_the_connection_loses_the_request(
    connection: HttpConnection, peer: socket.socket
) -> None:
    peer.close()
    with pytest.raises(RequestLost, match="the server closed it") as caught:
        connection.receive(LONG)
    assert not connection.is_open
    assert caught.value.retryable


def test_a_reset_loses_the_request(
    connection: HttpConnection, peer: socket.socket
) -> None:
    reset(peer)
    with pytest.raises(RequestLost, match="Connection reset by peer"):
        connection.receive(LONG)
    assert not connection.is_open


def test_a_reply_cut_by_the_end_is_lost(
    connection: HttpConnection, peer: socket.socket
) -> None:
    peer.send(REPLY[:-1])
    peer.close()
    with pytest.raises(RequestLost):
        connection.finish(connection.receive(LONG), Deadline(LONG))
    assert not connection.is_open


def test_a_closed_connection_receives_nothing(connection: HttpConnection) -> None:
    connection.close()
    for timeout in (LONG, SHORT, None):
        with pytest.raises(RequestLost, match="Bad file descriptor"):
            connection.receive(timeout)


# --- replies --------------------------------------------------------------------------


def test_replies_come_one_after_the_other(
    connection: HttpConnection, peer: socket.socket
) -> None:
    for body in (b"{}", b"[]", b"12"):
        peer.send(REPLY.replace(b"{}", body))
        reply = connection.finish(connection.receive(LONG), Deadline(LONG))
        assert bytes(reply.body) == body
        assert connection.is_open
        assert connection.is_quiet


def test_a_last_reply_closes_the_connection(connection: HttpConnection) -> None:
    reply = connection.feed(CLOSING)
    assert reply is not None
    assert not reply.keep_alive
    assert not connection.is_open


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n", REPLY + b"x", REPLY + REPLY])
def test_what_is_no_reply_closes_the_connection(
    connection: HttpConnection, data: bytes
) -> None:
    with pytest.raises(ProtocolError):
        connection.feed(data)
    assert not connection.is_open


# --- idle connections -----------------------------------------------------------------


def test_an_idle_connection_is_quiet(
    connection: HttpConnection, peer: socket.socket
) -> None:
    assert connection.is_quiet
    assert connection.send(REQUEST)
    assert connection.is_quiet
    assert peer.recv(100) == REQUEST


@pytest.mark.parametrize(
    "happening",
    [
        socket.socket.close,
        reset,
        lambda peer: peer.shutdown(socket.SHUT_WR),
        lambda peer: peer.send(b"x"),
        lambda peer: peer.send(REPLY),
    ],
    ids=["end", "reset", "half an end", "stray byte", "reply to nobody"],
)
def test_an_idle_connection_with_something_to_read_is_not_quiet(
    connection: HttpConnection,
    peer: socket.socket,
    happening: Callable[[socket.socket], object],
) -> None:
    happening(peer)
    eventually(lambda: not connection.is_quiet, "it is noticed")
    assert connection.is_open


def test_a_closed_connection_is_never_quiet_whoever_has_its_number(
    connection: HttpConnection, peer: socket.socket
) -> None:
    number = connection.fileno()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        connection.close()
        assert (connection.fileno(), connection.is_open) == (-1, False)
        assert not connection.is_quiet
        os.dup2(mine.fileno(), number)
        try:
            assert not connection.is_quiet
            assert not connection.send(REQUEST)
            with pytest.raises(RequestLost):
                connection.receive(SHORT)
            connection.close()
            theirs.setblocking(False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            assert os.write(number, b"still open") == 10
        finally:
            os.close(number)
    assert peer.recv(1) == b""


def test_a_connection_shows_whether_it_is_open(connection: HttpConnection) -> None:
    assert repr(connection) == "<HttpConnection open>"
    connection.close()
    assert repr(connection) == "<HttpConnection closed>"
