"""Lost requests: asking the server until it cannot reach their slots any more.

Owns LOST slots (the connection broke with the request in flight) and the connection
over which they are drained, in a thread of its own: a server that does not answer keeps
nobody else waiting. Refuses slots that somebody still waits on.
"""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable

from . import control
from .background import Background
from .endpoint import Endpoint
from .errors import ServerUnreachable, ShmlaneError
from .exchange import Exchange
from .replies import HttpReply
from .slots import Slot
from .timing import Deadline
from .transport import HttpConnection

_CONTROL_LIMIT = 2.0
# A server that comes back is found within the first; one that refuses is asked less and
# less often.
_RETRY_PAUSE = 0.25
_LONGEST_PAUSE = 5.0


class _Drain:
    """A LOST slot, the talk that frees it, and when that goes on."""

    __slots__ = ("pause", "reply", "slot", "talk", "when")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.when = 0.0
        self.pause = _RETRY_PAUSE
        self.begin_anew()

    def begin_anew(self) -> None:
        self.talk: control.Talk[control.Drained] | None = None
        self.reply: HttpReply | None = None

    def put_off(self) -> None:
        """Begin anew, each time in a row after twice as long a pause."""
        self.begin_anew()
        self.when = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def go_on_after(self, seconds: float) -> None:
        self.when = time.monotonic() + seconds
        self.pause = _RETRY_PAUSE


class Drainer(Background):
    """Brings LOST slots back.

    Called in the thread: give_back with each slot that the server no longer holds,
    move_outputs before that if a server out of reach may still write to them, and
    retire with each slot that an old server may hold for ever.
    """

    def __init__(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        *,
        session: Callable[[], object],
        give_back: Callable[[Slot], None],
        move_outputs: Callable[[Slot], None],
        retire: Callable[[Slot], None],
    ) -> None:
        super().__init__(session)
        self.drains = 0
        self.retired = 0
        self._exchange = exchange
        self._endpoint = endpoint
        self._give_back = give_back
        self._move_outputs = move_outputs
        self._retire = retire
        self._drains: list[_Drain] = []
        # Closed but for a moment in which the thread is to look again.
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    @property
    def count(self) -> int:
        """How many slots are being drained."""
        return len(self._drains)

    def _has_work(self) -> bool:
        return bool(self._incoming or self._drains)

    def _wake_up(self) -> None:
        # Open already: the thread has yet to look.
        with contextlib.suppress(RuntimeError):
            self._gate.release()

    def _sleep(self, seconds: float) -> None:
        self._gate.acquire(timeout=seconds)

    def _work(self) -> None:
        """Drain over one connection, for as long as it lasts.

        Each talk begins anew with it: the next one may lead to another server on the
        same address, whose word is no proof of what the first one does.
        """
        try:
            connected = self._endpoint.connect(_CONTROL_LIMIT)
        except OSError:
            # The server is away, or no descriptor is left.
            self._sleep(_RETRY_PAUSE)
            return
        for drain in self._drains:
            drain.begin_anew()
        with contextlib.closing(HttpConnection(connected)) as line:
            while not self._stopping and self._has_work() and line.is_open:
                self._step(line)
            if not line.is_open:
                self._sleep(_RETRY_PAUSE)

    def _step(self, line: HttpConnection) -> None:
        """One step of the drain whose turn it is, or the wait for its turn."""
        while self._incoming:
            self._drains.append(_Drain(self._incoming.popleft()))
        drain = min(self._drains, key=lambda each: each.when)
        wait = drain.when - time.monotonic()
        if wait > 0:
            self._sleep(wait)
        elif line.is_quiet:
            self._advance(drain, line)
        else:
            line.close()

    def _advance(self, drain: _Drain, line: HttpConnection) -> None:
        try:
            with self._handing_over() as allowed:
                request = self._next_request(drain) if allowed else None
            if request is not None:
                drain.reply = line.call(request, Deadline(_CONTROL_LIMIT))
        except ServerUnreachable:
            # Others first: perhaps it is only this one that is not answered.
            drain.go_on_after(_RETRY_PAUSE)
        except ShmlaneError:
            drain.put_off()

    def _next_request(self, drain: _Drain) -> bytes | None:
        """What to ask now; None if the talk pauses or has ended."""
        if drain.talk is None:
            drain.talk = control.drain(self._exchange.requests, drain.slot)
        try:
            step = drain.talk.send(drain.reply)
        except StopIteration as done:
            self._end(drain, done.value)
            return None
        drain.reply = None
        if isinstance(step, control.Pause):
            drain.go_on_after(step.seconds)
            return None
        return step

    def _end(self, drain: _Drain, outcome: control.Drained) -> None:
        slot = drain.slot
        # Without room for new memory these raise, and are tried again later.
        if outcome is control.Drained.MOVE:
            self._move_outputs(slot)
        if outcome is control.Drained.GIVE_UP:
            # Still open where another client was to send the request.
            if slot.channel is not None:
                slot.channel.close()
            self._retire(slot)
        self._drains.remove(drain)
        if outcome is control.Drained.GIVE_UP:
            self.retired += 1
            return
        self._exchange.withdraw(slot)
        self.drains += 1
        self._give_back(slot)

    def __repr__(self) -> str:
        state = "running" if self.is_busy else "idle"
        return f"<Drainer {state}, {self.count} drains>"
