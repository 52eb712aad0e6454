"""Waiting in blocking code: one inference, and talks with the server.

Owns the send, the receive and the retries of a blocking session, and the connections
that it makes. Refuses to decide what a reply means (`exchange`) and how servers differ
(`control`). Thread-safe, as long as a slot belongs to one caller.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from typing import TypeVar

from . import control
from .errors import (
    InferTimeout,
    PoolClosed,
    RequestLost,
    ServerUnreachable,
    ShmlaneError,
)
from .exchange import Answer, Exchange, Verdict
from .memory import SessionMemory
from .slots import Channel, Slot
from .timing import Deadline, Timeouts, in_seconds
from .transport import Connection, Endpoint, HttpConnection
from .wire import HttpRequests

T = TypeVar("T")

# A connection found dead, or a registration found gone, is made anew and the request
# sent again. Neither happens twice in a row unless the server is in trouble, so that
# each further try waits longer.
_TRIES = 5
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.25


def run(talk: control.Talk[T], channel: Channel, deadline: Deadline) -> T:
    """The outcome of a talk over `channel`; raises what the talk and `call` raise."""
    reply = None
    while True:
        try:
            step = talk.send(reply)
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        if isinstance(step, control.Pause):
            reply = None
            time.sleep(step.seconds)
        else:
            reply = channel.call(step, deadline)


class BlockingShell:
    """Carries out what `exchange` and `control` decide, and waits.

    connections, registrations, retries: counters for `SessionStats`. is_closed: set
    when the session closes; nothing new is begun from then on.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: HttpRequests,
        connection: Connection,
        timeouts: Timeouts,
    ) -> None:
        self.connections = 0
        self.registrations = 0
        self.retries = 0
        self.is_closed = False
        self._endpoint = endpoint
        self._requests = requests
        self._connection = connection
        self._timeouts = timeouts

    def start(self, exchange: Exchange, memory: SessionMemory) -> None:
        """The model is known now, and its memory made."""
        self._exchange = exchange
        self._memory = memory

    # --- one inference ----------------------------------------------------------------

    def infer(self, slot: Slot, given: int, limit: float | None) -> Answer:
        """Send and receive; whatever is raised, the slot's holds tell the truth."""
        deadline = Deadline(limit)
        for attempt in range(_TRIES):
            channel = slot.channel
            prepared = slot.prepared
            wait = limit
            if (
                prepared is None
                or prepared.given != given
                or channel is None
                or not channel.is_quiet
            ):
                channel = self.make_ready(slot, given, deadline)
                wait = deadline.remaining
            outcome = self._round_trip(slot, channel, wait, deadline)
            if isinstance(outcome, Answer):
                return outcome
            self._prepare_retry(slot, outcome, attempt)
        raise ServerUnreachable(
            f"gave up after {_TRIES} tries: the connection was dead each time, or the"
            " server did not know the memory just registered.",
            hint="Is the server restarting, or does another client unregister"
            " everybody's shared memory?",
        )

    def _round_trip(
        self, slot: Slot, channel: Channel, wait: float | None, deadline: Deadline
    ) -> Answer | Verdict:
        exchange = self._exchange
        try:
            if not channel.send(exchange.begin(slot)):
                exchange.withdraw(slot)
                return Verdict.SEND_AGAIN
            data = channel.receive(wait)
            answer = exchange.matches(slot, data)
            if answer is not None:
                return answer
            return exchange.accept(slot, channel.finish(data, deadline), data)
        except InferTimeout:
            # The reply may still come, and then frees the slot.
            raise
        except RequestLost:
            channel.close()
            if self._connection.replay and self._is_drained(slot, deadline):
                return Verdict.REPLAY
            raise
        except BaseException:
            # An error, which may come twice and names no id; a reply that cannot be
            # trusted; or Ctrl-C, after which nobody knows whether a reply was read.
            channel.close()
            raise

    def _prepare_retry(self, slot: Slot, verdict: Verdict, attempt: int) -> None:
        self.retries += 1
        if verdict is Verdict.REGISTER_AGAIN:
            slot.renew_registrations()
            if slot.channel is not None:
                # As after any error: it may come twice.
                slot.channel.close()
        if attempt:
            time.sleep(_FIRST_PAUSE * 2**attempt)

    def _is_drained(self, slot: Slot, deadline: Deadline) -> bool:
        """Wait until the server has let go of a lost slot; False if it cannot be told.

        A server that is away meanwhile is asked again until the deadline.
        """
        pause = _FIRST_PAUSE
        while not deadline.has_passed:
            with contextlib.suppress(ServerUnreachable):
                return self._drain(slot, deadline)
            # A server that is ending, or a proxy without one, takes connections only
            # to close them at once.
            time.sleep(deadline.within(pause).remaining or 0)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    def _drain(self, slot: Slot, deadline: Deadline) -> bool:
        channel = self.connect(deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            outcome = run(control.drain(self._requests, slot), channel, deadline)
            if outcome is control.Drained.GIVE_UP:
                return False
            if outcome is control.Drained.MOVE:
                self._memory.move_outputs(slot)
            # Only now: until then the slot must be seen to be lost.
            self._exchange.withdraw(slot)
            slot.channel = channel
            undo.pop_all()
        return True

    def make_ready(self, slot: Slot, given: int, deadline: Deadline) -> Channel:
        """Connect, grow, register and prepare what the slot lacks.

        Raises `InferTimeout` if no time is left, and `PoolClosed` if the session closed
        meanwhile; nothing was sent then.
        """
        if self.is_closed:
            raise PoolClosed("the session was closed meanwhile; nothing was sent.")
        if deadline.has_passed:
            raise InferTimeout(
                f"no time was left of {in_seconds(deadline.limit)}; nothing was sent.",
                timeout=deadline.limit,
            )
        channel = slot.channel
        if channel is None or not channel.is_quiet:
            if channel is not None:
                channel.close()
            channel = slot.channel = self.connect(deadline)
        for tensor, nbytes in self._exchange.outgrown(slot, given):
            self._memory.grow(slot, tensor, nbytes)
        if slot.obsolete or any(slot.unregistered()):
            channel = self._register_again(slot, channel, deadline)
        if slot.prepared is None or slot.prepared.given != given:
            self._exchange.prepare(slot, given)
        return channel

    def _register_again(
        self, slot: Slot, channel: Channel, deadline: Deadline
    ) -> Channel:
        """Register over `channel`, or over another if that breaks meanwhile."""
        for attempt in range(1, _TRIES):
            try:
                self.register(slot, channel, deadline)
                return channel
            except ServerUnreachable:
                if deadline.has_passed:
                    raise
            time.sleep(_FIRST_PAUSE * 2**attempt)
            channel = slot.channel = self.connect(deadline)
        self.register(slot, channel, deadline)
        return channel

    # --- talks ------------------------------------------------------------------------

    def connect(self, deadline: Deadline) -> HttpConnection:
        limit = deadline.within(self._timeouts.connect)
        connection = HttpConnection.open(self._endpoint, limit)
        self.connections += 1
        return connection

    def register(self, slot: Slot, channel: Channel, deadline: Deadline) -> None:
        self.registrations += sum(1 for _ in slot.unregistered())
        run(control.register(self._requests, slot), channel, deadline)

    def unregister(
        self, slots: Collection[Slot], channel: Channel | None = None
    ) -> bool:
        """Take back what no request is on; True when the server knows nothing more.

        It still may where it does not answer in time, or works on a request.
        """
        if not slots:
            return True
        deadline = Deadline(self._timeouts.connect)
        with contextlib.suppress(ShmlaneError):
            if channel is None or not channel.is_open:
                channel = self.connect(deadline)
            for slot in slots:
                if not slot.server_hold:
                    run(control.unregister(self._requests, slot), channel, deadline)
        if channel is not None:
            channel.close()
        if all(slot.is_forgotten for slot in slots):
            return True
        return self._endpoint.is_deserted(self._timeouts.connect)

    def unregister_doubtful(self, slots: Iterable[Slot]) -> None:
        """Once the files are gone: take back what was registered late."""
        doubtful = [slot for slot in slots if slot.doubtful]
        if not doubtful:
            return
        deadline = Deadline(self._timeouts.connect)
        with (
            contextlib.suppress(ShmlaneError),
            contextlib.closing(self.connect(deadline)) as channel,
        ):
            for slot in doubtful:
                talk = control.unregister_doubtful(self._requests, slot)
                run(talk, channel, deadline)

    def __repr__(self) -> str:
        return f"<BlockingShell at {self._endpoint.url}>"
