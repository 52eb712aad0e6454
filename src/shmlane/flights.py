"""Requests in flight that no thread waits for: their sending, and what has come.

Owns one request from the moment that it may be sent until its reply is judged, without
ever waiting for it. Refuses to know who waits and how (`receiver`, `streams`,
`asynchronous`), and what a reply means (`exchange`). A flight belongs to one thread at
a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TypeVar

from .errors import InferTimeout, PoolClosed
from .exchange import Answer, Exchange, Verdict, closed_meanwhile
from .options import RequestOptions
from .slots import Slot
from .timing import Deadline

# What parameters add to a request has no limit; buffers of Unix sockets have 200 KiB.
SMALL_BYTES = 64 << 10


class Flight:
    """One request on a slot, and until when its reply is waited for.

    given: bits of the inputs that are sent. limit: seconds for all of it, since begun.
    attempt: how often it had to be made ready again. replayed: whether it was sent
    again although it may have run. is_over: nothing is sent any more, here or again.
    is_left_to_others: who sends it does not see to it that its reply is read.
    """

    is_left_to_others = False

    __slots__ = (
        "__weakref__",
        "attempt",
        "begun",
        "given",
        "is_new",
        "is_over",
        "limit",
        "options",
        "replayed",
        "slot",
        "when",
    )

    def __init__(
        self,
        slot: Slot,
        given: int,
        limit: float | None,
        options: RequestOptions | None = None,
    ) -> None:
        self.slot = slot
        self.limit = limit
        self.options = options
        self.is_over = False
        # Nothing of the reply has come yet.
        self.is_new = True
        self.given = given
        self.begun = begun = time.monotonic()
        self.when = math.inf if limit is None else begun + limit
        self.attempt = 0
        self.replayed = False

    @property
    def deadline(self) -> Deadline:
        return Deadline(self.limit, self.begun)

    def is_ready(self, *, is_quiet: bool = False) -> bool:
        """Whether it can be sent as it is: connected, registered and built.

        is_quiet: whether the connection has just been looked at, so that it need not be
        now.
        """
        prepared, channel = self.slot.prepared, self.slot.channel
        return (
            prepared is not None
            and prepared.given == self.given
            and prepared.options is self.options
            and channel is not None
            and (is_quiet or channel.is_quiet)
        )

    @property
    def is_small(self) -> bool:
        """Whether sending it never waits: all of it fits an empty buffer."""
        prepared = self.slot.prepared
        return prepared is None or not (
            prepared.wire_inputs or len(prepared.request) > SMALL_BYTES
        )

    def send(self, exchange: Exchange) -> bool:
        """Send it; False if the connection was dead, so that the server has nothing.

        Waits only where it is not small. Raises `InferTimeout` then, and `PoolClosed`;
        nothing is in flight in these cases.
        """
        slot = self.slot
        channel, prepared = slot.channel, slot.prepared
        assert channel is not None
        assert prepared is not None
        self.is_new = True
        try:
            request = exchange.begin(slot)
            # Not before: whoever closes waits for what is held by then, and then ends
            # the thread that would read the reply.
            if self.is_left_to_others and exchange.is_closed:
                raise closed_meanwhile()
            # As `is_small`, without a call.
            if prepared.wire_inputs or len(request) > SMALL_BYTES:
                # No name for the parts: an error would hold what they lie in.
                is_sent = channel.send_parts(prepared.parts(request), self.deadline)
            else:
                is_sent = channel.send(request)
        except (InferTimeout, PoolClosed):
            exchange.withdraw(slot)
            raise
        except BaseException:
            channel.close()
            raise
        if not is_sent:
            exchange.withdraw(slot)
        return is_sent

    def receive(self, exchange: Exchange) -> Answer | Verdict | None:
        """Judge what has come on the connection; None if more is to come. Never waits.

        Raises what `exchange.accept` raises and `RequestLost`. Whatever is raised, the
        connection is closed: an error may come twice and names no id, and after
        anything else nobody knows whether a reply was read.
        """
        slot = self.slot
        channel = slot.channel
        assert channel is not None
        try:
            data = b""
            if self.is_new:
                first = channel.receive_now()
                if first is None:
                    return None
                answer = exchange.matches(slot, first)
                if answer is not None:
                    return answer
                self.is_new = False
                data = first
                reply = channel.feed(first)
            else:
                reply = channel.advance()
            outcome = None if reply is None else exchange.accept(slot, reply, data)
        except BaseException:
            channel.close()
            raise
        if isinstance(outcome, Verdict):
            # That was an error, too, and whoever was to send again may be gone.
            channel.close()
        return outcome

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.slot!r}>"


F = TypeVar("F", bound=Flight)


class Timetable:
    """When to look for flights whose time is up: seldom, for most end before that.

    next: by `time.monotonic`; infinite while there is no limit to keep.
    """

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = math.inf

    @property
    def remaining(self) -> float | None:
        """Seconds until the next look, None if there is none."""
        if self.next == math.inf:
            return None
        return max(0.0, self.next - time.monotonic())

    def note(self, flight: Flight) -> None:
        self.next = min(self.next, flight.when)

    def overdue(self, flights: Iterable[F]) -> list[F]:
        """Those whose time is up, once the time to look has come."""
        now = time.monotonic()
        if now < self.next:
            return []
        flying = list(flights)
        later = (each.when for each in flying if each.when > now)
        self.next = min(later, default=math.inf)
        return [each for each in flying if each.when <= now]

    def __repr__(self) -> str:
        return f"<Timetable: next look in {self.remaining} s>"
