"""What becomes of open sessions when the interpreter ends and when the process forks.

Owns the list of sessions that may have to be ended. Refuses to know how.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol


class Living(Protocol):
    """A session as this file sees it."""

    def _end_at_exit(self) -> None: ...
    def _disown(self) -> None: ...


_living: weakref.WeakSet[Living] = weakref.WeakSet()


def look_after(session: Living) -> None:
    """End `session` with the interpreter, and disown it in forked children."""
    _living.add(session)


@atexit.register
def _end_all() -> None:
    for session in list(_living):
        # One that cannot be closed is no reason to leave the others open.
        with contextlib.suppress(Exception):
            session._end_at_exit()


def _disown_all() -> None:
    for session in list(_living):
        session._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
