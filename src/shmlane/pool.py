"""Which slot goes to whom: free slots, pinned slots, and a fair queue of waiters.

Owns handing slots out and taking them back, each in a bounded number of steps however
many slots there are. Refuses to do I/O; the only wait is that of a blocked caller on
its own gate, and nobody waits while holding the lock.

Any thread may call anything here. Two entry points are also called from finalisers and
weak reference callbacks, which may run inside any other call of the same thread:
`release` and `_note_death`. They append to a deque and then serve waiters only if the
lock is free; whoever holds the lock looks again after letting go of it.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Sequence

from .errors import LeaseTimeout, PoolClosed
from .slots import COUNTS_ARE_EXACT, Label, RootWatch, Slot

Spare = Callable[[], Sequence[Slot]]


class Waiter:
    """One caller that waits for a slot, in turn.

    A slot counts as given once `slot` is set under the pool's lock, and so does the
    errand to make spare slots; a waiter that gives up learns under the same lock
    whether it came too late to do so.
    """

    __slots__ = ("_gate", "gave_up", "slot", "spare")

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.spare: Spare | None = None
        self.gave_up = False
        # A bare lock: opening it is one C call that a finaliser cannot interrupt.
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    def open_gate(self) -> None:
        self._gate.release()

    def wait(self, timeout: float | None) -> None:
        self._gate.acquire(timeout=-1 if timeout is None else timeout)


class SlotPool:
    """The slots of one session.

    spare: makes as many slots again, called once, when every slot is out and at least
        one of them is kept only by views of its last lease.
    """

    def __init__(self, slots: Sequence[Slot], *, spare: Spare) -> None:
        self.slots = list(slots)
        self.waits = 0
        self.spare_slots = 0
        self._spare: Spare | None = spare
        # The last slot released is the first handed out: its memory is in the cache.
        self._free = deque(reversed(self.slots))
        self._pinned: deque[Slot] = deque()
        self._watched = 0
        self._deaths: deque[RootWatch] = deque()
        self._waiters: deque[Waiter] = deque()
        self._lock = threading.Lock()
        self._closed = False

    # --- taking and giving back -------------------------------------------------------

    def take(self) -> Slot | None:
        """A slot if one can be had at once, else None. Never waits."""
        # Callers that came before go first.
        if self._waiters:
            return None
        if self._pinned and (slot := self._take_unpinned()) is not None:
            return slot
        try:
            return self._free.pop()
        except IndexError:
            return None

    def acquire(self, timeout: float | None) -> Slot:
        """A slot, waiting in turn for at most `timeout` seconds (None: for ever).

        Raises `LeaseTimeout`, or `PoolClosed` when the session closes meanwhile.
        """
        slot = self.take()
        if slot is not None and not self._closed:
            return slot
        return self._take_spare() or self._wait_in_turn(timeout)

    def release(self, slot: Slot) -> None:
        """Take a slot back that neither a lease nor the server holds.

        With live views it is pinned until they die. Called from finalisers too.
        """
        if self._closed:
            slot.close()
        elif slot.is_at_rest:
            self._free.append(slot)
        else:
            self._pinned.append(slot)
        if self._has_work():
            self._settle()

    def close(self) -> None:
        """Hand out nothing more; whoever waits gets `PoolClosed`."""
        with self._lock:
            self._closed = True
            waiters = tuple(self._waiters)
            self._waiters.clear()
        for waiter in waiters:
            waiter.open_gate()

    # --- pinned slots -----------------------------------------------------------------

    def _take_unpinned(self) -> Slot | None:
        """The longest pinned slot if its views have died by now.

        One look per call, in rotation: the usual loop, whose names still refer to the
        last result while the next lease begins, needs no weak reference and no wait.
        """
        try:
            slot = self._pinned.popleft()
        except IndexError:
            return None
        if slot.is_at_rest:
            return slot
        self._pinned.append(slot)
        return None

    def _watch_pinned(self) -> None:
        """Have pinned slots come back by themselves. Under the lock.

        Each slot is watched at most once per time it is pinned.
        """
        while self._pinned:
            slot = self._pinned.popleft()
            if slot.watch(self._note_death):
                self._watched += 1
            else:
                self._free.append(slot)

    def _note_death(self, watch: RootWatch) -> None:
        self._deaths.append(watch)
        self._settle()

    def _count_deaths(self) -> None:
        """Free the slots whose last view died. Under the lock."""
        while self._deaths:
            slot = self._deaths.popleft().slot
            if slot.root_died():
                self._watched -= 1
                self._free.append(slot)

    # --- waiting ----------------------------------------------------------------------

    def _take_spare(self) -> Slot | None:
        """A slot whose views just died, else the first of the spare slots, else None.

        Spare slots are added only if nothing but views stands in the way.
        """
        spare = None
        with self._lock:
            self._check_open()
            self._watch_pinned()
            self._count_deaths()
            if self._free and not self._waiters:
                return self._free.pop()
            if self._wants_spare:
                spare, self._spare = self._spare, None
        if spare is not None:
            return self._make_spare(spare)
        self._settle()
        return None

    def _make_spare(self, spare: Spare) -> Slot:
        """Add the spare slots, and take the first of them."""
        try:
            slots = spare()
            with self._lock:
                self.spare_slots = len(slots)
                self.slots += slots
                self._free.extend(reversed(slots[1:]))
        except BaseException:
            # No room now is no reason not to ask again.
            self._spare = spare
            raise
        finally:
            self._settle()
        return slots[0]

    def _wait_in_turn(self, timeout: float | None) -> Slot:
        waiter = Waiter()
        try:
            with self._lock:
                self._check_open()
                self._waiters.append(waiter)
                self.waits += 1
            # Serves at once a slot that came back before the queue could be seen.
            self._settle()
            waiter.wait(timeout)
        except BaseException:
            if (slot := self._withdraw(waiter)) is not None:
                self.release(slot)
            self._spare = waiter.spare or self._spare
            raise
        if (slot := self._withdraw(waiter)) is not None:
            return slot
        if waiter.spare is not None:
            return self._make_spare(waiter.spare)
        self._check_open()
        raise self._timed_out(timeout)

    def _withdraw(self, waiter: Waiter) -> Slot | None:
        """End the wait. The slot if it was given, and from here on none will be."""
        with self._lock:
            waiter.gave_up = True
        self._settle()
        return waiter.slot

    def _settle(self) -> None:
        """Serve waiters with what is free, unless the holder of the lock will.

        Whoever lets go of the lock calls this, so that nothing released meanwhile is
        overlooked.
        """
        while self._has_work() and self._lock.acquire(blocking=False):
            try:
                self._watch_pinned()
                self._count_deaths()
                self._serve()
            finally:
                self._lock.release()

    def _has_work(self) -> bool:
        if self._closed:
            return False
        if self._deaths:
            return True
        if self._waiters:
            return bool(self._free or self._pinned)
        return not COUNTS_ARE_EXACT and bool(self._pinned)

    def _serve(self) -> None:
        while self._waiters and (self._free or self._wants_spare):
            waiter = self._waiters.popleft()
            if waiter.gave_up:
                continue
            if self._free:
                waiter.slot = self._free.pop()
            else:
                waiter.spare, self._spare = self._spare, None
            waiter.open_gate()

    @property
    def _wants_spare(self) -> bool:
        """Whether nothing but views stands in the way. Under the lock."""
        return bool(self._watched and not self._free and self._spare)

    # --- telling ----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed(
                "the session is closed.", hint="Open a new one, or close it later."
            )

    def counts(self) -> dict[Label, int]:
        """How many slots have each label now; exact only when nothing is going on."""
        counts = dict.fromkeys(Label, 0)
        for slot in tuple(self.slots):
            counts[slot.label] += 1
        return counts

    def _timed_out(self, timeout: float | None) -> LeaseTimeout:
        counts = {label: n for label, n in self.counts().items() if n}
        state = ", ".join(f"{n} {label.value}" for label, n in counts.items())
        hint = "Release leases sooner, raise slots= or the timeout."
        if Label.PINNED in counts:
            hint = "Copy results that outlive their lease (.copy()), or raise slots=."
        return LeaseTimeout(
            f"no slot became free within {timeout} s; the {len(self.slots)} slots are:"
            f" {state}.",
            hint=hint,
            slots=len(self.slots),
            counts={label.value: n for label, n in counts.items()},
        )

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{n} {label.value}" for label, n in self.counts().items() if n
        )
        return f"<SlotPool {len(self.slots)} slots: {counts}>"
