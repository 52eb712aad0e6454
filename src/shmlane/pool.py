"""Which slot goes to whom: free slots, pinned slots, and a fair queue of waiters.

Owns handing slots out and taking them back, each in a bounded number of steps however
many slots there are. Refuses to do I/O; the only wait is that of a blocked caller on
its own gate, and nobody waits while holding the lock.

Any thread may call anything here. Some entry points are also called from finalisers and
weak reference callbacks, which may run inside any other call of the same thread:
`release`, `close` and `_note_death`. They append to a deque and then serve waiters only
if the lock is free; whoever holds the lock looks again after letting go of it.

Ctrl-C may come anywhere. A slot is at any time in one queue here or in one holder, and
goes from one to the other in a step that a signal cannot divide: `move`, or what the
hot path does in its place. Every other step can be done twice.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from .errors import LeaseTimeout, PoolClosed, RegionError, UsageError
from .slots import Holder, Label, RootWatch, Slot, move
from .tensors import COUNTS_ARE_EXACT
from .timing import Deadline, in_seconds
from .waiters import Waiter

Spare = Callable[[], Sequence[Slot]]


class SlotPool:
    """The slots of one session.

    spare: makes as many slots again, called once, when every slot is out and at least
        one of them is kept only by views of its last lease.
    """

    def __init__(self, slots: Sequence[Slot], *, spare: Spare) -> None:
        self.slots = list(slots)
        self.waits = 0
        self.spare_slots = 0
        # Called when somebody has begun to wait: it may know of slots to be fetched.
        self.on_wait: Callable[[], object] | None = None
        self._spare: Spare | None = spare
        self._errand: Waiter | None = None
        # The last slot released is the first handed out: its memory is in the cache.
        self._free = deque(each for each in reversed(slots) if not each.server_hold)
        self._pinned: deque[Slot] = deque()
        # Each step pops one slot; IndexError where there is none, now.
        self._free_slots: Iterator[Slot] = iter(self._free.pop, None)
        self._pinned_slots: Iterator[Slot] = iter(self._pinned.popleft, None)
        # On their way from `_pinned` to `_watched`.
        self._looked_at: deque[Slot] = deque()
        self._watched: dict[Slot, Slot] = {}
        self._deaths: deque[RootWatch] = deque()
        self._waiters: deque[Waiter] = deque()
        self._ended: list[Slot] = []
        self._lock = threading.Lock()
        self._closed = False

    # --- taking and giving back -------------------------------------------------------

    def take(self, holder: Holder) -> bool:
        """Give `holder` a slot if one can be had at once; raises `PoolClosed`."""
        # Callers that came before go first.
        if self._waiters:
            return False
        if not (self._pinned and self._take_unpinned(holder)):
            # As `_take_next`, without its call.
            try:
                for holder._hold[1] in self._free_slots:
                    break
            except IndexError:
                return False
        if self._closed:
            self.release(holder)
            self._check_open()
        return True

    def acquire(self, holder: Holder, timeout: float | None) -> None:
        """Give `holder` a slot, waiting in turn for at most `timeout` seconds.

        None waits for ever. Raises `LeaseTimeout`, or `PoolClosed` when the session
        closes meanwhile; then the holder has none.
        """
        if not self.take(holder):
            self._wait_in_turn(holder, timeout)

    def release(self, holder: Holder) -> None:
        """Take back the slot of `holder`, which neither a lease nor the server holds.

        With live views it is pinned until they die. Called from finalisers too.
        """
        slot: Slot = holder._hold[1]
        queue = self._free if slot.is_at_rest or self._closed else self._pinned
        # As `move`, for less: ends at the None in the first place.
        queue.extend(iter(holder._hold.pop, None))
        # As `_has_work`, for less: mostly nobody waits, and nothing is looked for.
        if self._waiters or self._deaths or self._looked_at or not COUNTS_ARE_EXACT:
            self._settle()

    def replace(self, slot: Slot, new: Slot) -> None:
        """Have `new` in the place of a slot that is never to be handed out again."""
        new.renewals += slot.renewals
        with self._lock:
            self.slots[self.slots.index(slot)] = new
        self.put_back(new)

    def put_back(self, slot: Slot) -> None:
        """Take back a slot that no holder has."""
        self.release(Holder(slot))

    def close(self) -> None:
        """Hand out nothing more; whoever waits gets `PoolClosed`.

        Called from finalisers too, so that it does not ask for the lock.
        """
        self._closed = True
        self._settle()

    def take_all(self) -> Sequence[Slot]:
        """After `close`: every slot that nobody and no server holds by now."""
        for queue in (self._free, self._pinned, self._looked_at):
            with contextlib.suppress(IndexError):
                while True:
                    move(queue.popleft, self._ended.append)
        for slot in tuple(self._watched):
            with contextlib.suppress(KeyError):
                move(functools.partial(self._watched.pop, slot), self._ended.append)
        return tuple(self._ended)

    # --- pinned slots -----------------------------------------------------------------

    def _take_unpinned(self, holder: Holder) -> bool:
        """Give `holder` the longest pinned slot if its views have died by now.

        One look per call, in rotation: the usual loop, whose names still refer to the
        last result while the next lease begins, needs no weak reference and no wait.
        """
        if not _take_next(self._pinned_slots, holder):
            return False
        slot: Slot = holder._hold[1]
        if slot.is_at_rest:
            return True
        self._pinned.extend(iter(holder._hold.pop, None))
        holder._hold += (None, None)
        # Whoever began to wait during the look has not seen this slot.
        if self._has_work():
            self._settle()
        return False

    def _watch_pinned(self) -> None:
        """Have pinned slots come back by themselves. Under the lock.

        Each slot is watched at most once per time it is pinned.
        """
        while self._looked_at or self._pinned:
            if not self._looked_at:
                with contextlib.suppress(IndexError):
                    move(self._pinned.popleft, self._looked_at.append)
                continue
            slot = self._looked_at[0]
            if slot.watch(self._note_death):
                self._watched[slot] = slot
                self._looked_at.popleft()
            else:
                move(self._looked_at.popleft, self._free.append)

    def _note_death(self, watch: RootWatch) -> None:
        self._deaths.append(watch)
        self._settle()

    def _count_deaths(self) -> None:
        """Free the slots whose last view died. Under the lock."""
        while self._deaths:
            slot = self._deaths[0].slot
            # One root may be told of twice, and its slot be gone with the first.
            if slot in self._watched and slot.revive():
                move(functools.partial(self._watched.pop, slot), self._free.append)
            self._deaths.popleft()

    # --- waiting ----------------------------------------------------------------------

    def _wait_in_turn(self, holder: Holder, timeout: float | None) -> None:
        if self.on_wait is not None and not self._waiters:
            # Before anybody waits: what was lent may be back by now.
            self.on_wait()
            if self.take(holder):
                return
        deadline = Deadline(timeout)
        waiter = Waiter(holder)
        try:
            self.join_queue(waiter)
            waiter.wait(timeout)
            if self.is_sent(waiter):
                self.run_errand(waiter)
                # The gate may have been opened once for both.
                if not waiter.is_served:
                    waiter.wait(deadline.remaining)
        finally:
            self.leave_queue(waiter)
        self.check_served(waiter, timeout)

    def join_queue(self, waiter: Waiter) -> None:
        """Begin to wait; whoever does so leaves the queue in the end."""
        with self._lock:
            self._check_open()
            self._waiters.append(waiter)
            # It may be served at once, by what came back before it could be seen.
            self._look_round()
            self.waits += not (waiter.is_served or self._errand is waiter)
        self._settle()
        if self.on_wait is not None and not waiter.is_served:
            self.on_wait()

    def is_sent(self, waiter: Waiter) -> bool:
        """Whether the gate was opened for an errand: to make the spare slots."""
        return self._errand is waiter

    def leave_queue(self, waiter: Waiter) -> None:
        """End the wait: from here on nothing is given that was not given before."""
        with self._lock:
            # Whoever gave a slot back may have been interrupted before telling.
            self._look_round()
            if self._errand is waiter:
                self._errand = None
            # Whoever was served has left, and closing empties the queue.
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        self._settle()

    def check_served(self, waiter: Waiter, timeout: float | None) -> None:
        """After the wait: raises `PoolClosed` or `LeaseTimeout` if it was in vain."""
        if not waiter.is_served:
            self._check_open()
            raise self._timed_out(timeout) from waiter.failure

    def run_errand(self, waiter: Waiter) -> None:
        """Add the spare slots. The waiter that does so keeps its place in the queue."""
        assert self._spare is not None
        try:
            slots = self._spare()
        except RegionError as error:
            # No room: then one of those that there are. Whoever is first in the queue
            # after this one asks again.
            waiter.failure = error
        else:
            count, added = len(slots), deque(reversed(slots))
            with self._lock:
                # Nothing is called in between: Ctrl-C finds all of this done, or none.
                self._spare = None
                self.spare_slots = count
                self.slots += slots
                self._free += added
        self._errand = None
        self._settle()

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
        if self._deaths or self._looked_at:
            return True
        if self._waiters:
            return bool(self._free or self._pinned or self._wants_spare)
        return not COUNTS_ARE_EXACT and bool(self._pinned)

    def _look_round(self) -> None:
        """Find what has come back and give it to who waits. Under the lock."""
        if not self._closed:
            self._watch_pinned()
            self._count_deaths()
        while self._waiters and (self._closed or self._serve(self._waiters[0])):
            self._waiters[0].open_gate()
            self._waiters.popleft()
        if self._wants_spare:
            self._errand = self._waiters[0]
            self._errand.open_gate()

    def _serve(self, waiter: Waiter) -> bool:
        """Give the waiter a slot if one is free."""
        if waiter.is_served:
            return True
        # A look before would be in vain: `take` does not ask for the lock.
        return _take_next(self._free_slots, waiter.holder)

    @property
    def _wants_spare(self) -> bool:
        """Whether nothing but views stands in the way, and spare slots can be made."""
        return bool(
            self._spare
            and self._waiters
            and self._watched
            and not self._free
            and self._errand is None
            and self._waiters[0].failure is None
        )

    # --- telling ----------------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many slots can be had at once, more or less."""
        return len(self._free)

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def _check_open(self) -> None:
        if not self.slots:
            raise UsageError(
                "this session has claimed no slots: it can only adopt those of others.",
                hint="Claim some: Session.attach(handle, slots=1).",
            )
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


def _take_next(slots: Iterator[Slot], holder: Holder) -> bool:
    """Give `holder` the next of the slots that come out of a queue."""
    try:
        # As `move`, for less: no call comes between the step and the assignment.
        for holder._hold[1] in slots:
            break
    except IndexError:
        return False
    return True


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
    if Label.LENT in counts:
        return (
            "Lent slots are with other processes: they come back when those release"
            " their leases, or do not adopt them within Timeouts(handoff=) seconds."
        )
    if Label.PINNED in counts:
        return "Copy results that outlive their lease (.copy()), or raise slots=."
    return "Release leases sooner, raise slots= or the timeout."
