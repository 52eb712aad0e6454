"""A thread that is there while there are slots for it, and ends with its session.

Owns starting and ending it, the slots that are brought to it, and that none of them
changes hands any more once it was stopped. Refuses to know what the work is.
"""

from __future__ import annotations

import _thread
import abc
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from .slots import Holder, Slot

# Only for deadlocks: a finaliser may stop what waits for a lock under that finaliser.
_HANDOVER_LIMIT = 5.0


class Background(abc.ABC):
    """What the threads have in common that bring slots back.

    `watch`, `nudge` and `stop` may be called from finalisers, in any thread.
    session: the session, or None once it is gone.
    """

    def __init__(self, session: Callable[[], object]) -> None:
        self._session = session
        self._incoming: deque[Slot] = deque()
        self._stopping = False
        # Held by the thread for as long as it runs. A bare lock and a bare thread: no
        # Python code of `threading` that a finaliser could be running inside of.
        self._running = _thread.allocate_lock()
        self._thread = 0
        # Held while a slot changes hands, which may run a finaliser that stops this.
        self._handing = threading.RLock()

    @property
    def is_busy(self) -> bool:
        return self._running.locked() or (not self._stopping and self._has_work())

    @property
    def is_this_thread(self) -> bool:
        """Whether this is asked in the thread itself, where nobody can wait for it."""
        return self._running.locked() and self._thread == _thread.get_ident()

    def watch(self, slot: Slot) -> None:
        """Bring a slot: the thread is woken, or started."""
        self.take_over(Holder(slot))

    def take_over(self, holder: Holder) -> None:
        """Bring the slot of `holder`, which Ctrl-C leaves in the one or the other."""
        try:
            self._incoming.extend(iter(holder._hold.pop, None))
            self._wake_up()
            self.nudge()
        except BaseException:
            # Ctrl-C: the slot may be here by now, and the thread must hear of it.
            self._wake_up()
            self.nudge()
            raise

    def nudge(self) -> bool:
        """Start the thread if there is work for it and it does not run.

        False if the machine refuses one now: then the slots wait for the next nudge.
        """
        if not self._stopping and self._has_work() and not self._running.locked():
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:
                return False
        return True

    def stop(self) -> None:
        """End the thread soon; slots that it has not given back stay with the server.

        None changes hands after this has returned: each was given back, or is held.
        """
        self._stopping = True
        self._wake_up()
        if self._handing.acquire(timeout=_HANDOVER_LIMIT):
            self._handing.release()

    def disown(self) -> None:
        """In a forked child, where there is no thread: bring nothing back."""
        self._stopping = True
        # The thread may have held them, which does not exist here.
        self._running = _thread.allocate_lock()
        self._handing = threading.RLock()

    def _run(self) -> None:
        # Taken here: a thread that cannot start, or Ctrl-C, must not leave it taken.
        # Of several threads started at once, all but one end at once.
        if not self._running.acquire(blocking=False):
            return
        self._thread = _thread.get_ident()
        try:
            while not self._stopping and self._has_work():
                self._work()
        finally:
            self._running.release()
        # A slot that came after the last look and before the release.
        self.nudge()

    @contextlib.contextmanager
    def _handing_over(self) -> Iterator[bool]:
        """Whether slots may change hands; `stop` waits for the end of this.

        The session is kept meanwhile: a collector that runs in this thread would close
        it between the steps, and overlook the slot that is neither here nor there.
        """
        session = self._session()
        with self._handing:
            self._stopping = self._stopping or session is None
            yield not self._stopping

    @abc.abstractmethod
    def _has_work(self) -> bool:
        """Whether the thread is needed."""

    @abc.abstractmethod
    def _work(self) -> None:
        """In the thread: go on until there is no work, or `_stopping`."""

    @abc.abstractmethod
    def _wake_up(self) -> None:
        """Have the thread look at `_incoming` and `_stopping` again."""
