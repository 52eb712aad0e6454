"""What an opened session consists of, and how all of it ends.

Owns the order of opening and of closing: memory, slots, registrations, the pool and the
thread that brings slots back. Refuses to know who may use it when (`session`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence

from .blocking import BlockingShell
from .borrowing import Borrower
from .calls import ServerCalls
from .draining import Drainer
from .errors import (
    AccessRestricted,
    RegionError,
    SharedMemoryDisabled,
    UnsupportedPlatform,
    WireFallback,
)
from .exchange import Exchange
from .fairness import Fairness
from .frames import callers_level
from .handoff import SessionHandle
from .inventory import clean_up
from .layout import SlotLayout
from .lending import Lender
from .memory import SessionMemory
from .metadata import ModelMetadata
from .passing import Passing
from .pool import SlotPool
from .receiver import Receiver
from .settings import Settings
from .sharing import Claims
from .slots import Channel, Label, Slot
from .stats import SessionStats
from .timing import Deadline

_CLOSE_PAUSE = 0.002
_CLEAN_LIMIT = 0.5

# Why shared memory cannot be used with this server, or on this machine.
_NOT_SHARED = (
    RegionError,
    SharedMemoryDisabled,
    AccessRestricted,
    UnsupportedPlatform,
)


class Engine:
    """One opened session. Thread-safe.

    session: the session, or None once it is gone. Nothing here refers to it otherwise,
        so that dropping it ends it at once.
    """

    def __init__(
        self,
        settings: Settings,
        calls: ServerCalls,
        metadata: ModelMetadata,
        memory: SessionMemory,
        slots: Sequence[Slot],
        *,
        session: Callable[[], object],
        claims: Claims | None = None,
    ) -> None:
        exchange = Exchange(settings.requests, metadata, rerun=settings.rerun)
        self.exchange = exchange
        self.metadata = metadata
        self.memory = memory
        self.shell = BlockingShell(
            calls, exchange, memory, replay=settings.connection.replay
        )
        spare = functools.partial(memory.make_slots, settings.slots)
        self.pool = SlotPool(slots, spare=spare)
        self.borrower = Borrower(
            server=settings.url, model=settings.model, metadata=metadata
        )
        self.fairness = Fairness(self.pool)
        give_back = functools.partial(
            _give_back, self.pool, self.borrower, self.fairness
        )
        drainer = Drainer(
            exchange,
            settings.endpoint,
            session=session,
            give_back=give_back,
            move_outputs=memory.move_outputs,
            retire=functools.partial(_replace, self.pool, self.borrower, memory),
        )
        self.receiver = Receiver(
            exchange,
            self.shell,
            drainer,
            session=session,
            give_back=give_back,
        )
        self.lender = Lender(
            self.pool,
            session=session,
            lose=self.receiver.take_over,
            open_region=memory.open_extension,
            limit=settings.timeouts.handoff,
        )
        self.passing = Passing(
            settings, metadata, calls, memory, self.lender, self.borrower
        )
        self._claims = claims
        self._calls = calls
        self._settings = settings
        self._timeouts = settings.timeouts
        self._ending = threading.Lock()
        self._remains = set(slots)
        self._is_known = False
        self._is_lent = False
        self._last_stats = SessionStats()

    # --- opening ----------------------------------------------------------------------

    @classmethod
    def open(cls, settings: Settings, *, session: Callable[[], object]) -> Engine:
        """Ask for the model, make the memory, register it; on error nothing stays."""
        if settings.handle is not None:
            return cls._attach(settings, settings.handle, session)
        if settings.memory != "auto":
            return cls._open(settings, session, is_shared=settings.memory == "system")
        try:
            return cls._open(settings, session, is_shared=True)
        except _NOT_SHARED as error:
            engine = cls._open(settings, session, is_shared=False)
            with contextlib.ExitStack() as undo:
                # Where warnings are errors, nothing stays of it.
                undo.callback(engine._end, engine.pool.slots)
                warnings.warn(
                    f"session for {settings.model!r}: tensors go over the wire, because"
                    f" {error}",
                    WireFallback,
                    stacklevel=callers_level(),
                )
                undo.pop_all()
            return engine

    @classmethod
    def _open(
        cls, settings: Settings, session: Callable[[], object], *, is_shared: bool
    ) -> Engine:
        if is_shared:
            headers = {settings.url: settings.connection.headers}
            clean_up(limit=_CLEAN_LIMIT, headers=headers, only=settings.url)
        calls = ServerCalls(settings)
        deadline = Deadline(settings.timeouts.infer)
        with contextlib.ExitStack() as undo:
            channel = calls.connect(deadline)
            undo.callback(channel.close)
            metadata = calls.discover(channel, deadline)
            layout = SlotLayout.plan(
                metadata, shapes=settings.shapes, outputs=settings.outputs
            )
            memory = SessionMemory(
                layout,
                options=settings.region,
                server=settings.url,
                model=settings.model,
                is_shared=is_shared,
            )
            undo.callback(memory.close)
            slots = memory.make_slots(settings.slots)
            engine = cls(settings, calls, metadata, memory, slots, session=session)
            undo.callback(engine._end, slots, channel)
            for slot in slots:
                calls.register(slot, channel, deadline)
            # The slot that is handed out first inherits the connection.
            slots[0].channel = channel
            undo.pop_all()
        return engine

    @classmethod
    def _attach(
        cls, settings: Settings, handle: SessionHandle, session: Callable[[], object]
    ) -> Engine:
        """Claim slots that another session shares; no server is asked."""
        with contextlib.ExitStack() as undo:
            claims = Claims(handle)
            undo.callback(claims.abandon)
            memory = SessionMemory(
                claims.layout,
                options=settings.region,
                server=settings.url,
                model=settings.model,
            )
            slots = claims.take(settings.slots)
            calls, metadata = ServerCalls(settings), claims.metadata
            engine = cls(
                settings, calls, metadata, memory, slots, session=session, claims=claims
            )
            for slot in slots:
                if slot.server_hold:
                    engine.receiver.watch(slot)
            undo.pop_all()
        return engine

    # --- use --------------------------------------------------------------------------

    def give_up(self, slot: Slot) -> None:
        """End a request over the wire: what the server still does harms nobody.

        Only the reply to a step of a sequence is waited for, if it can still come: the
        next step must not overtake this one.
        """
        channel = slot.channel
        if slot.is_step and channel is not None and channel.is_open:
            return
        if channel is not None:
            channel.close()
        self.exchange.withdraw(slot)

    # --- telling ----------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True when nothing remains to be taken back."""
        has_slots = self._remains or not self.memory.is_closed
        return not has_slots and self.borrower.has_ended

    def stats(self) -> SessionStats:
        """The counters now; once all has ended, as they were then."""
        if self.has_ended:
            return self._last_stats
        self.lender.look()
        self.borrower.settle()
        return self._collect_stats()

    def _collect_stats(self) -> SessionStats:
        return SessionStats.collect(
            self.pool,
            self.memory,
            self.receiver,
            connections=self._calls.connections,
            registrations=self._calls.registrations,
            retries=self.shell.retries,
            reruns=self.shell.reruns,
            adopted=len(self.borrower.slots),
        )

    # --- closing ----------------------------------------------------------------------

    def begin_to_close(self) -> None:
        """Begin nothing new; whoever waits for a slot gets `PoolClosed`."""
        if not self.exchange.is_closed:
            self._remains = set(self.pool.slots)
        self.exchange.is_closed = True
        self.pool.close()

    def close(self, *, wait: bool, kept: Collection[Slot] = ()) -> None:
        """After `begin_to_close`: wait for replies if asked to; end what is idle.

        kept: slots whose replies are not waited for: their reader waits for this.
        """
        # The thread that reads replies would wait for itself, in a future's callback.
        wait = wait and not self.receiver.is_this_thread
        try:
            if wait and not self.has_ended:
                unread = {Label.IN_FLIGHT, Label.LATE}
                self._wait_for(unread, self._timeouts.infer, kept=kept)
                # Lost requests are only waited for to leave no registration behind.
                self._wait_for({Label.LOST}, self._timeouts.connect, kept=kept)
        finally:
            # A slot whose reply it has just seen is given back before this returns.
            self.receiver.stop()
            self.lender.look()
            self.lender.stop()
            self.take_back()

    def _wait_for(
        self, labels: set[Label], limit: float | None, *, kept: Collection[Slot]
    ) -> None:
        """Wait until no slot has one of these labels, of those that are not kept."""
        deadline = Deadline(limit)
        while not deadline.has_passed:
            slots = (*self.pool.slots, *self.borrower.slots)
            if not any(slot.label in labels and slot not in kept for slot in slots):
                return
            time.sleep(_CLOSE_PAUSE)

    def take_back(self, *, at_exit: bool = False) -> None:
        """Unregister and remove what nobody uses any more.

        Slots that a lease still holds are left to whoever gives them back. When the
        interpreter ends, nobody does where a thread waits for a reply, or the slot is
        another process's. Called from finalisers too, which may run in the middle of
        another such call of the same thread: that one looks again when it is done.
        """
        if self.lender.has_stopped:
            # With each that comes back: nobody reads late replies any more.
            self.borrower.end() if at_exit else self.borrower.close()
        while not self._ending.locked():
            slots, unused = self._idle(at_exit=at_exit), self.borrower.take_unused()
            if not slots and not unused and (self._remains or self.memory.is_closed):
                return
            with self._ending:
                # Another thread may have ended them meanwhile.
                unused += self._end(self._remains.intersection(slots))
                self._clean_up(unused)

    def _idle(self, *, at_exit: bool) -> set[Slot]:
        """What remains of the session and is held by no lease."""
        idle = self._remains.intersection(self.pool.take_all())
        # Until then, what others and the server have may still come back.
        if self.lender.has_stopped:
            for slot in tuple(self._remains):
                if slot.is_lent or (slot.server_hold and (at_exit or not slot.leased)):
                    idle.add(slot)
        return idle

    def _end(
        self, slots: Collection[Slot], channel: Channel | None = None
    ) -> list[str]:
        """Unregister these slots and remove their memory.

        A server that may still know of a region keeps it, and nobody could tell any
        more whose it was: then the files stay as if this process had died, for the next
        session or `clean` to end both. So they do while other processes have slots of
        ours. Returns the regions of which only the last user knows when they end.
        """
        self._last_stats = self._collect_stats()
        mine = [slot for slot in slots if not slot.is_lent]
        claims = self._claims
        if claims is not None:
            for slot in slots:
                claims.let_go(slot)
        is_forgotten = self._calls.unregister(mine, channel)
        # Borrowers may have ended before, and have found all of it in use here.
        self._is_lent = self._is_lent or len(mine) < len(slots)
        self._is_known = self._is_known or self._is_lent or not is_forgotten
        unused: list[str] = []
        for slot in slots:
            slot.leased = slot.leased and not slot.is_lent
            unused += slot.regions if self._is_lent else slot.left_to_others
            slot.close(leave=self._is_known)
        self._remains.difference_update(slots)
        if not self._remains:
            self.pool.on_wait = None
            unused += self.memory.region_names if self._is_lent else []
            unused += self.memory.close(leave=self._is_known)
            unused += [] if claims is None else [claims.close()]
        if not self._is_known:
            self._calls.unregister_doubtful(slots)
        return unused

    def _clean_up(self, regions: Collection[str]) -> None:
        """Remove regions that several processes used, if none does any more."""
        if regions:
            settings = self._settings
            with contextlib.suppress(RegionError):
                clean_up(
                    limit=_CLEAN_LIMIT,
                    headers={settings.url: settings.connection.headers},
                    only=settings.url,
                    regions=regions,
                )

    def disown(self) -> None:
        """Refuse every use in a forked child; shared memory is not touched."""
        self.exchange.is_closed = True
        # Another thread of the parent may have held it; it does not exist here.
        self._ending = threading.Lock()
        self.receiver.disown()
        self.borrower.disown()
        for slot in (*self.pool.slots, *self.borrower.slots):
            slot.server_hold = True
            slot.epoch += 1
            # A copy of a descriptor would keep the connection up when the parent
            # closes it.
            if slot.channel is not None:
                slot.channel.close()

    def __repr__(self) -> str:
        return f"<Engine {self.pool!r} {self.memory!r}>"


def _give_back(
    pool: SlotPool, borrower: Borrower, fairness: Fairness, slot: Slot
) -> None:
    """Give a slot that no holder has to whoever it belongs to."""
    borrower.put_back(slot) if slot.is_borrowed else pool.put_back(slot)
    fairness.wake()


def _replace(
    pool: SlotPool, borrower: Borrower, memory: SessionMemory, slot: Slot
) -> None:
    """Put new memory in the place of a slot that must never be used again."""
    if slot.is_borrowed:
        # Its home has to.
        borrower.give_up(slot)
        return
    pool.replace(slot, memory.make_slots(1)[0])
    # Nobody waits any more for a step of a sequence that was sent from there.
    slot.epoch += 2
