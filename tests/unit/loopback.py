"""Connections over loopback: one end as the package uses it, the other in the test."""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple, TypeVar

from shmlane.endpoint import Endpoint
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection

T = TypeVar("T")
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REQUEST = b"GET /v2 HTTP/1.1\r\n\r\n"
LONG = 30.0
SHORT = 0.02


class Wire(NamedTuple):
    """A connection and the server's end of it."""

    connection: HttpConnection
    peer: socket.socket


@contextmanager
def connected() -> Iterator[Wire]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint.parse(f"127.0.0.1:{listener.getsockname()[1]}")
        with closing(HttpConnection.open(endpoint, Deadline(LONG))) as connection:
            peer, _ = listener.accept()
            with peer:
                yield Wire(connection, peer)


def is_kept(url: str) -> bool:
    """Whether nobody listens there, and nobody else is given the port."""
    host, _, port = url.rpartition(":")
    with socket.socket() as client, socket.socket() as other:
        if client.connect_ex((host, int(port))) != errno.ECONNREFUSED:
            return False
        try:
            other.bind((host, int(port)))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def reset(peer: socket.socket) -> None:
    """End a connection the hard way, which the other side learns as an error."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def readable(connection: HttpConnection) -> bool:
    """Whether something has arrived; what was sent may take its time even here."""
    return bool(select.select([connection], [], [], LONG)[0])


def during(action: Callable[[], T], other: Callable[[], object]) -> T:
    """`action` while another thread does `other`."""
    thread = threading.Thread(target=other)
    thread.start()
    try:
        return action()
    finally:
        thread.join()
