"""The gate that every call of a client passes, so that all of them can be held back.

Owns who is inside and for how long, and the word for a call that never ends. Refuses to
interrupt one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable

PATIENCE = 0.2


class Gate:
    """Closed at first. Closing it keeps new calls out and leaves those inside alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._numbers = itertools.count()
        self._inside: dict[int, float] = {}

    def run(self, act: Callable[[], None]) -> None:
        """Run `act` inside, or return after a moment if the gate stays closed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_open, PATIENCE):
                return
            me = self._let_in()
        try:
            act()
        finally:
            self._let_out(me)

    async def run_task(self, act: Callable[[], Awaitable[object]]) -> None:
        """As `run`, for a task, which keeps nobody from going on meanwhile."""
        with self._changed:
            me = self._let_in() if self._is_open else None
        if me is None:
            await asyncio.sleep(PATIENCE)
            return
        try:
            await act()
        finally:
            self._let_out(me)

    def _let_in(self) -> int:
        me = next(self._numbers)
        self._inside[me] = time.monotonic()
        return me

    def _let_out(self, me: int) -> None:
        with self._changed:
            del self._inside[me]
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self, *, timeout: float) -> bool:
        """Let nobody in; True once nobody is inside."""
        with self._changed:
            self._is_open = False
            return self._changed.wait_for(lambda: not self._inside, timeout)

    @property
    def longest(self) -> float:
        """Seconds that the oldest call inside has taken by now."""
        with self._changed:
            oldest = min(self._inside.values(), default=time.monotonic())
        return time.monotonic() - oldest

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Gate {state}, {len(self._inside)} inside>"
