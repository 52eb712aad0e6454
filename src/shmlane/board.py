"""Connections on which something is expected, watched together.

Owns which connections one thread or one event loop watches, and the bell that ends its
wait. Refuses to read from them, and to know what is expected. Used by one thread at a
time, but for `ring`.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
from typing import Generic, Protocol, Self, TypeVar

from .errors import TransportError, UnsupportedPlatform

T = TypeVar("T")

# Connections told of by one wait; the next wait tells of the others.
_MOST_AT_ONCE = 64
# With fewer connections nobody looks for those that were closed.
_FEW = 16
_READABLE = 1  # As POLLIN and EPOLLIN are.


class Watched(Protocol):
    """A connection as this file sees it."""

    def fileno(self) -> int: ...


class _Entry(Generic[T]):
    """A watched connection, and what is expected on it; None while nothing is."""

    __slots__ = ("channel", "expected")

    def __init__(self, channel: Watched, expected: T) -> None:
        self.channel = channel
        self.expected: T | None = expected


class Board(Generic[T]):
    """What is expected on which connection.

    A connection stays watched when what was expected has come, because the next request
    will most likely be on it too. If something comes meanwhile, it is watched no more:
    it is not for us.
    """

    def __init__(self) -> None:
        """Raises OSError where the process has no descriptor left."""
        self._entries: dict[int, _Entry[T]] = {}
        self._many = _FEW
        with contextlib.ExitStack() as opened:
            if sys.platform == "linux":
                self._poller = select.epoll()
                opened.callback(self._poller.close)
            else:
                self._poller = select.poll()
            self._bell, self._rung = map(opened.enter_context, socket.socketpair())
            for end in (self._bell, self._rung):
                end.setblocking(False)
            self._poller.register(self._rung.fileno(), _READABLE)
            self._opened = opened.pop_all()

    @classmethod
    def open(cls) -> Self:
        """One for a caller, who is told what to do where there can be none."""
        try:
            return cls()
        except OSError as error:
            raise TransportError(
                "the connections of requests in flight cannot be watched:"
                f" {error.strerror or error}.",
                hint="This process has no descriptor left: see ulimit -n, or use fewer"
                " sessions."
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else "",
                errno=error.errno,
            ) from error

    @property
    def is_empty(self) -> bool:
        """Whether nothing is expected."""
        return all(entry.expected is None for entry in self._entries.values())

    def fileno(self) -> int:
        """Readable when something has come, for an event loop to watch."""
        if sys.platform != "linux":
            raise UnsupportedPlatform(
                "an event loop can watch all connections of a session only where there"
                " is epoll, on Linux.",
                hint="Use Session with threads here.",
            )
        return self._poller.fileno()

    def expect(self, channel: Watched, expected: T) -> None:
        """Tell of `expected` when something has come on `channel`.

        Raises `ValueError` if it is closed, and OSError if no more can be watched.
        """
        number = channel.fileno()
        entry = self._entries.get(number)
        # A closed connection leaves the poller by itself; its number comes again.
        if entry is not None and entry.channel is channel:
            entry.expected = expected
            return
        self._poller.register(number, _READABLE)
        if len(self._entries) >= self._many:
            self._drop_closed()
        self._entries[number] = _Entry(channel, expected)

    def _drop_closed(self) -> None:
        """Let go of closed connections: their numbers may never come again."""
        self._entries = {
            number: entry
            for number, entry in self._entries.items()
            if entry.expected is not None or entry.channel.fileno() == number
        }
        # Not for every new one, of many that are open.
        self._many = max(_FEW, 2 * len(self._entries))

    def forget(self, expected: T) -> None:
        """`expected` is not waited for any more."""
        for entry in self._entries.values():
            if entry.expected is expected:
                entry.expected = None

    def wait(self, timeout: float | None) -> list[T]:
        """What something has come for; nothing if the bell rang or time is up.

        timeout: seconds, None for ever. Each is told of once: who waits for more of it
        says so with `expect`, which costs nothing now.
        """
        came: list[T] = []
        for number, _ in self._poll(timeout):
            entry = self._entries.get(number)
            expected = None if entry is None else entry.expected
            if entry is None or expected is None:
                self._dismiss(number)
            else:
                entry.expected = None
                came.append(expected)
        return came

    def stirred(self) -> set[int]:
        """Descriptors of the connections on which something is to be read by now.

        Of all that are watched; `wait` tells of it as if nobody had looked.
        """
        return {number for number, _ in self._poll(0, len(self._entries) + 1)}

    def _poll(
        self, timeout: float | None, most: int = _MOST_AT_ONCE
    ) -> list[tuple[int, int]]:
        if sys.platform == "linux":
            return self._poller.poll(timeout, most)
        return self._poller.poll(None if timeout is None else timeout * 1e3)

    def _dismiss(self, number: int) -> None:
        """Something came that nobody expects here."""
        if number == self._rung.fileno():
            with contextlib.suppress(BlockingIOError):
                self._rung.recv(4096)
        else:
            self._unwatch(number)

    def _unwatch(self, number: int) -> None:
        self._entries.pop(number, None)
        # Closed meanwhile, it is watched no more.
        with contextlib.suppress(OSError, KeyError):
            self._poller.unregister(number)

    def ring(self) -> None:
        """End a wait, or the next one. Any thread may do so."""
        # A full or closed pipe belongs to a thread that looks again by itself.
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    def close(self) -> None:
        self._opened.close()

    def __repr__(self) -> str:
        expected = sum(each.expected is not None for each in self._entries.values())
        return f"<Board {expected} expected on {len(self._entries)} connections>"
