"""Sockets: how long to wait, and one connection per slot.

Owns the TCP or Unix socket under an HTTP/1.1 connection. Refuses to know where it leads
(`endpoint`), what the bytes mean (`wire`) and whose memory they speak of (`slots`). One
request is on a connection at a time.

A wait is a `poll` with the time that is left, which signals cannot put off: a receive
with a limit of its own (SO_RCVTIMEO) begins anew after each signal that Python handles.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from .buffers import Inbox, Outbox
from .endpoint import NO_TIME, Endpoint
from .errors import InferTimeout, ProtocolError, RequestLost, ServerUnreachable
from .replies import FOREIGN_STATUS, HttpReply, ReplyParser
from .timing import Deadline, in_seconds
from .trouble import broken, cut_off, timed_out, unreachable

T = TypeVar("T")

# A reply without tensors fits, also that of many outputs. More would be asked of the
# heap for each, and given back in part: what is left between lasting arrays is of no
# use to the next.
_RECEIVE_BYTES = 16 << 10
# Large bodies come in small pieces: to be woken for each costs more than to copy it.
_WAKE_BYTES = 256 << 10

_FIRST_PAUSE = 0.005
# Milliseconds that fit a C int, 24 days: poll takes no more.
_LONGEST_POLL = float((1 << 31) - 1)
_LONGEST_PAUSE = 0.1


class HttpConnection:
    """One keep-alive connection that carries one request at a time.

    Used by one thread at a time. Every error that makes it useless also closes it.
    own_ids: callers' own ids of requests that were sent over it.
    """

    __slots__ = (
        "_address",
        "_inbox",
        "_parser",
        "_poll",
        "_recv",
        "_recv_into",
        "_send",
        "_sendmsg",
        "_socket",
        "_woken_at",
        "fileno",
        "own_ids",
    )

    def __init__(self, connected: socket.socket, *, address: str = "") -> None:
        connected.settimeout(None)
        self._address = address
        self.own_ids: set[str] = set()
        self._socket: socket.socket | None = connected
        self._send: Callable[[bytes | bytearray], int] = connected.send
        self._sendmsg: Callable[..., int] = connected.sendmsg
        self._recv = connected.recv
        self._recv_into = connected.recv_into
        # -1 once it is closed.
        self.fileno: Callable[[], int] = connected.fileno
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        self._poll: Callable[[float | None], object] = poller.poll
        self._woken_at = 1
        self._inbox = Inbox()
        self._parser = ReplyParser(inbox=self._inbox)

    @classmethod
    def open(cls, endpoint: Endpoint, deadline: Deadline) -> HttpConnection:
        """Connect, trying again until `deadline`; then `ServerUnreachable`."""
        pause = _FIRST_PAUSE
        cause: OSError | None = None
        try:
            while True:
                try:
                    connected = endpoint.connect(deadline.remaining)
                    return cls(connected, address=endpoint.address)
                except OSError as error:
                    # One that had no time left tells less than the one before.
                    cause = cause if cause and isinstance(error, NO_TIME) else error
                if deadline.remaining is not None and deadline.remaining <= pause:
                    raise unreachable(endpoint, deadline, cause) from cause
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            del cause

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def is_quiet(self) -> bool:
        """False when an idle connection has something to read: end, error or strays."""
        return not self._poll(0)

    def comes_within(self, seconds: float) -> bool:
        """Whether there is something to read, or will be within that time."""
        return bool(self._poll(seconds * 1e3))

    def send(self, request: bytes | bytearray) -> bool:
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

    def send_parts(
        self, parts: Sequence[bytes | bytearray | memoryview], deadline: Deadline
    ) -> bool:
        """Send a request in parts, from where they lie; True when a reply is to come.

        False means what it does for `send`. True means that every byte was handed to
        the kernel, or that the server answered before that: the rest is kept, and
        nothing can be sent behind half a request any more.

        `InferTimeout` when the deadline passes before the last byte, and whatever else
        is raised, leaves the connection closed, and the server without a request.
        """
        outbox = Outbox(parts)
        # What is raised is kept by whom it may, and with it the names of this frame.
        del parts
        try:
            while outbox.left:
                if not self._send_some(outbox, deadline):
                    return self._is_answered()
        except BaseException:
            self.close()
            raise
        finally:
            outbox.let_go()
        return True

    def _send_some(self, outbox: Outbox, deadline: Deadline) -> bool:
        """Send what fits and wait for room; False if there is something to read."""
        try:
            outbox.advance(self._sendmsg(outbox.batch(), (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except OSError:
            return False
        if not outbox.left:
            return True
        if deadline.has_passed:
            raise cut_off(outbox, deadline.limit)
        poller = select.poll()
        poller.register(self, select.POLLIN | select.POLLOUT)
        happened = poller.poll(_milliseconds(deadline.remaining))
        return all(event == select.POLLOUT for _, event in happened)

    def _is_answered(self) -> bool:
        """Whether half a request has an answer; if not, the connection broke."""
        try:
            if self._recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._send = self._sendmsg = _refuse_to_send
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
        # As `_milliseconds`, without a call: each small reply comes by here.
        limit = None if timeout is None else min(timeout * 1e3, _LONGEST_POLL)
        # It does not look again after a signal handler that took all of the time.
        if not (self._poll(limit) or self._poll(0)):
            raise timed_out(timeout)
        try:
            data = self._recv(_RECEIVE_BYTES)
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost(None)
        return data

    def receive_now(self) -> bytes | None:
        """As `receive`, without a wait: None if nothing has come."""
        try:
            data = self._recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost(None)
        return data

    def advance(self) -> HttpReply | None:
        """Take in what has come, without a wait; the reply when it is complete.

        Raises `RequestLost` and `ProtocolError`, which close the connection.
        """
        if self._parser.room is None:
            data = self.receive_now()
            reply = None if data is None else self.feed(data)
        else:
            reply = self._take_in_place()
        room = self._parser.room
        self._wake_at(1 if room is None else min(len(room), _WAKE_BYTES))
        return reply

    def feed(self, data: bytes) -> HttpReply | None:
        """Take in received bytes; the reply when it is complete, else None."""
        return self._take_in(self._parser.feed, data)

    def _take_in(
        self, parse: Callable[[T], HttpReply | None], received: T
    ) -> HttpReply | None:
        try:
            reply = parse(received)
        except ProtocolError:
            self.close()
            raise
        if reply is not None:
            self._parser = ReplyParser(inbox=self._inbox)
            if not reply.keep_alive:
                self.close()
        return reply

    def finish(self, data: bytes, deadline: Deadline) -> HttpReply:
        """The complete reply that starts with `data`, what came first.

        Raises what `receive` raises, and `ProtocolError`, which closes the connection.
        """
        while (reply := self.feed(data)) is None:
            if self._parser.room is not None:
                return self._fill(deadline)
            if deadline.has_passed:
                raise timed_out(deadline.limit)
            data = self.receive(deadline.remaining)
        return reply

    def _fill(self, deadline: Deadline) -> HttpReply:
        """Receive what is left of a large body right where it belongs."""
        try:
            while not deadline.has_passed:
                reply = self._receive_in_place(deadline.remaining)
                if reply is not None:
                    return reply
        finally:
            # Whoever waits next, even for the rest of this, waits for the first byte.
            self._wake_at(1)
        raise timed_out(deadline.limit)

    def _receive_in_place(self, timeout: float | None) -> HttpReply | None:
        room = self._parser.room
        assert room is not None
        self._wake_at(min(len(room), _WAKE_BYTES))
        if not self._poll(_milliseconds(timeout)):
            raise timed_out(timeout)
        return self._take_in_place()

    def _take_in_place(self) -> HttpReply | None:
        """Receive what has come of a large body right where it belongs."""
        room = self._parser.room
        assert room is not None
        try:
            # Without the flag, it would wait for as much as the poll did.
            count = self._recv_into(room, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        if not count:
            raise self._lost(None)
        return self._take_in(self._parser.filled, count)

    def _wake_at(self, nbytes: int) -> None:
        """Have `poll` wait for so many bytes, or for the end."""
        connected = self._socket
        if connected is not None and nbytes != self._woken_at:
            # Ctrl-C in between has it set once too often.
            self._woken_at = 0
            # Where it cannot be told to, it wakes more often.
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._woken_at = nbytes

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
        return broken(error)

    def __repr__(self) -> str:
        return f"<HttpConnection {'open' if self.is_open else 'closed'}>"


def _milliseconds(timeout: float | None) -> float | None:
    return None if timeout is None else min(timeout * 1e3, _LONGEST_POLL)


def _never_quiet(_limit: float | None) -> object:
    return True


def _refuse_to_send(*_request: object) -> int:
    raise BrokenPipeError("half a request was sent before")
