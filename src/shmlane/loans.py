"""A slot of another process that was adopted here, and the region that it lies in.

Owns what is open of such a region, the slots made from its records, and writing down
that one of them goes home. Refuses to know who uses a slot and until when
(`borrowing`).
"""

from __future__ import annotations

from .header import RegionHeader
from .layout import SlotLayout
from .ledger import Ledger
from .opened import OpenedRegion
from .records import State
from .regions import MappedFile
from .slots import Slot


class Place:
    """A region of another process, and those of its slots that were used here."""

    def __init__(self, name: str) -> None:
        self.region = OpenedRegion(name)
        self.header = RegionHeader.parse(self.region.view)
        self.layout: SlotLayout | None = None
        self.ledgers: dict[int, Ledger] = {}
        self.loans: dict[int, Loan] = {}

    def ledger(self, index: int, layout: SlotLayout) -> Ledger:
        if index not in self.ledgers:
            slot = Slot(index, self.region, self.header, layout)
            slot.is_borrowed = True
            self.ledgers[index] = Ledger(slot, OpenedRegion)
        return self.ledgers[index]

    def hold(self, slot: Slot) -> None:
        """Have the slot be ours as long as arrays over moved tensors are alive, too.

        As soon as its lock is free, its home uses it again, with all of its memory.
        """
        for moved in slot.extensions.values():
            if isinstance(moved.region, MappedFile):
                moved.region.keep(self.region.locks)

    @property
    def regions(self) -> list[str]:
        """All that are open for the sake of this one."""
        moved = [name for each in self.ledgers.values() for name in each.slot.regions]
        return [self.region.name, *moved]

    def close(self) -> None:
        """Let go of the memory."""
        for ledger in self.ledgers.values():
            ledger.slot.close(leave=True)
        self.region.leave()


class Loan:
    """One slot that was adopted here, from then until it is returned."""

    __slots__ = ("generation", "given", "has_begun", "ledger", "place", "slot")

    def __init__(self, place: Place, ledger: Ledger, generation: int) -> None:
        self.place = place
        self.ledger = ledger
        self.slot = ledger.slot
        self.generation = generation
        self.given = 0
        # Being returned, perhaps for the second time after Ctrl-C.
        self.has_begun = False

    def give_back(self) -> None:
        """Write down that the slot is its home's, once the lock on it is free."""
        notes = self.slot.notes
        if (notes.state, notes.handoff) == (State.ADOPTED, self.generation):
            self.ledger.write(self.given)
            notes.state = State.RETURNED
