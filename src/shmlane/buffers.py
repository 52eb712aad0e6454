"""Memory that bytes leave from and arrive in, on their way over a connection.

Owns what is left of a request sent from its callers' own arrays, and the one buffer of
a connection that large replies are received into. Refuses to do I/O and to know what
the bytes mean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from sys import getrefcount

import numpy as np
import numpy.typing as npt

# One cache line, as tensors in shared memory have it; any datatype is aligned there.
_ALIGNMENT = 64

# Buffers that one call of the kernel takes; POSIX promises no fewer than 16.
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16

# Memory so large is let go of once so many bodies in a row needed less than that part
# of it: the eighth.
_LARGE_BYTES = 1 << 20
_USEFUL_PART = 8
_IDLE_BODIES = 16

# Reference counts are exact only under the GIL.
_COUNTS_ARE_EXACT: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


class Outbox:
    """Bytes that are to leave, one part behind the other, where they lie.

    A part is any contiguous buffer; nothing of it is copied.
    nbytes: of all parts. left: those that have not left yet.
    """

    __slots__ = ("_first", "_views", "left", "nbytes")

    def __init__(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        views = [memoryview(part) for part in parts]
        # What has no bytes cannot be cast, and need not be sent.
        self._views = [view.cast("B") for view in views if view.nbytes]
        self._first = 0
        self.left = self.nbytes = sum(map(len, self._views))

    def batch(self) -> list[memoryview]:
        """What comes next, as much of it as the kernel takes at once."""
        return self._views[self._first : self._first + _MOST_BUFFERS]

    def advance(self, count: int) -> None:
        """So many bytes have left."""
        self.left -= count
        while count and count >= len(self._views[self._first]):
            count -= len(self._views[self._first])
            self._first += 1
        if count:
            self._views[self._first] = self._views[self._first][count:]

    def let_go(self) -> None:
        """Keep nothing of what the parts lie in; no more is sent."""
        self._views.clear()

    def __repr__(self) -> str:
        return f"<Outbox {self.left} of {self.nbytes} bytes left>"


class Inbox:
    """Memory for one body at a time, used again as soon as nobody looks into it.

    Whoever still holds a view of an earlier body keeps that one's memory, and the next
    body gets its own. Memory is not cleared: a view has what was received, once it was.
    One large body does not keep its memory for ever: see `weigh`.
    """

    __slots__ = ("_idle_bodies", "_resting", "_room")

    def __init__(self) -> None:
        self._make_room(0)

    def take(self, nbytes: int, aligned: int = 0) -> memoryview:
        """Writable memory whose byte number `aligned` lies on a cache line.

        Raises MemoryError.
        """
        self.weigh(nbytes)
        if not self._is_at_rest or self._room.nbytes < nbytes + _ALIGNMENT:
            # First of all, for two large buffers may be one too many.
            self._make_room(0)
            self._make_room(nbytes + _ALIGNMENT)
        address: int = self._room.__array_interface__["data"][0]
        start = -(address + aligned) % _ALIGNMENT
        return self._room.data[start : start + nbytes]

    def weigh(self, nbytes: int) -> None:
        """A body of so many bytes comes, here or elsewhere.

        Memory that is far too large for many of them in a row is let go of.
        """
        room = self._room.nbytes
        if room < _LARGE_BYTES or nbytes * _USEFUL_PART > room:
            self._idle_bodies = 0
            return
        self._idle_bodies += 1
        if self._idle_bodies == _IDLE_BODIES:
            self._make_room(0)

    def _make_room(self, nbytes: int) -> None:
        self._idle_bodies = 0
        self._room: npt.NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        # Counted where no view can exist yet.
        self._resting = getrefcount(self._room)

    @property
    def _is_at_rest(self) -> bool:
        """True when nobody outside holds a view of the memory."""
        return _COUNTS_ARE_EXACT and getrefcount(self._room) == self._resting

    def __repr__(self) -> str:
        state = "at rest" if self._is_at_rest else "in use"
        return f"<Inbox of {self._room.nbytes} bytes, {state}>"
