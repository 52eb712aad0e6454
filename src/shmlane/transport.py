"""Sockets: where the server is, how long to wait, and one connection per slot.

Owns URLs, time limits and the TCP or Unix socket under an HTTP/1.1 connection. Refuses
to know what the bytes mean (`wire`) and whose memory they speak of (`slots`). One
request is on a connection at a time.

Waiting for a reply is left to the kernel (SO_RCVTIMEO): a blocking `recv` with a limit
costs nothing beside a Python-level timeout, which adds a `poll` to every call.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

from .errors import (
    InferTimeout,
    ProtocolError,
    RequestLost,
    ServerUnreachable,
    UsageError,
)
from .wire import HttpReply, ReplyParser

RECEIVE_BYTES = 64 << 10

# Linux reports the path of a Unix socket in 108 bytes with the closing zero.
_MAX_UNIX_PATH = 107
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1


class Default(Enum):
    """Marks an argument that was not given where None means "no limit"."""

    DEFAULT = "default"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = Default.DEFAULT
Timeout = float | None | Default


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits in seconds. None waits for ever and has to be asked for.

    connect: making a connection, retries included. lease: waiting for a free slot.
    infer: one inference from first byte sent to last byte read.
    """

    connect: float | None = 2.0
    lease: float | None = 5.0
    infer: float | None = 60.0

    def __post_init__(self) -> None:
        for name in ("connect", "lease", "infer"):
            check_timeout(getattr(self, name), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the server is talked to.

    headers: sent with every request, control and inference alike (a restricted API
        expects a key there).
    """

    headers: Mapping[str, str] = field(default_factory=dict)


def check_timeout(value: float | None, name: str) -> float | None:
    """`value` if it is None or a number of seconds >= 0, else `UsageError`."""
    if value is not None and not (
        isinstance(value, int | float) and 0 <= value < math.inf
    ):
        raise UsageError(
            f"{name}={value!r} is not a time limit: give seconds >= 0, or None to wait"
            " for ever."
        )
    return value


class Deadline:
    """A point in time that one call must not pass, whatever it waits for."""

    __slots__ = ("limit", "when")

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.when = math.inf if limit is None else time.monotonic() + limit

    @property
    def remaining(self) -> float | None:
        """Seconds left, 0 when it has passed, None when there is no end."""
        if self.limit is None:
            return None
        return max(0.0, self.when - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.limit is not None and time.monotonic() >= self.when

    def within(self, limit: float | None) -> Deadline:
        """The earlier of this deadline and `limit` seconds from now."""
        other = Deadline(limit)
        return other if other.when < self.when else self


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the HTTP frontend of a server listens."""

    url: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read `host:port`, `http://host:port` or `unix:///path`; else `UsageError`."""
        scheme, rest = url.split("://", 1) if "://" in url else ("http", url)
        if scheme == "unix":
            return cls._unix(url, rest)
        if scheme != "http":
            raise UsageError(
                f"{url!r}: scheme {scheme!r} is not supported.",
                hint="Use host:port, http://host:port or unix:///path/to/http.sock.",
            )
        try:
            parts = urlsplit(f"//{rest}")
            host, port = parts.hostname, parts.port or 8000
        except ValueError as error:
            raise UsageError(f"{url!r} is not a server address: {error}.") from None
        if not host or parts.path.strip("/") or parts.query or parts.username:
            raise UsageError(
                f"{url!r} is not a server address.",
                hint="Give host:port, for example localhost:8000.",
            )
        return cls(url, host, port)

    @classmethod
    def _unix(cls, url: str, path: str) -> Endpoint:
        length = len(path.encode())
        if not path.startswith("/") or length > _MAX_UNIX_PATH:
            raise UsageError(
                f"{url!r} is not a Unix socket address: the path must be absolute and"
                f" at most {_MAX_UNIX_PATH} bytes, this one has {length}."
            )
        return cls(url, "localhost", 0, path)

    @property
    def host_header(self) -> str:
        if self.path:
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def connect(self, timeout: float | None) -> socket.socket:
        """One attempt at a connected socket; raises OSError."""
        if not self.path:
            connected = socket.create_connection((self.host, self.port), timeout)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.settimeout(timeout)
            unix.connect(self.path)
        except BaseException:
            unix.close()
            raise
        return unix


class HttpConnection:
    """One keep-alive connection that carries one request at a time.

    `send` is the socket's own method: it raises OSError, and a request of ours always
    fits the empty buffer of an idle connection. Used by one thread at a time.
    """

    __slots__ = ("_parser", "_poll", "_recv", "_socket", "_time_limit", "send")

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        self._socket: socket.socket | None = connected
        self.send: Callable[[bytes], int] = connected.send
        self._recv: Callable[[int], bytes] = connected.recv
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        self._poll = poller.poll
        self._parser = ReplyParser()
        self._time_limit: float | None = None

    @classmethod
    def open(cls, endpoint: Endpoint, deadline: Deadline) -> HttpConnection:
        """Connect, trying again until `deadline`; then `ServerUnreachable`."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return cls(endpoint.connect(deadline.remaining))
            except OSError as error:
                if deadline.remaining is not None and deadline.remaining <= pause:
                    raise _unreachable(endpoint, deadline, error) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def is_quiet(self) -> bool:
        """False when an idle connection has something to read: end, error or strays."""
        return not self._poll(0)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def receive(self, timeout: float | None) -> bytes:
        """What has come, waiting for the first byte for at most `timeout` seconds.

        Raises BlockingIOError when nothing came, other OSErrors when the connection
        broke; b"" means that the server closed it.
        """
        if timeout != self._time_limit:
            self._limit_waits(timeout)
        return self._recv(RECEIVE_BYTES)

    def finish(self, data: bytes, deadline: Deadline) -> HttpReply:
        """The complete reply that starts with `data`, what came first.

        `InferTimeout` leaves the connection as it is: the rest may be read by a later
        call. `RequestLost` and `ProtocolError` close it.
        """
        while True:
            if (reply := self.feed(data)) is not None:
                return reply
            if deadline.has_passed:
                raise timed_out(deadline)
            try:
                data = self.receive(deadline.remaining)
            except BlockingIOError:
                raise timed_out(deadline) from None
            except OSError as error:
                raise self.lost(error) from error

    def feed(self, data: bytes) -> HttpReply | None:
        """Take in bytes that `receive` returned; the reply when it is complete."""
        if not data:
            raise self.lost(None)
        try:
            reply = self._parser.feed(data)
        except ProtocolError:
            self.close()
            raise
        if reply is not None:
            self._parser = ReplyParser()
            if not reply.keep_alive:
                self.close()
        return reply

    def call(self, request: bytes, deadline: Deadline) -> HttpReply:
        """Send a control request and read its reply."""
        try:
            self.send_all(request)
        except OSError as error:
            raise self.lost(error) from error
        return self.finish_first(deadline)

    def finish_first(self, deadline: Deadline) -> HttpReply:
        """Read a reply of which nothing has been read yet."""
        try:
            data = self.receive(deadline.remaining)
        except BlockingIOError:
            raise timed_out(deadline) from None
        except OSError as error:
            raise self.lost(error) from error
        return self.finish(data, deadline)

    def send_all(self, request: bytes) -> None:
        if self._socket is None:
            raise BrokenPipeError("the connection is closed")
        self._socket.sendall(request)

    def lost(self, error: OSError | None) -> RequestLost:
        """Close, and say that the request which was sent has no known end."""
        self.close()
        reason = "the server closed it" if error is None else error.strerror or error
        return RequestLost(
            f"the connection broke before the reply was complete ({reason}); the model"
            " may have run.",
            hint="The slot is set aside until the server cannot write to it any more;"
            " send the request again if running it twice does no harm.",
        )

    def close(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.close()

    def _limit_waits(self, timeout: float | None) -> None:
        # Zero means "no limit" to the kernel, so the shortest limit is a microsecond.
        microseconds = 0 if timeout is None else max(1, round(timeout * 1e6))
        value = struct.pack("ll", *divmod(microseconds, 1_000_000))
        if self._socket is None:
            raise BrokenPipeError("the connection is closed")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._time_limit = timeout

    def __repr__(self) -> str:
        return f"<HttpConnection {'open' if self.is_open else 'closed'}>"


def timed_out(deadline: Deadline) -> InferTimeout:
    return InferTimeout(
        f"no complete reply came within {deadline.limit:g} s.",
        hint="The slot stays set aside until the reply comes; raise the timeout, or"
        " look at the server's queue.",
        timeout=deadline.limit,
    )


def _unreachable(
    endpoint: Endpoint, deadline: Deadline, error: OSError
) -> ServerUnreachable:
    return ServerUnreachable(
        f"could not connect to {endpoint.url} within {deadline.limit:g} s:"
        f" {error.strerror or error}.",
        hint="Is tritonserver running, and is this its HTTP address?",
        url=endpoint.url,
        timeout=deadline.limit,
    )
