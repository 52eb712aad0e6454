"""Many requests from one thread: a stream of items, each on a slot of its own.

Owns when an item is begun, and what is done with its reply. Refuses to wait for replies
(`fleet`), to decide in which order results leave (`outcomes`) and what replies mean
(`exchange`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Container, Generator, Iterable
from typing import Generic, Protocol, TypeVar

from .blocking import BlockingShell
from .board import Board
from .errors import PoolClosed, RequestLost, ShmlaneError
from .exchange import Answer, Exchange, Verdict
from .fairness import Fairness
from .fleet import Fleet
from .leases import BaseLease, Result
from .passages import Passage
from .slots import Slot
from .stream_plan import StreamPlan
from .trouble import timed_out
from .upcoming import Upcoming
from .workshop import Workshop

L = TypeVar("L", bound=BaseLease)
I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")

# Between two results that are asked for, replies are looked for after so long.
_AGAIN = 1e-4
# To look at all connections spares a look at each, for so long: items may be slow to
# come and to write, and a connection may end meanwhile.
_FRESH = 2e-4


class StreamHost(Protocol[L]):
    """What a stream asks of its session."""

    def _take_lease(self, *, wait: bool) -> L | None: ...
    def _next_lease(self, lease: L, fetch: Callable[[], bool]) -> L | None: ...
    def _unusable(self) -> ShmlaneError: ...


class Course(Generic[L, I, R]):
    """One run of a stream, in the thread that asks for its results."""

    def __init__(
        self,
        plan: StreamPlan[L, I, R],
        items: Iterable[I],
        host: StreamHost[L],
        shell: BlockingShell,
        exchange: Exchange,
        fairness: Fairness,
        *,
        limit: float | None,
    ) -> None:
        """limit: seconds for each inference."""
        self._plan = plan
        self._limit = limit
        self._outcomes = plan.outcomes
        self._host = host
        self._exchange = exchange
        self._fairness = fairness
        # Whether it found no slot for an item.
        self._lacks = False
        self._upcoming = Upcoming(items, plan.outcomes)
        self._is_disowned = False
        self._thread = 0
        self._fleet: Fleet[L] = Fleet(shell, exchange, plan.in_flight)
        self._flying = self._fleet.flying
        # Those whose slots are for the next items.
        self._landed: list[Passage[L]] = []
        # Until when a look at all connections tells of each.
        self._fresh_until = 0.0
        self._workshop: Workshop | None = None
        # Last: other threads ask it at once how much is on its way.
        fairness.join(self)

    def run(self) -> Generator[R | Exception, None, None]:
        """Begins nothing, and needs no descriptor, before the first is asked for."""
        fleet = self._fleet
        fleet.looked = time.monotonic()
        outcomes, ready = self._outcomes, self._outcomes.ready
        flying, in_flight = self._flying, self._plan.in_flight
        with contextlib.closing(Board[Passage[L]].open()) as fleet.board:
            try:
                if (threads := self._plan.threads()) is not None:
                    self._workshop = Workshop(threads, fleet.board)
                was_away = False
                while ready or self._goes_on:
                    self._thread = threading.get_ident()
                    if self._is_disowned:
                        raise self._host._unusable()
                    if was_away and ready and time.monotonic() - fleet.looked > _AGAIN:
                        # While results are asked for slowly, replies make room.
                        self._look_if_busy()
                    if len(flying) < in_flight:
                        self._begin_what_fits()
                    if ready:
                        was_away = True
                        yield outcomes.take()
                    elif self.busy:
                        was_away = False
                        self._look(fleet.timetable.remaining)
            finally:
                self._abandon()
        outcomes.raise_failure()

    @property
    def _goes_on(self) -> bool:
        """Whether there may be results yet."""
        return bool(self._upcoming.may_come or self.busy)

    @property
    def busy(self) -> int:
        """How many items are on their way."""
        working = 0 if self._workshop is None else self._workshop.busy
        return len(self._flying) + working

    @property
    def held_by_this_thread(self) -> int:
        """Slots in flight whose replies this thread alone could read, but does not."""
        return len(self._flying) if self._thread == threading.get_ident() else 0

    # --- beginning --------------------------------------------------------------------

    def _begin_what_fits(self) -> None:
        outcomes, upcoming, fairness = self._outcomes, self._upcoming, self._fairness
        self._lacks = False
        room = min(self._plan.in_flight - self.busy, outcomes.room)
        try:
            for _ in range(room):
                if upcoming.is_slow and self._has_news():
                    break
                if fairness.lacking and self.busy >= fairness.part:
                    break
                if not upcoming.fetch():
                    break
                lease = self._host._take_lease(wait=False)
                if lease is None and not (self.busy or outcomes.ready):
                    # Others have the slots, and this waits in turn; but not with
                    # anything on its way, or in hand.
                    lease = self._host._take_lease(wait=True)
                if lease is None:
                    self._lacks = True
                    break
                try:
                    item = upcoming.take()
                except IndexError:
                    # The session was closed in between: see `leave`.
                    lease.release()
                    break
                self._begin(lease, item)
        except Exception as error:
            upcoming.end(error)
        if fairness.lacking:
            fairness.wake()

    def _has_news(self) -> bool:
        """Whether a result should be handed out before the next item is waited for."""
        if time.monotonic() - self._fleet.looked > _AGAIN:
            self._look_if_busy()
        return bool(self._outcomes.ready)

    def _begin(self, lease: L, item: I) -> None:
        passage = Passage(
            lease,
            self._limit,
            self._plan.options,
            number=self._outcomes.begin(),
            item=item,
        )
        if self._workshop is not None:
            write = functools.partial(self._plan.write, lease, item)
            then = functools.partial(self._written_in_thread, passage)
            self._workshop.do(write, then, lease)
            return
        # First: whatever ends the stream meanwhile, its slot is given back.
        self._flying[passage] = passage
        self._write(passage)

    def _go_on(self, passage: Passage[L], stirred: Container[int]) -> bool:
        """Whether the next item is on its way in the place of the last.

        Not while the results that are there would wait for a slow source.
        stirred: connections, by descriptor, on which something has come since.
        """
        outcomes, upcoming = self._outcomes, self._upcoming
        if upcoming.is_slow or outcomes.room <= 0:
            return False
        try:
            lease = self._host._next_lease(passage.lease, upcoming.fetch)
        except Exception as error:
            upcoming.end(error)
            return False
        if lease is None:
            return False
        slot: Slot = lease._hold[1]
        channel = slot.channel
        is_quiet = (
            slot is passage.slot
            and channel is not None
            and channel.fileno() not in stirred
        )
        passage.lease = lease
        passage.slot = slot
        try:
            passage.item = upcoming.take()
        except IndexError:
            # The session was closed in between: see `leave`.
            return False
        passage.number = outcomes.begin()
        self._flying.move_to_end(passage)
        self._write(passage, is_quiet=is_quiet)
        return True

    def _write(self, passage: Passage[L], *, is_quiet: bool = False) -> None:
        """is_quiet: whether nothing had come on its connection after its last reply."""
        try:
            self._plan.write(passage.lease, passage.item)
            # Neither by who had the slot in between, nor by `write`.
            is_unused = passage.slot.epoch == passage.epoch + 1
            passage.depart()
            is_quiet &= is_unused and passage.begun < self._fresh_until
            self._fleet.launch(passage, is_quiet=is_quiet)
        except Exception as error:
            self._fail(passage, error)

    def _written_in_thread(self, passage: Passage[L], error: Exception | None) -> None:
        """The slot was filled, or could not be."""
        self._flying[passage] = passage
        if error is not None:
            # Not raised here: it would hold this frame, and the lease with it.
            self._fail(passage, error)
            return
        try:
            passage.depart()
            self._fleet.launch(passage)
        except Exception as failure:
            self._fail(passage, failure)

    # --- ending -----------------------------------------------------------------------

    def _look_if_busy(self) -> None:
        if self.busy:
            self._look(0)

    def _look(self, timeout: float | None) -> None:
        fleet = self._fleet
        came = self._wait_for_more(timeout) if self._lacks else fleet.wait(timeout)
        for passage in came:
            self._land(passage)
        if self._workshop is not None:
            self._workshop.finish()
        if fleet.looked >= fleet.timetable.next:
            self._end_overdue()
        if self._landed:
            self._go_on_with_all()

    def _wait_for_more(self, timeout: float | None) -> list[Passage[L]]:
        """Wait for replies, or until another stream lets go of a slot."""
        try:
            self._fairness.ask(self)
            return self._fleet.wait(timeout)
        finally:
            self._fairness.ask_no_more(self)

    def wake(self) -> None:
        """There are slots now. Called by other streams, in their threads."""
        self._fleet.board.ring()

    def _go_on_with_all(self) -> None:
        """One after the other: a server busy with the first finds the others there."""
        fairness, busy = self._fairness, self.busy
        # So many slots are for streams that lack them; never the only one.
        over = busy - fairness.part if busy > 1 and fairness.lacking else 0
        # One look at all connections costs little more than one at a single one.
        self._fresh_until = time.monotonic() + _FRESH
        stirred = self._fleet.board.stirred()
        for count, passage in enumerate(self._landed):
            if count < over or not self._go_on(passage, stirred):
                self._flying.pop(passage, None)
                passage.lease.release()
        self._landed.clear()

    def _end_overdue(self) -> None:
        fleet = self._fleet
        for passage in fleet.timetable.overdue(self._flying):
            if passage in self._landed:
                # Its reply has just been read: what is behind that is not its own.
                continue
            # What has come in time is in time, whatever kept this thread from it.
            self._land(passage)
            if passage in self._flying and passage not in self._landed:
                fleet.board.forget(passage)
                self._fail(passage, timed_out(passage.limit))

    def _land(self, passage: Passage[L]) -> None:
        fleet = self._fleet
        fleet.at_hand = passage
        # Left to others meanwhile: see `leave`.
        if passage not in self._flying:
            fleet.at_hand = None
            return
        outcome: Answer | Verdict | RequestLost | None
        try:
            outcome = passage.receive(self._exchange)
        except RequestLost as error:
            outcome = error
        except Exception as error:
            fleet.at_hand = None
            self._fail(passage, error)
            return
        fleet.at_hand = None
        if isinstance(outcome, Answer):
            self._read(passage, Result(passage.slot, passage.epoch, outcome))
        elif outcome is None:
            fleet.expect(passage)
        else:
            self._send_again(passage, outcome)

    def _send_again(self, passage: Passage[L], problem: Verdict | RequestLost) -> None:
        try:
            self._fleet.launch(passage, problem)
        except Exception as error:
            self._fail(passage, error)

    def _fail(self, passage: Passage[L], error: Exception) -> None:
        # What was left to others in between has lost its connection: see `leave`.
        if self._fleet.let_go(passage):
            self._outcomes.fail(passage.number, error)

    def _read(self, passage: Passage[L], result: Result) -> None:
        if self._workshop is not None:
            self._read_in_thread(self._workshop, passage, result)
            return
        try:
            value = self._plan.read(passage.item, result)
        except Exception as error:
            self._fail(passage, error)
            return
        self._outcomes.finish(passage.number, value)
        self._landed.append(passage)

    def _read_in_thread(
        self, workshop: Workshop, passage: Passage[L], result: Result
    ) -> None:
        values: list[R] = []
        read, item = self._plan.read, passage.item

        def ended(error: Exception | None) -> None:
            passage.lease.release()
            if error is None:
                self._outcomes.finish(passage.number, values[0])
            else:
                self._outcomes.fail(passage.number, error)

        workshop.do(lambda: values.append(read(item, result)), ended, passage.lease)
        self._flying.pop(passage, None)

    def leave(self, kept: Collection[Slot]) -> list[Slot]:
        """The session closes: leave to others what only this thread could wait for.

        What is in flight is late from now on, and the stream ends with `PoolClosed`. In
        another thread than that of the stream this does nothing: the stream reads on.
        Returns the slots that it was just busy with, where this is a signal handler: to
        wait for those would be in vain, for the stream goes on with them afterwards.
        kept: slots that this thread is waiting for further up: they are not left.
        """
        if self._thread != threading.get_ident():
            return []
        if self._fleet.leave(kept):
            self._upcoming.end(
                PoolClosed("the session was closed before the reply came.")
            )
        return self._fleet.in_hand

    def disown(self) -> None:
        """In a forked child: what is in flight is the parent's, and this ends."""
        self._is_disowned = True

    def _abandon(self) -> None:
        """Leave: what is in flight is late from now on."""
        self._fairness.ask_no_more(self)
        self._fleet.abandon()
        if self._workshop is not None:
            self._workshop.close()
        self._fairness.wake()
