"""Waiting in an event loop: for slots, and for replies.

Owns the one descriptor that an event loop watches for all connections of a session, the
futures that its tasks await, and the threads for what cannot be done without waiting.
Refuses to decide what a reply means (`exchange`). Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .blocking import STEP_PAUSE, BlockingShell
from .board import Board
from .errors import RequestLost, UsageError
from .exchange import Answer, Exchange, Verdict, closed_meanwhile
from .flights import Flight, Timetable
from .futures import Kept
from .leases import BaseLease
from .options import RequestOptions
from .pool import SlotPool
from .slots import Holder, Slot
from .timing import Deadline, no_time_left
from .trouble import timed_out, unread
from .waiters import Waiter
from .work import Work

T = TypeVar("T")

# Connecting, registering and growing are rare, and hardly keep a processor busy.
_THREADS = 4


class TaskWaiter(Waiter):
    """One caller, in a task, that waits for a slot in turn."""

    __slots__ = ("_event", "_loop", "_thread")

    def __init__(self, holder: Holder, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(holder)
        self._loop = loop
        self._thread = threading.get_ident()
        self._event = asyncio.Event()

    def open_gate(self) -> None:
        if threading.get_ident() == self._thread:
            self._event.set()
            return
        # Of a loop that was closed no task waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def pass_gate(self, timeout: float | None) -> None:
        """Return when the gate has been opened, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()


class Landing(Flight):
    """A request in flight whose outcome a task awaits."""

    __slots__ = ("outcome",)
    outcome: asyncio.Future[Answer | Verdict | RequestLost]


class AsyncShell:
    """Carries out what `exchange` decides, and lets the event loop go on meanwhile."""

    def __init__(
        self,
        shell: BlockingShell,
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.loop = loop
        self._thread = threading.get_ident()
        self._shell = shell
        self._exchange = exchange
        # Tasks that infer, and those requests of theirs that are in flight.
        self._running = 0
        self._flying: set[Landing] = set()
        self._timetable = Timetable()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shmlane")
        self._board: Board[Landing] = Board.open()
        loop.add_reader(self._board.fileno(), self._take_in)

    def check_loop(self) -> None:
        """Raises `UsageError` in every other event loop."""
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError(
                "this session was opened in another event loop, which its connections"
                " belong to.",
                hint="Open a session of its own in each event loop.",
            )

    # --- slots ------------------------------------------------------------------------

    async def acquire(
        self, pool: SlotPool, holder: Holder, timeout: float | None
    ) -> None:
        """As `SlotPool.acquire`, for a task."""
        if pool.take(holder):
            return
        deadline = Deadline(timeout)
        waiter = TaskWaiter(holder, self.loop)
        try:
            pool.join_queue(waiter)
            await waiter.pass_gate(timeout)
            if pool.is_sent(waiter):
                await self._run_errand(pool, waiter)
                if not waiter.is_served:
                    await waiter.pass_gate(deadline.remaining)
        finally:
            pool.leave_queue(waiter)
        pool.check_served(waiter, timeout)

    async def _run_errand(self, pool: SlotPool, waiter: TaskWaiter) -> None:
        """Have a thread make the spare slots.

        Cancelled meanwhile, it waits for that thread: they are made once, and nobody
        else may be sent for them until then.
        """
        errand = self._submit(pool.run_errand, waiter)
        try:
            await asyncio.wrap_future(errand, loop=self.loop)
        except asyncio.CancelledError:
            while not errand.done():
                # However often it is cancelled meanwhile.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({asyncio.wrap_future(errand, loop=self.loop)})
            raise

    # --- one inference ----------------------------------------------------------------

    async def infer(
        self,
        lease: BaseLease,
        slot: Slot,
        given: int,
        limit: float | None,
        options: RequestOptions | None,
    ) -> Answer:
        """Send, await the reply; whatever is raised, the slot's holds tell the truth.

        Cancelled while a thread works on the slot, the lease ends, and its slot comes
        back when that thread is done.
        """
        if limit == 0:
            raise no_time_left(limit)
        flight = Landing(slot, given, limit, options)
        self._running += 1
        try:
            if options is not None and options.has_sequence:
                begin_step = self._shell.begin_step
                while not begin_step(slot, options, flight.deadline, flight):
                    await asyncio.sleep(STEP_PAUSE)
            if not flight.is_ready():
                await self._work_in_time(lease, flight, self._make_ready, flight)
            while True:
                outcome = await self._round_trip(lease, flight)
                if isinstance(outcome, Answer):
                    return outcome
                repair = self._shell.repair
                await self._work_in_time(lease, flight, repair, flight, outcome)
        finally:
            # A thread that goes on with it may send it yet.
            flight.is_over = lease.held is not None
            self._running -= 1
            if self._is_closing:
                self._close_if_idle()

    def _make_ready(self, flight: Flight) -> None:
        slot, deadline = flight.slot, flight.deadline
        self._shell.make_ready(slot, flight.given, deadline, flight.options)

    async def _round_trip(
        self, lease: BaseLease, flight: Landing
    ) -> Answer | Verdict | RequestLost:
        if flight.is_small:
            is_sent = flight.send(self._exchange)
        else:
            send = flight.send
            is_sent = await self._work_in_time(lease, flight, send, self._exchange)
        if not is_sent:
            return Verdict.SEND_AGAIN
        channel = flight.slot.channel
        assert channel is not None
        try:
            self._board.expect(channel, flight)
        except (OSError, ValueError) as error:
            channel.close()
            reason = f"its connection cannot be watched: {error}"
            raise unread(reason) from error
        flight.outcome = self.loop.create_future()
        self._flying.add(flight)
        if flight.when < self._timetable.next:
            self._timetable.note(flight)
            self._set_timer()
        try:
            return await flight.outcome
        except asyncio.CancelledError:
            # Whatever comes now is late, and not for this loop to read.
            self._board.forget(flight)
            raise
        finally:
            self._flying.discard(flight)
            # An error would hold itself, by way of its frames and of this.
            del flight.outcome

    def _take_in(self) -> None:
        """The loop found that something has come."""
        for flight in self._board.wait(0):
            # Cancelled, or its time is up: the task has yet to see it.
            if not flight.outcome.done():
                self._land(flight)

    def _land(self, flight: Landing) -> None:
        try:
            landed = flight.receive(self._exchange)
        except RequestLost as error:
            flight.outcome.set_result(error)
        except Exception as error:
            flight.outcome.set_exception(error)
        else:
            if landed is not None:
                flight.outcome.set_result(landed)
                return
            channel = flight.slot.channel
            assert channel is not None
            self._board.expect(channel, flight)

    # --- time limits ------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if (remaining := self._timetable.remaining) is not None:
            self._timer = self.loop.call_later(remaining, self._end_overdue)

    def _end_overdue(self) -> None:
        for flight in self._timetable.overdue(self._flying):
            self._board.forget(flight)
            if not flight.outcome.done():
                flight.outcome.set_exception(timed_out(flight.limit))
        self._set_timer()

    # --- what may wait ----------------------------------------------------------------

    async def run(self, work: Callable[[], T]) -> T:
        """`work` in a thread; once it runs, nothing ends it early."""
        done = await asyncio.wrap_future(self._submit(work), loop=self.loop)
        return done.take()

    async def run_apart(
        self,
        lease: BaseLease,
        work: Callable[..., T],
        *arguments: Any,
        threads: ThreadPoolExecutor | None = None,
    ) -> T:
        """`work` on the slot of `lease` in a thread, which has it until it is done."""
        future = self._submit(work, *arguments, threads=threads)
        try:
            done = await asyncio.wrap_future(future, loop=self.loop)
        except asyncio.CancelledError:
            if not future.cancelled():
                self._leave_to(future, lease)
            raise
        return done.take()

    async def _work_in_time(
        self, lease: BaseLease, flight: Flight, work: Callable[..., T], *arguments: Any
    ) -> T:
        """As `run_apart`; it ends in time also where no thread is free to begin.

        Once begun, the work keeps the deadline itself.
        """
        future = self._submit(work, *arguments)
        done = asyncio.wrap_future(future, loop=self.loop)
        try:
            await asyncio.wait({done}, timeout=flight.deadline.remaining)
            if future.cancel():
                raise timed_out(flight.limit)
            await done
        except asyncio.CancelledError:
            # Nobody is to be told what the thread raises then.
            done.cancel()
            if not future.cancel():
                self._leave_to(future, lease)
            raise
        return future.result().take()

    def _submit(
        self,
        work: Callable[..., T],
        *arguments: Any,
        threads: ThreadPoolExecutor | None = None,
    ) -> Future[Work[T]]:
        if self._is_closed:
            raise closed_meanwhile()
        return (threads or self._threads).submit(Work(work, arguments).do)

    @staticmethod
    def _leave_to(future: Future[Work[T]], lease: BaseLease) -> None:
        """Have the slot given back by the thread that works on it, once it is done."""
        kept = Kept(lease._host)
        kept.take_over(lease)
        lease._slot = None

        def ended(future: Future[Work[T]]) -> None:
            if not future.cancelled():
                future.result().forget()
            kept.release()

        future.add_done_callback(ended)

    # --- the end ----------------------------------------------------------------------

    def close(self) -> None:
        """Leave the loop once no task infers any more."""
        self._is_closing = True
        self._close_if_idle()

    def close_from_anywhere(self) -> None:
        """As `close`, also from another thread than that of the loop."""
        if threading.get_ident() == self._thread or self.loop.is_closed():
            self.close()
            return
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.close)

    def _close_if_idle(self) -> None:
        if self._running or self._is_closed:
            return
        self._is_closed = True
        self._threads.shutdown(wait=False)
        if self._timer is not None:
            self._timer.cancel()
        # A loop that was closed watches nothing any more.
        with contextlib.suppress(RuntimeError):
            self.loop.remove_reader(self._board.fileno())
        self._board.close()

    def __repr__(self) -> str:
        return f"<AsyncShell with {len(self._flying)} in flight>"
