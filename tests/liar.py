"""A proxy between a client and a real server that does not tell the truth.

Owns a Unix socket that forwards whole requests and replies, and twists the replies to
inference as a test says. Refuses to know what they mean. A piece of a reply is sent
only when the client has taken the one before, so that no test depends on time.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import re
import socket
import termios
from collections.abc import Callable, Iterable
from pathlib import Path

from shmlane.endpoint import Endpoint
from shmlane.server import TritonServer
from shmlane.testing.listener import Address, Listener
from tests.polling import eventually

# What to send in place of a reply, given it and the replies before; None hangs up.
Twist = Callable[[bytes, list[bytes]], Iterable[bytes | None]]

_UPSTREAM_TIMEOUT = 30.0
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def honest(reply: bytes, _before: list[bytes]) -> list[bytes]:
    """The reply as it is."""
    return [reply]


class Liar:
    """Listens on `path` for as long as its `with` block lasts.

    `twist` may be changed at any time, and holds from the next inference on. With
    `hang_up_next` the next request is not forwarded but answered by hanging up.
    """

    def __init__(self, server: TritonServer, path: Path) -> None:
        self.twist: Twist = honest
        self.hang_up_next = False
        self._upstream = Endpoint.parse(server.http_url)
        self._address = Address(path)

    def __enter__(self) -> Liar:
        self._listener = Listener(self._address.listen(), self._serve)
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.end()
        self._listener.join()

    @property
    def url(self) -> str:
        return self._address.url

    def hang_up(self) -> None:
        """Break every connection, as a restart of something in between does."""
        self._listener.break_off()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self._upstream.connect(_UPSTREAM_TIMEOUT) as server,
        ):
            self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        before: list[bytes] = []
        while request := read_message(client):
            if self.hang_up_next:
                self.hang_up_next = False
                return
            server.sendall(request)
            reply = read_message(server)
            is_inference = b"/infer HTTP" in request
            twist = self.twist if is_inference else honest
            for piece in twist(reply, before):
                if piece is None:
                    return
                send_and_wait(client, piece)
            if is_inference:
                before.append(reply)


def read_message(connected: socket.socket) -> bytes:
    """One whole request or reply; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connected.recv(65536)):
            return b""
        data += more
    head = data.index(b"\r\n\r\n") + 4
    match = _LENGTH.search(data[:head])
    whole = head + (int(match[1]) if match else 0)
    while len(data) < whole:
        data += connected.recv(65536)
    return data


def send_and_wait(client: socket.socket, piece: bytes) -> None:
    """Send, and return once the client has read it."""
    client.sendall(piece)
    eventually(lambda: not unread(client), "the client reads what it was sent")


def unread(client: socket.socket) -> int:
    """Bytes that the other end of a Unix socket has not read yet."""
    count = array.array("i", [0])
    fcntl.ioctl(client, termios.TIOCOUTQ, count)
    return count[0]
