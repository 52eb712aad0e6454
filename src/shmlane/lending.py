"""Slots of this session that other processes have, and how they come back.

Owns handing them over, noticing that they were returned, taking back what nobody
adopted in time, and what becomes of a slot whose borrower died. Refuses to know what a
borrower does with them (`borrowing`).

Nothing tells that a slot was returned but its record and its lock. They are looked at
when a caller waits for a slot, and by a thread that is there while slots are out: often
while somebody waits, else when the time of one is up.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import time
from collections.abc import Callable

from .background import Background
from .claims import Hold, SlotLocks
from .errors import HandoffExpired, PoolClosed, ShmlaneError
from .handoff import SlotRef
from .ledger import Ledger, Open
from .opened import OpenedRegion
from .pool import SlotPool
from .records import State
from .regions import could_not
from .slots import Holder, Slot

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.005
# The thread ends so long after the last slot came back, at the latest.
_IDLE_PAUSE = 1.0


class _Loan(Holder):
    """A slot that is out, and until when it waits to be adopted."""

    __slots__ = ("deadline", "generation", "ledger", "limit", "locks", "slot")

    def __init__(
        self, slot: Slot, ledger: Ledger, locks: SlotLocks, limit: float | None
    ) -> None:
        self._hold = [None]
        self.slot = slot
        self.ledger = ledger
        self.locks = locks
        self.limit = limit
        self.deadline = math.inf
        self.generation = slot.notes.handoff

    def hand_over(self, generation: int) -> None:
        """From now on it waits for whoever has the reference of this generation."""
        self.generation = generation
        if self.limit is not None:
            self.deadline = time.monotonic() + self.limit

    @property
    def seems_back(self) -> bool:
        """Whether a closer look is worth while: it needs the borrower's lock."""
        notes = self.slot.notes
        state = notes.state
        if state == State.HANDED:
            if notes.handoff != self.generation:
                # Whoever had adopted it handed it on.
                self.hand_over(notes.handoff)
            return time.monotonic() >= self.deadline
        # Not its time any more, but that of whoever it is handed on to.
        self.deadline = math.inf
        is_returned = state != State.ADOPTED
        return is_returned or not self.locks.is_taken(self.slot.index, Hold.BORROWER)


class Lender(Background):
    """Lends the slots of one session. Its lock is that for handing slots over.

    limit: seconds for which a slot waits to be adopted, None for ever. lose: takes a
    slot whose borrower died with a request in flight. open_region: opens what a
    borrower moved a tensor to.
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        session: Callable[[], object],
        lose: Callable[[Holder], None],
        open_region: Open,
        limit: float | None,
    ) -> None:
        super().__init__(session)
        self._pool = pool
        self._lose = lose
        self._open_region = open_region
        self._limit = limit
        self._out: dict[tuple[str, int], _Loan] = {}
        self._ledgers: dict[Slot, Ledger] = {}
        self._locks: dict[str, SlotLocks] = {}
        # Closed but for a moment in which the thread is to look again.
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    # --- handing over -----------------------------------------------------------------

    def lend(self, lease: Holder, slot: Slot, given: int) -> SlotRef:
        """Hand over the slot of `lease`, which has none from then on.

        given: bits of the inputs that were filled. Raises `PoolClosed`, `RegionError`.
        """
        region = slot.registrations[0].region.name
        with self._handing:
            if self._stopping:
                raise PoolClosed("the session is closed.")
            ledger = self._ledger_of(slot)
            loan = _Loan(slot, ledger, self._locks_of(slot), self._limit)
            ledger.write(given)
            notes = slot.notes
            notes.handoff = generation = notes.handoff + 1
            loan.hand_over(generation)
            self._out[region, slot.index] = loan
            slot.epoch += 1
            slot.is_lent = True
            notes.state = State.HANDED
            # Interrupted before this, the lease still has it, and no reference is out.
            loan.take_over(lease)
        self._pool.on_wait = self.look
        self.nudge()
        return SlotRef(region, slot.index, generation)

    def _ledger_of(self, slot: Slot) -> Ledger:
        if slot not in self._ledgers:
            # Slots that were given up meanwhile are kept by nobody but this.
            for other in self._ledgers.keys() - self._pool.slots:
                del self._ledgers[other]
                self._locks.pop(other.registrations[0].region.name, None)
            self._ledgers[slot] = Ledger(slot, self._open_region)
        return self._ledgers[slot]

    def _locks_of(self, slot: Slot) -> SlotLocks:
        region = slot.registrations[0].region
        if isinstance(region, OpenedRegion):
            return region.locks
        if region.name not in self._locks:
            try:
                self._locks[region.name] = SlotLocks.of(region.path)
            except OSError as error:
                raise could_not(f"open {region.name}", error) from error
        return self._locks[region.name]

    # --- coming back ------------------------------------------------------------------

    @property
    def has_stopped(self) -> bool:
        """Whether what is out now is not expected back any more."""
        return self._stopping

    def has_out(self, ref: SlotRef) -> bool:
        """Whether the slot is one of this session's, and out."""
        return (ref.region, ref.slot) in self._out

    def take_back(self, ref: SlotRef, lease: Holder) -> int:
        """Give `lease` a slot that was handed over, as another process left it.

        Returns the bits of the inputs that are given. Raises `HandoffExpired` if
        somebody adopted it, or it was not handed over by this reference.
        """
        with self._handing:
            if self._stopping:
                raise PoolClosed("the session is closed.")
            loan = self._out.get((ref.region, ref.slot))
            if loan is None:
                raise expired(ref, "it has come back")
            try:
                if not loan.locks.take(ref.slot, Hold.BORROWER):
                    raise expired(ref, "another process has adopted it")
                check_handed(loan.slot, ref)
                given = loan.ledger.take_back()
                loan.slot.notes.state = State.HOME
            finally:
                loan.locks.give_back(ref.slot, Hold.BORROWER)
            loan.slot.is_lent = False
            lease._hold[1:] = iter(loan._hold.pop, None)
            self._forget(loan)
        return given

    def look(self) -> bool:
        """Take back what was returned, or not adopted in time; True if anything was."""
        count = len(self._out)
        with self._handing:
            if not self._stopping:
                for loan in list(self._out.values()):
                    self._look_at(loan)
        if self._pool.has_waiters:
            self._wake_up()
            self.nudge()
        return len(self._out) < count

    def _look_at(self, loan: _Loan) -> None:
        slot = loan.slot
        if loan.held is not None:
            if not loan.seems_back:
                return
            try:
                is_ours = loan.locks.take(slot.index, Hold.BORROWER)
                if not is_ours or not self._take_home(loan):
                    return
            finally:
                loan.locks.give_back(slot.index, Hold.BORROWER)
            self._hand_back(loan)
        self._forget(loan)

    def _take_home(self, loan: _Loan) -> bool:
        """With the borrower's lock: make the slot ours, if nobody is to have it."""
        notes = loan.slot.notes
        # Adopted and handed on, or returned, since it was looked at without the lock.
        if notes.state == State.HANDED and not loan.seems_back:
            return False
        if notes.state == State.ADOPTED:
            loan.ledger.reclaim()
        elif notes.state != State.HOME:
            try:
                loan.ledger.take_back()
            except (ShmlaneError, OSError):
                # What it moved to is gone, or it says what cannot be.
                loan.ledger.reclaim()
        notes.state = State.HOME
        return True

    def _hand_back(self, loan: _Loan) -> None:
        slot = loan.slot
        slot.is_lent = slot.leased = False
        if not slot.notes.is_in_flight:
            self._pool.release(loan)
            return
        if slot.channel is not None:
            slot.channel.close()
        slot.server_hold = True
        self._lose(loan)

    def _forget(self, loan: _Loan) -> None:
        slot = loan.slot
        key = (slot.registrations[0].region.name, slot.index)
        if self._out.get(key) is loan:
            slot.is_lent = False
            del self._out[key]

    def stop(self) -> None:
        super().stop()
        # Those of slots that are still out stay with their loans.
        self._locks.clear()

    # --- in the thread ----------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._out)

    def _wake_up(self) -> None:
        # Open already: the thread has yet to look.
        with contextlib.suppress(RuntimeError):
            self._gate.release()

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping and self._out:
            with self._handing_over() as allowed:
                count = len(self._out)
                for loan in list(self._out.values()) if allowed else ():
                    self._look_at(loan)
                is_back = len(self._out) < count
            pause = _FIRST_PAUSE if is_back else min(2 * pause, _LONGEST_PAUSE)
            self._gate.acquire(timeout=self._until_next(pause))

    def _until_next(self, pause: float) -> float:
        if self._pool.has_waiters:
            return pause
        deadlines = (loan.deadline for loan in list(self._out.values()))
        left = min(deadlines, default=math.inf) - time.monotonic()
        return max(_FIRST_PAUSE, min(left, _IDLE_PAUSE))

    def __repr__(self) -> str:
        return f"<Lender of {len(self._out)} slots>"


def check_handed(slot: Slot, ref: SlotRef) -> None:
    """With the borrower's lock: `HandoffExpired` unless it waits to be adopted."""
    notes = slot.notes
    if notes.handoff != ref.generation:
        raise expired(ref, "it was handed over again since, by another reference")
    if notes.state == State.HOME:
        raise expired(ref, "it was taken back, because nobody adopted it in time")
    if notes.state != State.HANDED:
        raise expired(ref, "it was adopted before")


def expired(ref: SlotRef, why: str) -> HandoffExpired:
    return HandoffExpired(
        f"slot {ref.slot} of {ref.region} cannot be adopted by {ref}: {why}.",
        hint="A reference is good for one adopt, within Timeouts(handoff=) seconds and"
        " while its home lives. Have the slot filled and detached again.",
        region=ref.region,
        slot=ref.slot,
        generation=ref.generation,
    )
