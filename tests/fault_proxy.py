"""A proxy between a client and a server that fails as networks and proxies do.

Owns the bytes in between, over TCP or a Unix socket: it holds them up, cuts them, sends
replies twice, breaks connections off, and puts bytes in that nobody sent. Refuses to
know what they mean, but for where a reply ends. Changes hold from the next bytes on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from shmlane.endpoint import Endpoint
from shmlane.errors import ProtocolError
from shmlane.replies import ReplyParser
from shmlane.testing.listener import Address, Listener, reset
from tests.polling import eventually

_RECEIVE_BYTES = 64 << 10
_CONNECT_TIMEOUT = 5.0


class How(Enum):
    """How a connection ends that is cut."""

    CLOSE = "both sides see the end"
    RESET = "both sides see an error; on a Unix socket the end"
    HALF_CLOSE = "the receiver sees the end, the other direction goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What happens to the bytes of one direction.

    is_stalled: nothing is passed on. delay: seconds that each piece waits.
    cut_after: the connection ends, as `how` says, when so many more bytes have passed.
    copies: how often the next whole reply is sent; once again after that.
    echo_before: ahead of the next request that contains these bytes, the reply to the
        one before is sent once more.
    """

    is_stalled: bool = False
    delay: float = 0.0
    cut_after: int | None = None
    how: How = How.CLOSE
    copies: int = 1
    echo_before: bytes = b""


class Pipe:
    """One direction of one connection, run by one thread."""

    def __init__(self, link: Link, way: Way) -> None:
        self.passed = 0
        self._link = link
        self._way = way
        self._changed = threading.Condition()

    def change(self, **changes: Any) -> None:
        with self._changed:
            self._way = replace(self._way, **changes)
            self._changed.notify_all()

    def run(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass on until the source ends or the connection is cut."""
        try:
            while data := source.recv(_RECEIVE_BYTES):
                if not self._pass_on(data, source, sink):
                    return
            if not self._link.is_broken:
                sink.shutdown(socket.SHUT_WR)
        except (OSError, ProtocolError):
            # The other side must not wait for what can no longer come. What was to come
            # twice may be no reply: the rest of one that had begun before.
            if not self._link.is_broken:
                self._link.break_off(How.RESET)

    def _pass_on(self, data: bytes, source: socket.socket, sink: socket.socket) -> bool:
        """False when the connection was cut."""
        way = self._wait()
        if way.copies > 1:
            data = _whole_reply(data, source) * way.copies
            self.change(copies=1)
        earlier = self._link.replied[-1]
        if earlier and way.echo_before and way.echo_before in data:
            self._link.inject(earlier)
            self.change(echo_before=b"")
        left = way.cut_after
        cuts = left is not None and left <= len(data)
        if left is not None:
            data = data[:left]
            self.change(cut_after=left - len(data))
        # Counted first: whoever has seen the bytes may look at the count.
        self.passed += len(data)
        self._link.send(sink, data)
        if cuts and way.how is How.HALF_CLOSE:
            sink.shutdown(socket.SHUT_WR)
        elif cuts:
            self._link.break_off(way.how)
        return not cuts

    def _wait(self) -> Way:
        """The way of the next bytes, once they may go it."""
        link = self._link
        with self._changed:
            self._changed.wait_for(lambda: not self._way.is_stalled or link.is_broken)
            way = self._way
        if way.delay:
            link.broken.wait(way.delay)
        return way


def _whole_reply(data: bytes, source: socket.socket) -> bytes:
    parser, whole = ReplyParser(), b""
    while data:
        whole += data
        if parser.feed(data) is not None:
            return whole
        data = source.recv(_RECEIVE_BYTES)
    raise ConnectionAbortedError("it breaks off")


class Link:
    """One connection of a client, with its own connection to the target."""

    def __init__(
        self, client: socket.socket, target: socket.socket, requests: Way, replies: Way
    ) -> None:
        self.requests = Pipe(self, requests)
        self.replies = Pipe(self, replies)
        # The last two replies, the last of them last; the bytes that have passed.
        self.replied: deque[bytes] = deque([b""], maxlen=2)
        self.broken = threading.Event()
        self._client = client
        self._target = target
        self._how = How.CLOSE
        self._sending = threading.Lock()
        self._is_answered = True

    @property
    def is_broken(self) -> bool:
        return self.broken.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether the last bytes, if any, were the end of a reply of the target's."""
        return self._is_answered and self._is_whole()

    def inject(self, data: bytes) -> None:
        """Send the client bytes that the target never sent."""
        with self._sending:
            self._client.sendall(data)

    def inject_between(self, data: bytes) -> None:
        """As `inject`, but not into a reply: nothing that comes between does that.

        Bytes amid a body would be taken for a part of it, by any client.
        """
        with self._sending:
            if self._is_whole():
                self._client.sendall(data)

    def _is_whole(self) -> bool:
        """Whether none of the last reply is still to come."""
        reply = self.replied[-1]
        try:
            return not reply or ReplyParser().feed(reply) is not None
        except ProtocolError:
            # More than one, or what was injected before.
            return True

    def half_close(self) -> None:
        """Let the client see the end; what it still sends reaches the target."""
        self._client.shutdown(socket.SHUT_WR)

    def break_off(self, how: How = How.CLOSE) -> None:
        """End both sides."""
        self._how = how
        self.broken.set()
        # Wakes both threads; with a reset pending nobody must see an end before it.
        ends = socket.SHUT_RD if how is How.RESET else socket.SHUT_RDWR
        for each in (self._client, self._target):
            with contextlib.suppress(OSError):
                each.shutdown(ends)
        for pipe in (self.requests, self.replies):
            pipe.change()

    def send(self, sink: socket.socket, data: bytes) -> None:
        was_answered = self._is_answered
        self._is_answered = sink is self._client
        if self._is_answered:
            with self._sending:
                self.replied[-1] += data
                self._client.sendall(data)
            return
        if was_answered:
            self.replied.append(b"")
        sink.sendall(data)

    def run(self) -> None:
        """Pass bytes on in both directions until both have ended."""
        back = threading.Thread(
            target=self.replies.run, args=(self._target, self._client), daemon=True
        )
        back.start()
        self.requests.run(self._client, self._target)
        back.join()
        for each in (self._client, self._target):
            if self._how is How.RESET:
                reset(each)
            each.close()


class FaultProxy:
    """Listens for as long as its `with` block lasts and connects to `target`.

    target: as `Session` takes it. unix_socket: listen on this path, else on a port.
    The faults below hold for all connections, those to come included; those of one
    connection are made on its `Link`.
    """

    def __init__(
        self, target: str, *, unix_socket: str | os.PathLike[str] | None = None
    ) -> None:
        self.accepted = 0
        self._target = Endpoint.parse(target)
        self._address = Address(unix_socket)
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._requests = Way()
        self._replies = Way()
        self._listener: Listener | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Listen, after a `stop` on the same address."""
        self._is_stopping = False
        self._listener = Listener(self._address.listen(), self._serve)

    def stop(self) -> None:
        """Break all connections, accept none, wait for all threads."""
        if self._listener is not None:
            self._is_stopping = True
            self._listener.end()
            self.break_off()
            self._listener.join()
            self._listener = None

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def links(self) -> tuple[Link, ...]:
        """The connections that exist now, oldest first."""
        with self._lock:
            return tuple(self._links)

    @property
    def link(self) -> Link:
        """The only connection, once those that clients have closed are gone."""
        eventually(lambda: len(self.links) == 1, lambda: f"one of {self.links}")
        return self.links[0]

    # --- faults of all connections ----------------------------------------------------

    def on_requests(self, **changes: Any) -> None:
        """Change the `Way` of the bytes that clients send."""
        self._requests = replace(self._requests, **changes)
        self._each(lambda link: link.requests.change(**changes))

    def on_replies(self, **changes: Any) -> None:
        """Change the `Way` of the bytes that the target sends."""
        self._replies = replace(self._replies, **changes)
        self._each(lambda link: link.replies.change(**changes))

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Accept connections and pass nothing on, in either direction."""
        self.on_requests(is_stalled=True)
        self.on_replies(is_stalled=True)
        try:
            yield
        finally:
            self.on_requests(is_stalled=False)
            self.on_replies(is_stalled=False)

    def heal(self) -> None:
        """Connections to come have no faults."""
        self._requests = self._replies = Way()

    def break_off(self, how: How = How.CLOSE) -> None:
        """End the connections that exist now."""
        self._each(lambda link: link.break_off(how))

    def close_idle(self) -> None:
        """End those on which no request waits for its reply, as proxies do."""
        self._each(lambda link: link.break_off() if link.is_idle else None)

    def inject(self, data: bytes) -> None:
        """Send every client bytes that the target never sent, between two replies."""
        self._each(lambda link: link.inject_between(data))

    def _each(self, act: Callable[[Link], None]) -> None:
        for link in self.links:
            # It may have ended by itself meanwhile.
            with contextlib.suppress(OSError):
                act(link)

    def _serve(self, client: socket.socket) -> None:
        self.accepted += 1
        try:
            target = self._target.connect(_CONNECT_TIMEOUT)
        except OSError:
            return
        target.settimeout(None)
        if client.family == socket.AF_INET:
            # What is put in must not wait until the client acknowledges what came last.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            link = Link(client, target, self._requests, self._replies)
            self._links.append(link)
        # Made while `stop` broke those that it saw.
        if self._is_stopping:
            link.break_off()
        try:
            link.run()
        finally:
            with self._lock:
                self._links.remove(link)

    def __repr__(self) -> str:
        return f"<FaultProxy to {self._target.url}, {len(self.links)} connections>"
