"""Callers that wait for a slot in turn, each at a gate of its own.

Owns the gate, and what the caller was given by the time that it opens. Refuses to know
whose turn it is (`pool`).
"""

from __future__ import annotations

import _thread

from .errors import RegionError
from .slots import Holder


class Waiter:
    """One caller, in a thread, that waits for a slot in turn.

    It has been served once its holder has a slot. The holder is kept alive: one whose
    caller was interrupted gives back, at its end, what it was given too late.
    """

    __slots__ = ("_gate", "failure", "holder")

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.failure: RegionError | None = None
        # A bare lock: opening it is one C call that a finaliser cannot interrupt.
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    @property
    def is_served(self) -> bool:
        return self.holder.held is not None

    def open_gate(self) -> None:
        """End the wait. Under the pool's lock; doing so again does nothing."""
        if self._gate.locked():
            self._gate.release()

    def wait(self, timeout: float | None) -> None:
        self._gate.acquire(timeout=-1 if timeout is None else timeout)
