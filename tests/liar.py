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
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from shmlane.server import TritonServer
from tests.polling import eventually

# What to send in place of a reply, given it and the replies before; None hangs up.
Twist = Callable[[bytes, list[bytes]], Iterable[bytes | None]]

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
        self.url = f"unix://{path}"
        host, port = server.http_url.split(":")
        self._upstream = (host, int(port))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Liar:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in self._sockets:
            # Shutting down wakes whoever is blocked on it; closing does not.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def hang_up(self) -> None:
        """Break every connection, as a restart of something in between does."""
        for each in self._sockets[1:]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=[client])
                self._sockets.append(client)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            with socket.create_connection(self._upstream) as server:
                self._sockets.append(server)
                self._forward(client, server)
            client.shutdown(socket.SHUT_RDWR)

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
