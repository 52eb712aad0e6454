"""What becomes of open sessions when the interpreter ends and when the process forks.

Owns the list of sessions that may have to be ended, and the threads in which that is
done where nobody can wait for it. Refuses to know how.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Living(Protocol):
    """A session as this file sees it."""

    def _end_at_exit(self) -> None: ...
    def _disown(self) -> None: ...


class Weakly(Generic[T]):
    """Things that others keep alive; any thread may add some while another looks."""

    def __init__(self) -> None:
        self._things: weakref.WeakValueDictionary[int, T] = (
            weakref.WeakValueDictionary()
        )

    def add(self, thing: T) -> None:
        self._things[id(thing)] = thing

    def __iter__(self) -> Iterator[T]:
        # All references at once, which a WeakSet does not give.
        found = [reference() for reference in self._things.valuerefs()]
        return iter([thing for thing in found if thing is not None])


_living: Weakly[Living] = Weakly()


def look_after(session: Living) -> None:
    """End `session` with the interpreter, and disown it in forked children."""
    _living.add(session)


class Ending:
    """An end that a thread is to bring about; that of the interpreter waits for it.

    end: whoever comes first does it, and the other finds nothing to do. disown: called
    in a forked child, where there is no such thread.
    """

    def __init__(self, end: Callable[[], None], disown: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end
        self._disown_all = disown
        self._running = threading.Lock()
        look_after(self)

    def run(self) -> None:
        with self._running:
            end, self._end = self._end, None
            if end is not None:
                end()

    def _end_at_exit(self) -> None:
        self.run()

    def _disown(self) -> None:
        self._running = threading.Lock()
        self._end = None
        self._disown_all()


def in_background(work: Callable[[], object]) -> bool:
    """False where no thread can be had.

    A bare thread: a finaliser that calls this may be running inside of `threading`.
    """
    try:
        _thread.start_new_thread(work, ())
    except RuntimeError:
        return False
    return True


@atexit.register
def _end_all() -> None:
    for session in _living:
        # One that cannot be closed is no reason to leave the others open.
        with contextlib.suppress(Exception):
            session._end_at_exit()


def _disown_all() -> None:
    for session in _living:
        session._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
