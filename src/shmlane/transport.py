"""Sockets: where the server is, how long to wait, and one connection per slot.

Owns URLs and the TCP or Unix socket under an HTTP/1.1 connection. Refuses
to know what the bytes mean (`wire`) and whose memory they speak of (`slots`). One
request is on a connection at a time.

A wait is a `poll` with the time that is left, which signals cannot put off: a receive
with a limit of its own (SO_RCVTIMEO) begins anew after each signal that Python handles.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .errors import (
    InferTimeout,
    ProtocolError,
    RequestLost,
    ServerUnreachable,
    UsageError,
)
from .replies import FOREIGN_STATUS, HttpReply, ReplyParser
from .timing import Deadline, in_seconds

_RECEIVE_BYTES = 64 << 10

# Linux reports the path of a Unix socket in 108 bytes with the closing zero.
_MAX_UNIX_PATH = 107
# Stricter than the resolver, which takes spaces and separators for parts of a name.
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_ADDRESS = re.compile(
    rf"(?:(?P<name>{_LABEL}(?:\.{_LABEL})*\.?)"
    r"|\[(?P<ipv6>[0-9A-Fa-f:.]+)(?P<zone>%[A-Za-z0-9._~-]+)?\])"
    r"(?::(?P<port>[0-9]{0,5}))?/?"
)
_DEFAULT_PORT = 8000
_MAX_PORT = 65535
_FIRST_PAUSE = 0.005
# Milliseconds that fit a C int, 24 days: poll takes no more.
_LONGEST_POLL = float((1 << 31) - 1)
_LONGEST_PAUSE = 0.1

# A peer that vanishes without a word (its machine, or what leads to it) is noticed
# within a minute: asked from half of it on, and no longer waited for at its end.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    # Milliseconds, for bytes that the peer never acknowledged: no probe is sent then.
    "TCP_USER_TIMEOUT": 60_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the server is talked to.

    headers: sent with every request, control and inference alike (a restricted API
        expects a key there).
    replay: when the connection breaks with a request in flight, wait until the server
        cannot touch its memory any more and send it again, instead of `RequestLost`.
        The model may then run twice for one call.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the HTTP frontend of a server listens. Port 8000 if none is given."""

    url: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read `host:port`, `http://host:port` or `unix:///path`; else `UsageError`."""
        scheme, rest = url.split("://", 1) if "://" in url else ("http", url)
        if scheme.lower() == "unix":
            return cls._unix(url, rest)
        if scheme.lower() != "http":
            raise UsageError(
                f"{url!r}: scheme {scheme!r} is not supported.",
                hint="Use host:port, http://host:port or unix:///path/to/http.sock.",
            )
        match = _ADDRESS.fullmatch(rest)
        port = int(match["port"] or _DEFAULT_PORT) if match else 0
        if match is None or not 0 < port <= _MAX_PORT or not _is_ipv6(match["ipv6"]):
            raise UsageError(
                f"{url!r} is not a server address.",
                hint=f"Perhaps unix://{url}."
                if url.startswith("/")
                else "Give host:port with a port from 1 to 65535 and no path, for"
                " example localhost:8000 or [::1]:8000.",
            )
        return cls(url, match["name"] or match["ipv6"] + (match["zone"] or ""), port)

    @classmethod
    def _unix(cls, url: str, path: str) -> Endpoint:
        length = len(os.fsencode(path))
        if not path.startswith("/") or "\0" in path or length > _MAX_UNIX_PATH:
            raise UsageError(
                f"{url!r} is not a Unix socket address: the path must be absolute and"
                f" at most {_MAX_UNIX_PATH} bytes, this one has {length}."
            )
        return cls(url, "localhost", 0, path)

    @property
    def address(self) -> str:
        """What is connected to, in words: the port also where the URL leaves it out."""
        return self.url if self.path else self.host_header

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
            _set_options(connected)
            return connected
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.settimeout(timeout)
            unix.connect(self.path)
        except BaseException:
            unix.close()
            raise
        return unix

    def is_deserted(self, timeout: float | None) -> bool:
        """True when no server is there; what one knew that was, is gone with it."""
        try:
            self.connect(timeout).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
        return False


def _set_options(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        # Not every system has each of them; then its own values hold.
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_ipv6(address: str | None) -> bool:
    """Whether the resolver takes it; True for None, where a name stands instead."""
    try:
        return address is None or bool(socket.inet_pton(socket.AF_INET6, address))
    except OSError:
        return False


class HttpConnection:
    """One keep-alive connection that carries one request at a time.

    Used by one thread at a time. Every error that makes it useless also closes it.
    """

    __slots__ = ("_address", "_parser", "_poll", "_recv", "_send", "_socket")

    def __init__(self, connected: socket.socket, *, address: str = "") -> None:
        connected.settimeout(None)
        self._address = address
        self._socket: socket.socket | None = connected
        self._send = connected.send
        self._recv = connected.recv
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        self._poll: Callable[[float | None], object] = poller.poll
        self._parser = ReplyParser()

    @classmethod
    def open(cls, endpoint: Endpoint, deadline: Deadline) -> HttpConnection:
        """Connect, trying again until `deadline`; then `ServerUnreachable`."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return cls(
                    endpoint.connect(deadline.remaining), address=endpoint.address
                )
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

    def send(self, request: bytes) -> bool:
        """True when every byte was handed to the kernel.

        False means that the last byte never was, so that the server cannot have begun.
        A request of ours fits the empty buffer of an idle connection: this never waits.
        """
        try:
            if self._send(request) == len(request):
                return True
        except OSError:
            pass
        self.close()
        return False

    def receive(self, timeout: float | None) -> bytes:
        """What has come, waiting for the first byte for at most `timeout` seconds.

        `InferTimeout` leaves the connection as it is, so that a later call can read on;
        `RequestLost` closes it.
        """
        limit = None if timeout is None else min(timeout * 1e3, _LONGEST_POLL)
        if not self._poll(limit):
            raise _timed_out(timeout)
        try:
            data = self._recv(_RECEIVE_BYTES)
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost(None)
        return data

    def feed(self, data: bytes) -> HttpReply | None:
        """Take in received bytes; the reply when it is complete, else None."""
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

    def finish(self, data: bytes, deadline: Deadline) -> HttpReply:
        """The complete reply that starts with `data`, what came first.

        Raises what `receive` raises, and `ProtocolError`, which closes the connection.
        """
        while (reply := self.feed(data)) is None:
            if deadline.has_passed:
                raise _timed_out(deadline.limit)
            data = self.receive(deadline.remaining)
        return reply

    def call(self, request: bytes, deadline: Deadline) -> HttpReply:
        """Send a control request and read its reply, else `ServerUnreachable`.

        A failed call closes the connection, so that its late reply meets nobody. So
        does one that something in between answered: the server's answer may yet come.
        """
        try:
            if not self.send(request):
                raise BrokenPipeError("the connection broke while sending")
            reply = self.finish(self.receive(deadline.remaining), deadline)
        except (OSError, InferTimeout, RequestLost) as error:
            self.close()
            limit = (
                ""
                if deadline.limit is None
                else f" within {in_seconds(deadline.limit)}"
            )
            asked = request.split(b" HTTP/1.1", 1)[0].decode("latin-1")
            raise ServerUnreachable(
                f"{self._address or 'the server'} did not answer {asked}{limit}.",
                hint="It may be overloaded, stopped or restarting.",
                url=self._address,
            ) from error
        except BaseException:
            # Ctrl-C: the next call would take this one's reply for its own.
            self.close()
            raise
        if reply.status in FOREIGN_STATUS:
            self.close()
            raise ServerUnreachable(
                "something between this process and Triton answered a control request"
                f" in its place (status {reply.status}).",
                hint="Connect to Triton directly: shared memory needs the same host"
                " anyway.",
                status=reply.status,
            )
        return reply

    def close(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            # The descriptor's number may belong to another connection soon.
            self._poll = _never_quiet
            with contextlib.suppress(OSError):
                connected.close()

    def _lost(self, error: OSError | None) -> RequestLost:
        self.close()
        reason = "the server closed it" if error is None else error.strerror or error
        return RequestLost(
            f"the connection broke before the reply was complete ({reason}); the model"
            " may have run.",
            hint="The slot is set aside until the server cannot write to it any more;"
            " send the request again if running it twice does no harm.",
        )

    def __repr__(self) -> str:
        return f"<HttpConnection {'open' if self.is_open else 'closed'}>"


def _never_quiet(_limit: float | None) -> object:
    return True


def _timed_out(timeout: float | None) -> InferTimeout:
    return InferTimeout(
        f"no complete reply came within {in_seconds(timeout)} of waiting.",
        hint="The slot stays set aside until the reply comes: to try again, release"
        " this lease and take another. Raise the timeout, or look at the server's"
        " queue.",
        timeout=timeout,
    )


def _unreachable(
    endpoint: Endpoint, deadline: Deadline, error: OSError
) -> ServerUnreachable:
    hint = "Is tritonserver running, and is this its HTTP address?"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "This process has no descriptor left: see ulimit -n, or use fewer slots."
    return ServerUnreachable(
        f"could not connect to {endpoint.address} within {in_seconds(deadline.limit)}:"
        f" {error.strerror or error}.",
        hint=hint,
        url=endpoint.url,
        timeout=deadline.limit,
    )
