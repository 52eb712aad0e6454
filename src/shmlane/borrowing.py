"""Slots of other processes that this session has adopted, until it returns them.

Owns opening their regions, taking each slot for one lease, and returning it once no
request and no view is on it. Refuses to know when their homes want them back
(`lending`), and to send anything.

`release` and `put_back` may be called from finalisers and weak reference callbacks.
They append to a deque, and serve it only if the lock is free; whoever holds the lock
looks again after letting go of it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable

from .claims import Hold
from .errors import PoolClosed, UsageError
from .handoff import SlotRef
from .lending import check_handed, expired
from .loans import Loan, Place
from .metadata import ModelMetadata
from .records import State
from .regions import could_not, region_path
from .slots import Channel, Holder, RootWatch, Slot

# Regions in which no slot is in use stay open, to be used again: the last one used, and
# so many others at most, those included that tensors of their slots have moved to.
MOST_IDLE = 32


class Borrower:
    """Adopts slots for one session. Thread-safe.

    server, model: those of the session; slots of others are refused.
    """

    def __init__(self, *, server: str, model: str, metadata: ModelMetadata) -> None:
        self._server = server
        self._model = model
        self._metadata = metadata
        self._lock = threading.Lock()
        # The longest unused first.
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._loans: dict[Slot, Loan] = {}
        self._coming: deque[Slot] = deque()
        self._lines: list[Channel] = []
        self._unused: set[str] = set()
        self._closed = False
        self._is_disowned = False

    @property
    def slots(self) -> Collection[Slot]:
        """Those that are adopted now."""
        return tuple(self._loans)

    @property
    def has_ended(self) -> bool:
        return not self._places

    # --- adopting ---------------------------------------------------------------------

    def adopt(self, ref: SlotRef, lease: Holder) -> int:
        """Give `lease` the slot; the bits of the inputs that are given.

        Raises `HandoffExpired`, `RegionError`, and `UsageError` for another's model.
        """
        self.settle()
        with self._lock:
            if self._closed:
                raise PoolClosed("the session is closed.")
            place = self._place(ref)
            if ref.slot in place.loans:
                raise expired(ref, "it was adopted by this session")
            try:
                if not place.region.locks.take(ref.slot, Hold.BORROWER):
                    raise expired(ref, "another process has adopted it")
                loan = self._begin(place, ref)
                lease._hold[1] = loan.slot
            except BaseException:
                self._undo(place, ref)
                raise
        self.settle()
        return loan.given

    def has_open(self, ref: SlotRef) -> bool:
        return ref.region in self._places

    def open(self, ref: SlotRef) -> None:
        """Open the region of a slot that is to be adopted; raises what `adopt` raises.

        It waits while somebody removes that region, and keeps nobody else waiting.
        """
        place = self._open(ref)
        with self._lock:
            if not self._closed and not self.has_open(ref):
                self._close_idle()
                self._places[ref.region] = place
                return
        place.close()

    def _begin(self, place: Place, ref: SlotRef) -> Loan:
        """With the borrower's lock."""
        assert place.layout is not None
        ledger = place.ledger(ref.slot, place.layout)
        slot = ledger.slot
        check_handed(slot, ref)
        loan = Loan(place, ledger, ref.generation)
        place.loans[ref.slot] = self._loans[slot] = loan
        slot.notes.borrower = os.getpid()
        slot.notes.state = State.ADOPTED
        loan.given = ledger.read()
        place.hold(slot)
        self._connect(slot)
        slot.leased = True
        return loan

    def _undo(self, place: Place, ref: SlotRef) -> None:
        """Have a slot go home as it came: whatever stopped `_begin`, nobody used it."""
        if (loan := place.loans.get(ref.slot)) is not None:
            loan.slot.notes.state = State.RETURNED
            self._forget(loan)
            # It may be half of what was read; the next time it is read anew.
            self._note_unused(loan.slot.regions)
            place.ledgers.pop(ref.slot).slot.close(leave=True)
        place.region.locks.give_back(ref.slot, Hold.BORROWER)

    def _place(self, ref: SlotRef) -> Place:
        place = self._places.get(ref.region)
        if place is None:
            self._close_idle()
            place = self._places[ref.region] = self._open(ref)
        self._places.move_to_end(ref.region)
        if ref.slot >= place.header.slots:
            raise expired(ref, f"the region has {place.header.slots} slots")
        return place

    def _open(self, ref: SlotRef) -> Place:
        try:
            place = Place(ref.region)
        except FileNotFoundError:
            raise expired(ref, "the region is gone, its home has ended") from None
        except OSError as error:
            raise could_not(f"open {ref.region}", error) from error
        told = place.header.description
        ours = (self._server, self._model)
        if (told.get("server"), told.get("model")) != ours:
            raise UsageError(
                f"{ref} is a slot of model {told.get('model')!r} at"
                f" {told.get('server')}, this session is with {self._model!r} at"
                f" {self._server}.",
                hint="Adopt with a session of that model and that very URL.",
            )
        place.layout = place.header.layout(self._metadata)
        return place

    def _connect(self, slot: Slot) -> None:
        """Have one of the connections that no slot needs now."""
        while self._lines and slot.channel is None:
            channel = self._lines.pop()
            if channel.is_open:
                slot.channel = channel

    # --- returning --------------------------------------------------------------------

    def release(self, holder: Holder) -> None:
        """Return the slot of `holder`, which neither a lease nor the server holds.

        With live views it is returned when they have died.
        """
        try:
            self._coming.extend(iter(holder._hold.pop, None))
        finally:
            self.settle()

    def put_back(self, slot: Slot) -> None:
        """Return a slot that no holder has."""
        self.release(Holder(slot))

    def hand_on(self, lease: Holder, slot: Slot, given: int) -> SlotRef:
        """Hand the slot of `lease` over to whoever adopts it next."""
        try:
            with self._lock:
                loan = self._loans[slot]
                loan.ledger.write(given)
                generation = loan.generation + 1
                slot.notes.handoff = generation
                slot.epoch += 1
                slot.leased = False
                slot.notes.state = State.HANDED
                # Interrupted before this, the lease still has it, and nobody has the
                # reference.
                self._coming.extend(iter(lease._hold.pop, None))
                # Before anybody has the reference, its lock must be free.
                self._finish(slot)
        finally:
            self.settle()
        return SlotRef(loan.place.region.name, slot.index, generation)

    def give_up(self, slot: Slot) -> None:
        """Let go of a slot that no lease has; if the server does, its home drains it.

        With live views not before they have died: then it would be used again.
        """
        if (channel := slot.channel) is not None:
            slot.channel = None
            channel.close()
        self.put_back(slot)

    def settle(self) -> None:
        """Return what has come, unless the holder of the lock will.

        Whatever is done here does this too: what Ctrl-C has stopped goes on with that.
        """
        while self._coming and not self._lock.locked():
            with self._lock:
                while self._coming:
                    self._finish(self._coming[0])
                    self._coming.popleft()
                if self._closed:
                    self._close_idle()

    def _finish(self, slot: Slot) -> None:
        """Return a slot if nothing is on it. Done twice, it is done once."""
        loan = self._loans.get(slot)
        if loan is None or slot.leased or self._is_disowned:
            return
        if not self._is_at_rest(slot):
            if self._closed:
                self._leave(loan)
            return
        locks = loan.place.region.locks
        if loan.has_begun and not locks.take(slot.index, Hold.BORROWER):
            self._forget(loan)
            return
        loan.has_begun = True
        loan.give_back()
        self._disconnect(slot)
        self._let_go(loan)

    def _leave(self, loan: Loan) -> None:
        """Return a slot of a closed session to which views, or a lease, still lead.

        Nobody may ever see them die: its lock is theirs, and goes with the last.
        """
        loan.place.hold(loan.slot)
        loan.give_back()
        self._note_unused(loan.slot.regions)
        for region in loan.slot.outgrown:
            region.leave()

    def _is_at_rest(self, slot: Slot) -> bool:
        if slot.watches:
            return slot.revive()
        return slot.is_at_rest or not slot.watch(self._note_death)

    def _note_death(self, watch: RootWatch) -> None:
        self._coming.append(watch.slot)
        self.settle()

    def _disconnect(self, slot: Slot) -> None:
        if (channel := slot.channel) is not None:
            # In this order: interrupted, it is lost, but never that of two slots.
            slot.channel = None
            self._lines.append(channel)

    def _let_go(self, loan: Loan) -> None:
        slot = loan.slot
        loan.place.region.locks.give_back(slot.index, Hold.BORROWER)
        self._forget(loan)
        if slot.outlived:
            self._note_unused(slot.outlived)
            slot.outlived.clear()
        # Mostly there are few, and nothing need be counted.
        if slot.extensions or len(self._places) > MOST_IDLE:
            self._close_idle()

    def _forget(self, loan: Loan) -> None:
        loan.place.loans.pop(loan.slot.index, None)
        self._loans.pop(loan.slot, None)

    # --- closing ----------------------------------------------------------------------

    def close(self) -> None:
        """Adopt nothing more, and let go of what nobody uses.

        What a lease or a view still has is returned by whoever gives it back.
        """
        self._closed = True
        for slot in self.slots:
            if not slot.leased:
                self.give_up(slot)
        self.settle()
        if not self._lock.locked():
            with self._lock:
                self._close_idle()

    def end(self) -> None:
        """As `close`, when the interpreter ends: no lease need come back any more.

        Of what the server still has, the regions stay in use as long as the process.
        """
        self.close()
        # With none, nothing can hang: a forked child may have a lock that nobody frees.
        if self._loans:
            with self._lock:
                for loan in tuple(self._loans.values()):
                    self._leave(loan)
                    if not loan.slot.server_hold:
                        self._forget(loan)
                self._close_idle()
        # What has come meanwhile.
        self.settle()

    def take_unused(self) -> list[str]:
        """Regions that are not in use here any more, each told of once."""
        unused, self._unused = self._unused, set()
        return list(unused)

    def disown(self) -> None:
        """In a forked child: nothing here belongs to it."""
        # Another thread of the parent may have held it; it does not exist here.
        self._lock = threading.Lock()
        self._lines.clear()
        # Views that die here are still views of the parent's.
        self._is_disowned = True

    def _close_idle(self) -> None:
        """Close regions that nobody needs, the longest unused first. Under the lock."""
        last = None if self._closed else next(reversed(self._places), None)
        idle = {
            name: place.regions
            for name, place in self._places.items()
            if not place.loans and name != last
        }
        spare = sum(map(len, idle.values())) - (0 if self._closed else MOST_IDLE)
        for name, regions in idle.items():
            if spare > 0 or self._places[name].region.is_removed:
                self._places.pop(name).close()
                self._note_unused(regions)
                spare -= len(regions)
        while self._closed and self._lines:
            self._lines.pop().close()

    def _note_unused(self, names: Iterable[str]) -> None:
        """Remember them until the session ends, or their files do."""
        known = self._unused.union(names)
        self._unused = {each for each in known if os.path.exists(region_path(each))}

    def __repr__(self) -> str:
        return f"<Borrower of {len(self._loans)} slots in {len(self._places)} regions>"
