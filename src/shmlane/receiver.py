"""The one background thread: it waits for replies that nobody waits for any more.

Owns LATE slots (the caller gave up, the connection is kept and the reply awaited) and
LOST slots (the connection broke, the server's references are drained). Refuses slots
that somebody still waits on. The thread starts with the first such slot and ends with
the last one.
"""

from __future__ import annotations

import _thread
import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable

from . import control
from .errors import ShmlaneError
from .exchange import Exchange
from .replies import HttpReply
from .slots import Label, Slot
from .timing import Deadline
from .transport import Endpoint, HttpConnection

_CONTROL_LIMIT = 2.0
_RETRY_PAUSE = 0.25


class _Drain:
    """A LOST slot, the talk that frees it, and when that goes on."""

    __slots__ = ("reply", "slot", "talk", "when")

    def __init__(
        self, slot: Slot, talk: control.Talk[control.Drained], when: float
    ) -> None:
        self.slot = slot
        self.talk = talk
        self.when = when
        self.reply: HttpReply | None = None


class Receiver:
    """Brings LATE and LOST slots back. `watch` may be called from finalisers.

    Called in the thread: give_back with each slot that the server no longer holds,
    move_outputs before that if a server out of reach may still write to them, and
    retire with each slot that an old server may hold for ever.
    """

    def __init__(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        *,
        give_back: Callable[[Slot], None],
        move_outputs: Callable[[Slot], None],
        retire: Callable[[Slot], None],
    ) -> None:
        self.late_replies = 0
        self.drains = 0
        self.retired = 0
        self._exchange = exchange
        self._endpoint = endpoint
        self._give_back = give_back
        self._move_outputs = move_outputs
        self._retire = retire
        self._incoming: deque[Slot] = deque()
        self._drains: list[_Drain] = []
        self._stopping = False
        # Held by the thread for as long as it runs. A bare lock and a bare thread: no
        # Python code of `threading` that a finaliser could be running inside of.
        self._running = _thread.allocate_lock()
        self._wake: socket.socket | None = None

    @property
    def is_busy(self) -> bool:
        return self._running.locked() or bool(self._incoming and not self._stopping)

    def watch(self, slot: Slot) -> None:
        """Wait for the reply of a slot whose caller has left."""
        self._incoming.append(slot)
        self._wake_up()
        self._start_unless_running()

    def stop(self) -> None:
        """End the thread soon; slots it waited for stay with the server."""
        self._stopping = True
        self._wake_up()

    def join(self, timeout: float) -> None:
        """After `stop`: wait until the thread gives no slot back any more."""
        if self._running.acquire(timeout=timeout):
            self._running.release()

    def _wake_up(self) -> None:
        wake = self._wake
        if wake is not None:
            # A full or closed pipe belongs to a thread that looks again by itself.
            with contextlib.suppress(OSError):
                wake.send(b"\0")

    def _start_unless_running(self) -> None:
        if not self._stopping and not self._running.locked():
            # The machine may refuse a thread now: the slots wait for the next nudge.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._run, ())

    def nudge(self) -> None:
        """Start the thread if slots wait for it and it could not be started before."""
        if self._incoming:
            self._start_unless_running()

    def _run(self) -> None:
        # Taken here: a thread that cannot start, or Ctrl-C, must not leave it taken.
        # Of several threads started at once, all but one end at once.
        if not self._running.acquire(blocking=False):
            return
        try:
            while not self._stopping and self._incoming:
                self._work()
        finally:
            self._wake = None
            self._running.release()
        # A slot that came after the last look and before the release.
        if self._incoming:
            self._start_unless_running()

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                self._open(stack)
            except OSError:
                # No descriptor left. The slots stay aside until there is one.
                time.sleep(_RETRY_PAUSE)
                return
            while not self._stopping and self._has_work():
                self._step()

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._selector = stack.enter_context(selectors.DefaultSelector())
        wake, self._woken = socket.socketpair()
        for end in (wake, self._woken):
            stack.enter_context(end)
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._control: HttpConnection | None = None
        stack.callback(self._close_control)
        self._wake = wake

    def _has_work(self) -> bool:
        return bool(self._incoming or self._drains or len(self._selector.get_map()) > 1)

    def _step(self) -> None:
        while self._incoming:
            self._take_in(self._incoming.popleft())
        for key, _ in self._selector.select(self._time_to_next_drain()):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._read(key)
        for drain in [each for each in self._drains if each.when <= time.monotonic()]:
            self._advance(drain)

    def _take_in(self, slot: Slot) -> None:
        channel = slot.channel
        if channel is None or slot.label is Label.LOST:
            self._drains.append(self._new_drain(slot, delay=0))
        else:
            self._selector.register(channel, selectors.EVENT_READ, slot)

    # --- late replies -----------------------------------------------------------------

    def _read(self, key: selectors.SelectorKey) -> None:
        slot: Slot = key.data
        channel = slot.channel
        try:
            # A session that closes takes the connection away, and stops this thread.
            if channel is not None:
                reply = channel.feed(channel.receive(_CONTROL_LIMIT))
                if reply is None:
                    return
                self._exchange.accept(slot, reply, b"")
        except ShmlaneError:
            # An error of the model ends the request as well as a success does. What
            # leaves the slot held is a reply that cannot be trusted. Either way the
            # connection is not used again: an error may come twice, and names no id.
            if channel is not None:
                channel.close()
        self._selector.unregister(key.fd)
        if slot.server_hold:
            self._drains.append(self._new_drain(slot, delay=0))
        else:
            self.late_replies += 1
            self._give_back(slot)

    # --- lost requests ----------------------------------------------------------------

    def _new_drain(self, slot: Slot, *, delay: float) -> _Drain:
        talk = control.drain(self._exchange.requests, slot)
        return _Drain(slot, talk, time.monotonic() + delay)

    def _time_to_next_drain(self) -> float | None:
        if not self._drains:
            return None
        return max(0.0, min(each.when for each in self._drains) - time.monotonic())

    def _advance(self, drain: _Drain) -> None:
        """One step of one drain; a server that is away now is asked again later."""
        self._drains.remove(drain)
        try:
            step = drain.talk.send(drain.reply)
            drain.reply = None
            if isinstance(step, control.Pause):
                drain.when = time.monotonic() + step.seconds
            else:
                drain.reply = self._call(step)
            self._drains.append(drain)
        except StopIteration as done:
            self._end_drain(drain.slot, done.value)
        except ShmlaneError:
            self._drains.append(self._new_drain(drain.slot, delay=_RETRY_PAUSE))

    def _end_drain(self, slot: Slot, outcome: control.Drained) -> None:
        if outcome is control.Drained.GIVE_UP:
            self.retired += 1
            self._retire(slot)
            return
        if outcome is control.Drained.MOVE:
            try:
                self._move_outputs(slot)
            except ShmlaneError:
                # No room for them now.
                self._drains.append(self._new_drain(slot, delay=_RETRY_PAUSE))
                return
        self._exchange.withdraw(slot)
        self.drains += 1
        self._give_back(slot)

    def _call(self, request: bytes) -> HttpReply:
        deadline = Deadline(_CONTROL_LIMIT)
        if self._control is not None and not self._control.is_quiet:
            self._control.close()
        if self._control is None or not self._control.is_open:
            self._control = HttpConnection.open(self._endpoint, deadline)
        return self._control.call(request, deadline)

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()

    def __repr__(self) -> str:
        state = "running" if self.is_busy else "idle"
        return f"<Receiver {state}, {len(self._drains)} drains>"
