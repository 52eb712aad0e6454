"""Where requests wait inside the model, and the faults that are to come.

Owns the gate that tests hold and release, the count of requests behind it, and the
queue of faults. Refuses to know sockets and models.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from .faults import Delay, Fault, checked
from .http import Request


class Stage:
    """The place inside the model where a request can be held. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_held = False
        self._releases = 0
        self._inside = 0

    @property
    def inside(self) -> int:
        """Requests that are inside the model now, held or running."""
        return self._inside

    @property
    def is_held(self) -> bool:
        return self._is_held

    def hold(self) -> None:
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        """Let everybody go on who waits now, even if it is held again at once."""
        with self._changed:
            self._is_held = False
            self._releases += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let requests find out that their server has ended."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, count: int, timeout: float) -> bool:
        """True once at least `count` requests are inside."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside >= count, timeout)

    @contextlib.contextmanager
    def enter(
        self, ended: threading.Event, delay: Delay | None = None
    ) -> Iterator[None]:
        """Be inside the model, once let in or once the server has ended."""
        with self._changed:
            self._inside += 1
            self._changed.notify_all()
        try:
            self._wait_for_release(ended)
            if delay is not None:
                delay.wait(ended)
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _wait_for_release(self, ended: threading.Event) -> None:
        with self._changed:
            mine = self._releases
            self._changed.wait_for(
                lambda: not self._is_held or self._releases != mine or ended.is_set()
            )


class FaultQueue:
    """Faults in the order in which requests take them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[str | None, Fault]] = []

    def add(self, faults: Iterable[Fault], path: str | None) -> None:
        """For inferences, or for requests whose path contains `path`."""
        added = [(path, checked(fault)) for fault in faults]
        with self._lock:
            self._waiting += added

    def take(self, request: Request) -> Fault | None:
        """The first fault that is meant for such a request."""
        with self._lock:
            for number, (path, fault) in enumerate(self._waiting):
                if request.is_inference if path is None else path in request.path:
                    del self._waiting[number]
                    return fault
        return None

    @property
    def waiting(self) -> tuple[Fault, ...]:
        with self._lock:
            return tuple(fault for _, fault in self._waiting)
