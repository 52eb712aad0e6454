"""Locks that the kernel lets go of when a process dies: on whole files, on one slot.

Owns the descriptors that hold such locks, each an open file description of its own, and
that no forked child keeps one open. Refuses to know what a lock stands for beyond its
name, and to wait for one.

A region in use is told by a shared `flock`. Who may use a slot is told by open file
description locks (`F_OFD_SETLK`) on single bytes far beyond the end of the file, where
nobody reads or writes: of slot i, the home's is byte 2**48 + 2 * i and the borrower's
the one behind it.
"""

from __future__ import annotations

import os
import struct
import sys
import weakref
from enum import IntEnum

if sys.platform == "linux":
    import fcntl

FIRST_BYTE = 1 << 48

# struct flock of fcntl(2) where off_t has 64 bits: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi0q")


class Hold(IntEnum):
    """What a lock on a slot gives the right to."""

    HOME = 0
    BORROWER = 1


class Descriptor:
    """An open file description that this process does not share with its children."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self) -> None:
        self._fd = -1
        # Known before it is opened: another thread may fork at any moment.
        _descriptors.add(self)

    def drop(self) -> None:
        """Close it; the kernel lets go of what was locked through it."""
        # Ctrl-C may have kept it from being made.
        fd = getattr(self, "_fd", -1)
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.drop()


class OwnerLock(Descriptor):
    """The shared lock that says "in use"."""

    __slots__ = ()

    def take(self, fd: int) -> None:
        """Lock the file that `fd` has open. Waits while somebody removes it."""
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)


class SlotLocks(Descriptor):
    """The locks that one session has on one region: on its slots, and on the file."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        """On the file that `fd` has open for reading and writing; raises OSError."""
        super().__init__()
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    @classmethod
    def of(cls, path: str) -> SlotLocks:
        """On the file of that name; raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def take_file(self) -> None:
        """Say that it is in use, as an `OwnerLock`. Waits while somebody removes it."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def give_back_file(self) -> None:
        """Say no more that it is; what is locked of its slots stays so."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def take(self, index: int, hold: Hold) -> bool:
        """Lock it, unless anybody else has; also if it is locked here already."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, index, hold))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def give_back(self, index: int, hold: Hold) -> None:
        """Let go of it; nothing happens where it is not locked."""
        if self._fd >= 0:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, index, hold))

    def is_taken(self, index: int, hold: Hold) -> bool:
        """Whether anybody else has it."""
        return _is_taken(self._fd, index, hold)

    def __repr__(self) -> str:
        return f"<SlotLocks {'closed' if self._fd < 0 else 'open'}>"


def taken(fd: int, slots: int, hold: Hold) -> list[int]:
    """Which of the slots of a region somebody has; `fd` has it open in any way."""
    return [index for index in range(slots) if _is_taken(fd, index, hold)]


def _is_taken(fd: int, index: int, hold: Hold) -> bool:
    asked = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, index, hold))
    kind: int = _FLOCK.unpack(asked)[0]
    return kind != fcntl.F_UNLCK


def _flock(kind: int, index: int, hold: Hold) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, FIRST_BYTE + 2 * index + hold, 1, 0)


_descriptors: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _drop_in_child() -> None:
    for descriptor in list(_descriptors):
        descriptor.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
