"""A slot and its record in the region: the one written from the other.

Owns what a process must write down of a slot before another one may use it, and making
a slot what such a record says. Refuses to lock and to know whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import HandoffExpired, RegionError
from .opened import name_of, token_of
from .records import Entry, Naming
from .regions import could_not
from .slots import Slot
from .tensors import Memory, Registration, Tensor

# Opens a region by its name.
Open = Callable[[str], Memory]


def note_registration(slot: Slot) -> None:
    """Write down under which names a server may know the slot.

    Done before a name is used, too: none may ever be used again, not even after this
    process died in between. Regions of the slot's own that its tensors moved to are not
    told of here: they are not found again after that.
    """
    for own in slot.registrations[:1]:
        slot.notes.naming = Naming(
            slot.generation, own.generation, own.slashes, own.is_live
        )


def read_registration(slot: Slot) -> None:
    """Take over the names under which a server may know the slot.

    One whose registration was begun, and not seen to succeed, is taken back before
    another is made.
    """
    own, told = slot.registrations[0], slot.notes.naming
    slot.generation = max(slot.generation, told.counter, told.generation)
    is_same = (own.generation, own.slashes) == (told.generation, told.slashes)
    if is_same and own.is_live and told.registered:
        return
    slashes = max(told.slashes, slot.index + 1)
    _restore(slot, own, told.generation, slashes, is_live=told.registered)


def _restore(
    slot: Slot,
    registration: Registration,
    generation: int,
    slashes: int,
    *,
    is_live: bool,
) -> None:
    """Have a name as another process left it: used before, if it is not live.

    That process may have begun to register it, with a server that comes to it only now.
    """
    slot.prepared = None
    registration.restore(generation, slashes, is_live=is_live)
    if not is_live and registration.name not in slot.obsolete:
        slot.obsolete.append(registration.name)
        slot.doubtful.append(registration.name)


class Ledger:
    """The record of one slot, and what was last written or read of its tensors.

    open_region: opens the region of a tensor that moved, and finds it again.
    """

    __slots__ = ("_given", "_open_region", "_places", "_seen", "slot")

    def __init__(self, slot: Slot, open_region: Open) -> None:
        self.slot = slot
        self._open_region = open_region
        self._seen = b""
        self._given = 0
        self._places: object = None

    def write(self, given: int) -> None:
        """Write down all of the slot; `given` has the bits of the inputs that are.

        What its tensors moved to is not ours to remove any more.
        """
        slot = self.slot
        note_registration(slot)
        for registration in slot.extensions.values():
            registration.region.hand_over()
        places = [(each.shape, each.nbytes, each.offset) for each in slot.tensors]
        # Mostly nothing is new: another process has read and left it as it was.
        if slot.extensions or (given, places) != (self._given, self._places):
            for number, tensor in enumerate(slot.tensors):
                entry = _entry_of(slot, tensor, bool(tensor.bit & given))
                slot.notes.write_entry(number, entry)
            self._seen = slot.notes.entries()
        self._given, self._places = given, places

    def read(self) -> int:
        """Make the slot what its record says; the bits of the inputs that are given.

        Raises `RegionError` and `TensorMismatch` for what no slot can be, and
        `HandoffExpired` where a region that a tensor lies in is gone.
        """
        read_registration(self.slot)
        entries = self.slot.notes.entries()
        if entries != self._seen:
            self._seen, self._places = b"", None
            self._given = self._read_tensors()
            self._seen = entries
        return self._given

    def take_back(self) -> int:
        """As `read`; what tensors moved to is ours to remove from now on."""
        # What they have moved away from meanwhile was ours before.
        self._take_over()
        given = self.read()
        self._take_over()
        return given

    def _take_over(self) -> None:
        for registration in self.slot.extensions.values():
            registration.region.take_over()

    def reclaim(self) -> None:
        """The process that had the slot died: its tensors are as they were before.

        Nobody knows whether it registered anew what they had moved to.
        """
        slot, before = self.slot, self.slot.generation
        read_registration(slot)
        # It may have written half of the entries.
        self._seen, self._places = b"", None
        for registration in slot.extensions.values():
            slot.obsolete.append(registration.name)
            # All names and keys that it can have used, each with a generation.
            for generation in range(before + 1, slot.generation + 1):
                registration.renew(generation)
                registration.respell()
                slot.obsolete.append(registration.name)
                slot.doubtful.append(registration.name)
        for registration in slot.extensions.values():
            slot.generation += 1
            registration.renew(slot.generation)
            registration.respell()
            registration.region.take_over()
            slot.prepared = None

    def _read_tensors(self) -> int:
        given = 0
        for number, tensor in enumerate(self.slot.tensors):
            entry = self.slot.notes.entry(number)
            self._place(tensor, entry)
            self._shape(tensor, entry)
            given |= tensor.bit if entry.given else 0
        return given

    def _place(self, tensor: Tensor, entry: Entry) -> None:
        """Have the tensor lie where the record says."""
        slot, name = self.slot, tensor.name
        moved = slot.extensions.get(name)
        if not entry.token:
            if moved is not None:
                slot.move_home(tensor)
            return
        region = name_of(entry.token)
        if moved is None or moved.region.name != region:
            memory = self._open(region)
            if entry.offset + entry.capacity > memory.nbytes:
                raise RegionError(
                    f"the record of slot {slot.index} has tensor {name!r} end beyond"
                    f" {region}."
                )
            moved = Registration(memory, slot.index, entry.generation)
            moved.restore(entry.generation, entry.slashes, is_live=entry.registered)
            slot.move(tensor, moved, offset=entry.offset, capacity=entry.capacity)
        slot.generation = max(slot.generation, entry.generation)
        is_same = moved.generation == entry.generation
        if not (is_same and moved.is_live and entry.registered):
            _restore(
                slot,
                moved,
                entry.generation,
                entry.slashes,
                is_live=entry.registered,
            )

    def _open(self, region: str) -> Memory:
        try:
            return self._open_region(region)
        except FileNotFoundError:
            raise HandoffExpired(
                f"what slot {self.slot.index} was filled with is gone: {region} was"
                " removed, because the process that had it has ended.",
                hint="Fill another slot, or have it filled again.",
            ) from None
        except OSError as error:
            raise could_not(f"open {region}", error) from error

    def _shape(self, tensor: Tensor, entry: Entry) -> None:
        if entry.shape is None:
            return
        nbytes = entry.nbytes if tensor.is_bytes else 0
        if (entry.shape, entry.nbytes) == (tensor.shape, tensor.nbytes):
            return
        shape = tensor.spec.check_shape(entry.shape)
        size = nbytes or tensor.spec.nbytes(shape)
        if size > tensor.capacity:
            raise RegionError(
                f"the record of slot {self.slot.index} gives tensor {tensor.name!r}"
                f" {size} bytes, its block has {tensor.capacity}."
            )
        self.slot.reshape(tensor, shape, nbytes)

    def __repr__(self) -> str:
        return f"<Ledger of {self.slot!r}>"


def _entry_of(slot: Slot, tensor: Tensor, given: bool) -> Entry:
    moved = slot.extensions.get(tensor.name)
    token, generation, slashes, is_live = 0, 0, 0, False
    if moved is not None:
        token = token_of(moved.region.name)
        generation, slashes, is_live = moved.generation, moved.slashes, moved.is_live
    return Entry(
        tensor.nbytes,
        tensor.offset,
        tensor.capacity,
        token,
        generation,
        slashes,
        is_live,
        given,
        tensor.shape,
    )
