"""Control calls on a connection: answered by the server in time, or closed."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable

import pytest

from shmlane.errors import ProtocolError, ServerUnreachable
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection
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


def test_a_call_sends_and_reads_the_reply(
    connection: HttpConnection, peer: socket.socket
) -> None:
    peer.send(REPLY)
    assert connection.call(REQUEST, Deadline(LONG)).status == 200
    assert peer.recv(100) == REQUEST
    assert connection.is_open


@pytest.mark.parametrize("sent", [b"", REPLY[:9]])
def test_a_call_without_a_whole_answer_in_time_closes(
    connection: HttpConnection, peer: socket.socket, sent: bytes
) -> None:
    peer.send(sent)
    with pytest.raises(ServerUnreachable, match=r"did not answer .* within 0\.02 s"):
        connection.call(REQUEST, Deadline(SHORT))
    assert not connection.is_open
    # The server learns it too: no late reply finds a reader.
    assert peer.recv(100) == REQUEST
    assert peer.recv(100) == b""


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_call_on_a_broken_connection_is_unreachable(
    connection: HttpConnection,
    peer: socket.socket,
    end: Callable[[socket.socket], None],
) -> None:
    end(peer)
    assert readable(connection)
    with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:\d+ did not answer GET"):
        connection.call(REQUEST, Deadline(LONG))
    assert not connection.is_open


def test_a_call_answered_with_garbage_closes(
    connection: HttpConnection, peer: socket.socket
) -> None:
    peer.send(b"garbage\r\n\r\n")
    with pytest.raises(ProtocolError):
        connection.call(REQUEST, Deadline(LONG))
    assert not connection.is_open


@pytest.mark.parametrize("status", [408, 499, 502, 504])
def test_a_call_that_something_in_between_answers_closes(
    connection: HttpConnection, peer: socket.socket, status: int
) -> None:
    # Triton's own answer may still come, and would be taken for that to the next call.
    peer.send(b"HTTP/1.1 %d Words\r\nContent-Length: 0\r\n\r\n" % status)
    with pytest.raises(ServerUnreachable, match=f"in its place .status {status}"):
        connection.call(REQUEST, Deadline(LONG))
    assert not connection.is_open


@pytest.mark.parametrize("status", [408, 499, 502, 504])
def test_a_call_that_something_in_between_answered_closes(
    connection: HttpConnection, peer: socket.socket, status: int
) -> None:
    peer.send(REPLY.replace(b"200", b"%d" % status))
    with pytest.raises(ServerUnreachable, match=f"in its place .status {status}"):
        connection.call(REQUEST, Deadline(LONG))
    assert not connection.is_open


@pytest.mark.parametrize("status", [400, 403, 404, 500, 501, 503])
def test_a_call_that_the_server_refused_is_answered(
    connection: HttpConnection, peer: socket.socket, status: int
) -> None:
    peer.send(REPLY.replace(b"200", b"%d" % status))
    assert connection.call(REQUEST, Deadline(LONG)).status == status
    assert connection.is_open


def test_ctrl_c_in_a_call_closes_so_that_its_reply_meets_nobody(
    connection: HttpConnection, peer: socket.socket
) -> None:
    main = threading.get_ident()

    def press_ctrl_c() -> None:
        assert peer.recv(100) == REQUEST
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        during(lambda: connection.call(REQUEST, Deadline(None)), press_ctrl_c)
    assert not connection.is_open
