"""Which slot goes to whom: free slots, pinned slots, and a fair queue of waiters.

Owns handing slots out and taking them back, each in a bounded number of steps however
many slots there are. Refuses to do I/O; the only wait is that of a blocked caller on
its own gate, and nobody waits while holding the lock.

Any thread may call anything here. Some entry points are also called from finalisers and
weak reference callbacks, which may run inside any other call of the same thread:
`release`, `close` and `_note_death`. They append to a deque and then serve waiters only
if the lock is free; whoever holds the lock looks again after letting go of it.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from .errors import LeaseTimeout, PoolClosed, RegionError
from .slots import COUNTS_ARE_EXACT, Label, RootWatch, Slot
from .timing import Deadline, in_seconds

Spare = Callable[[], Sequence[Slot]]


class Waiter:
    """One caller that waits for a slot, in turn.

    It is served once `slot` is set under the pool's lock, or the errand to make the
    spare slots; a waiter that gives up learns under the same lock whether it came too
    late to do so.
    """

    __slots__ = ("_gate", "slot", "spare")

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.spare: Spare | None = None
        # A bare lock: opening it is one C call that a finaliser cannot interrupt.
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    @property
    def is_served(self) -> bool:
        return self.slot is not None or self.spare is not None

    def open_gate(self) -> None:
        """End the wait. Under the pool's lock; doing so again does nothing."""
        if self._gate.locked():
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
        if slot is None:
            return self._wait_in_turn(timeout)
        if self._closed:
            self.release(slot)
            self._check_open()
        return slot

    def release(self, slot: Slot) -> None:
        """Take a slot back that neither a lease nor the server holds.

        With live views it is pinned until they die. Called from finalisers too.
        """
        if slot.is_at_rest or self._closed:
            self._free.append(slot)
        else:
            self._pinned.append(slot)
        if self._has_work():
            self._settle()

    def replace(self, slot: Slot, new: Slot) -> None:
        """Have `new` in the place of a slot that is never to be handed out again."""
        with self._lock:
            self.slots[self.slots.index(slot)] = new
        self.release(new)

    def close(self) -> None:
        """Hand out nothing more; whoever waits gets `PoolClosed`.

        Called from finalisers too, so that it does not ask for the lock.
        """
        self._closed = True
        self._settle()

    def take_all(self) -> list[Slot]:
        """After `close`: every slot that neither a lease nor the server holds.

        Each is returned once; what comes back later, by a later call.
        """
        slots = [slot for slot in self.slots if slot.live_roots]
        for slot in slots:
            slot.live_roots = 0
        for queue in (self._free, self._pinned):
            with contextlib.suppress(IndexError):
                while True:
                    slots.append(queue.popleft())
        return slots

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
        # Whoever began to wait during the look has not seen this slot.
        if self._has_work():
            self._settle()
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

    def _wait_in_turn(self, timeout: float | None) -> Slot:
        deadline = Deadline(timeout)
        try:
            slot = self._wait(Waiter(), timeout)
        except RegionError as error:
            # No room for spare slots: then one of those that there are.
            slot = self._wait_without_spare(deadline)
            if slot is None:
                raise self._timed_out(timeout) from error
        if slot is None:
            raise self._timed_out(timeout)
        return slot

    def _wait_without_spare(self, deadline: Deadline) -> Slot | None:
        spare, self._spare = self._spare, None
        try:
            return self._wait(Waiter(), deadline.remaining)
        finally:
            # No room now is no reason not to ask again.
            self._spare = spare or self._spare

    def _wait(self, waiter: Waiter, timeout: float | None) -> Slot | None:
        """The slot that this waiter is given, None if its time is over."""
        try:
            self._join_queue(waiter)
            waiter.wait(timeout)
            self._leave_queue(waiter)
        except BaseException:
            self._leave_queue(waiter)
            self._pass_on(waiter)
            raise
        if waiter.spare is not None:
            return self._make_spare(waiter.spare)
        if waiter.slot is None:
            self._check_open()
        return waiter.slot

    def _join_queue(self, waiter: Waiter) -> None:
        with self._lock:
            self._check_open()
            self._waiters.append(waiter)
            # It may be served at once, by what came back before it could be seen.
            self._look_round()
            self.waits += not waiter.is_served
        self._settle()

    def _leave_queue(self, waiter: Waiter) -> None:
        """End the wait: from here on nothing is given that was not given before."""
        with self._lock:
            if not waiter.is_served:
                # Closing empties the queue.
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        self._settle()

    def _pass_on(self, waiter: Waiter) -> None:
        """Let others have what was given to a waiter that was interrupted."""
        if waiter.slot is not None:
            self.release(waiter.slot)
        if waiter.spare is not None:
            self._spare = waiter.spare
            self._settle()

    def _make_spare(self, spare: Spare) -> Slot:
        """Add the spare slots, and take the first of them."""
        try:
            slots = spare()
            with self._lock:
                self.spare_slots = len(slots)
                self.slots += slots
                self._free.extend(reversed(slots[1:]))
        except BaseException:
            self._spare = spare
            raise
        self._settle()
        return slots[0]

    def _settle(self) -> None:
        """Serve waiters with what is there, unless the holder of the lock will.

        Whoever lets go of the lock calls this, so that nothing released meanwhile is
        overlooked.
        """
        while self._has_work() and not self._lock.locked():
            # Not a lock tried and then released at the end: Ctrl-C between the two
            # would leave it locked for ever.
            with self._lock:
                self._look_round()

    def _has_work(self) -> bool:
        if self._closed:
            return bool(self._waiters)
        if self._deaths:
            return True
        if self._waiters:
            return bool(self._free or self._pinned or self._wants_spare)
        return not COUNTS_ARE_EXACT and bool(self._pinned)

    def _look_round(self) -> None:
        """Find what has come back and give it to who waits. Under the lock."""
        while self._closed and self._waiters:
            self._waiters[0].open_gate()
            self._waiters.popleft()
        if self._closed:
            return
        self._watch_pinned()
        self._count_deaths()
        # Each step may be done twice: Ctrl-C in between neither loses a slot nor leaves
        # a waiter at its gate for ever.
        while self._waiters and self._serve(self._waiters[0]):
            self._waiters[0].open_gate()
            self._waiters.popleft()

    def _serve(self, waiter: Waiter) -> bool:
        """Give what there is to give, a slot or an errand; False if that is nothing."""
        if waiter.is_served:
            return True
        try:
            # A look before would be in vain: `take` does not ask for the lock.
            waiter.slot = self._free.pop()
        except IndexError:
            if self._wants_spare:
                waiter.spare, self._spare = self._spare, None
        return waiter.is_served

    @property
    def _wants_spare(self) -> bool:
        """Whether nothing but views stands in the way, and spare slots can be made."""
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
        return LeaseTimeout(
            f"no slot became free within {in_seconds(timeout)}; slots: {state}.",
            hint=_advice(counts),
            slots=len(self.slots),
            counts={label.value: n for label, n in counts.items()},
        )

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{n} {label.value}" for label, n in self.counts().items() if n
        )
        return f"<SlotPool {len(self.slots)} slots: {counts}>"


def _advice(counts: Mapping[Label, int]) -> str:
    """What stands in the way most stubbornly, and who can do something about it."""
    if Label.LOST in counts:
        return (
            "Connections broke with requests in flight; these slots come back when the"
            " server answers again. Is it running?"
        )
    if Label.LATE in counts:
        return (
            "Late slots wait for replies whose callers have timed out: the server is"
            " slower than the timeout of infer."
        )
    if Label.PINNED in counts:
        return "Copy results that outlive their lease (.copy()), or raise slots=."
    return "Release leases sooner, raise slots= or the timeout."
