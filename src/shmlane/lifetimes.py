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
from typing import Protocol


class Living(Protocol):
    """A session as this file sees it."""

    def _end_at_exit(self) -> None: ...
    def _disown(self) -> None: ...


_living: weakref.WeakValueDictionary[int, Living] = weakref.WeakValueDictionary()


def look_after(session: Living) -> None:
    """End `session` with the interpreter, and disown it in forked children."""
    _living[id(session)] = session


def _all_living() -> Iterator[Living]:
    # All references at once: other threads open sessions meanwhile.
    for reference in _living.valuerefs():
        if (session := reference()) is not None:
            yield session


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
    for session in _all_living():
        # One that cannot be closed is no reason to leave the others open.
        with contextlib.suppress(Exception):
            session._end_at_exit()


def _disown_all() -> None:
    for session in _all_living():
        session._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
