"""A slot: the memory of one request, who holds it, and what is prepared on it.

Owns the two holds that decide whether a slot may be used again, the arrays over its
memory, its registrations and its prepared requests. Refuses to wait, to do I/O and to
choose between slots. One slot belongs to one lease at a time; nothing here locks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from sys import getrefcount
from typing import Any, Protocol, TypeVar

from .header import RegionHeader
from .layout import SlotLayout
from .metadata import Array, Shape
from .prepared import Prepared, first_series, id_of
from .records import Record
from .replies import HttpReply
from .tensors import COUNTS_ARE_EXACT, NOTHING, Memory, Registration, Tensor
from .timing import Deadline

T = TypeVar("T")


def move(take: Callable[[], T], put: Callable[[T], object]) -> None:
    """`put(take())`, which Ctrl-C finds done or not begun; raises what they raise.

    Both are functions in C: Python looks for signals only between calls of its own.
    What is moved is in the one place or in the other, never in none or in both.
    """
    next(map(put, iter(take, NOTHING)))


class Label(Enum):
    """What the two holds of a slot mean to people."""

    FREE = "free"
    LEASED = "leased"
    IN_FLIGHT = "in flight"
    LATE = "late"
    LOST = "lost"
    LENT = "lent"
    PINNED = "pinned"


class Channel(Protocol):
    """The connection that a slot owns, as the sessions use it; see `transport`."""

    @property
    def own_ids(self) -> set[str]: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_quiet(self) -> bool: ...
    def comes_within(self, seconds: float) -> bool: ...
    def send(self, request: bytes | bytearray) -> bool: ...
    def send_parts(
        self, parts: Sequence[bytearray | memoryview], deadline: Deadline
    ) -> bool: ...
    def receive(self, timeout: float | None) -> bytes: ...
    def receive_now(self) -> bytes | None: ...
    def advance(self) -> HttpReply | None: ...
    def feed(self, data: bytes) -> HttpReply | None: ...
    def finish(self, data: bytes, deadline: Deadline) -> HttpReply: ...
    def call(self, request: bytes, deadline: Deadline) -> HttpReply: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Holder:
    """Whoever waits for a slot and then has it, until it is given back.

    `_hold` has the slot in its second place; it is empty when all is over. The first
    place stays None and is where `iter(hold.pop, None)` ends.
    """

    __slots__ = ("_hold",)

    def __init__(self, slot: Slot | None = None) -> None:
        # Any, for it is read on the hot path, where nobody asks whether it is None.
        self._hold: list[Any] = [None, slot]

    def take_over(self, other: Holder) -> None:
        """Have the slot of `other` from now on; Ctrl-C finds this done or not begun."""
        del self._hold[1:]
        self._hold.extend(iter(other._hold.pop, None))

    @property
    def held(self) -> Slot | None:
        """The slot, None before and after."""
        return self._hold[-1] if self._hold else None


class RootWatch(weakref.ref[Array]):
    """A weak reference to the root of one tensor that knows its slot.

    has_died: whether it was told so. To lead nowhere proves nothing: the collector
    clears a reference that goes with its slot, though the root lives on with its views.
    """

    __slots__ = ("_deaths", "_witness", "slot")
    slot: Slot

    def __init__(self, root: Array, on_death: Callable[[RootWatch], None]) -> None:
        super().__init__(root, on_death)  # type: ignore[call-arg]
        self._deaths: list[object] = []
        # Told without a line of Python, which Ctrl-C could come before.
        self._witness = weakref.ref(root, self._deaths.append)

    @property
    def has_died(self) -> bool:
        return bool(self._deaths)


class Slot:
    """The part of a region that holds all tensors of one request.

    server_hold: a request is unanswered; set before the first byte leaves, cleared only
        on a complete reply of Triton's or a proven drain.
    leased: somebody's lease is on it, or another process has it: is_lent. is_borrowed:
        another process lends it. notes: its record in the region.
    epoch: changes whenever results on it expire.
    series, turn: what makes the id of the request that was sent last, unless that is
        the caller's: own_id.
    foreign: the epoch in which another client was last to send a request from here.
    """

    __slots__ = (
        "__weakref__",
        "channel",
        "doubtful",
        "epoch",
        "extensions",
        "foreign",
        "generation",
        "has_loans",
        "index",
        "inputs",
        "is_borrowed",
        "is_lent",
        "leased",
        "notes",
        "obsolete",
        "outgrown",
        "outlived",
        "outputs",
        "own_id",
        "prepared",
        "record",
        "registrations",
        "renewals",
        "required",
        "series",
        "server_hold",
        "start",
        "tensors",
        "turn",
        "watches",
    )

    def __init__(
        self, index: int, region: Memory, header: RegionHeader, layout: SlotLayout
    ) -> None:
        self.index = index
        self.generation = 0
        self.renewals = 0
        self.epoch = 0
        self.series = first_series()
        self.turn = 0
        self.own_id = ""
        self.foreign = -2
        self.leased = False
        self.has_loans = False
        self.is_lent = False
        self.is_borrowed = False
        self.server_hold = False
        self.channel: Channel | None = None
        self.prepared: Prepared | None = None
        # A memory view: storing one byte through an array costs twice as much.
        at = header.record_offset(index)
        self.record = region.array(at, header.record_stride).data
        self.notes = Record(self.record, header.entry_stride)
        self.start = header.slot_offset(index)
        own = Registration(region, index, 0, slots=header.slots)
        self.registrations = [own] if region.is_shared else []
        self.obsolete: list[str] = []
        self.doubtful: list[str] = []
        self.outgrown: list[Memory] = []
        self.outlived: list[str] = []
        self.extensions: dict[str, Registration] = {}
        self.watches: list[RootWatch] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for number, plan in enumerate(layout.tensors):
            tensor = Tensor(plan, 1 << number)
            tensor.bind(own, self.start + plan.offset, plan.capacity)
            (self.inputs if plan.is_input else self.outputs)[tensor.name] = tensor
        self.tensors = (*self.inputs.values(), *self.outputs.values())
        self.required = sum(
            tensor.bit for tensor in self.inputs.values() if not tensor.spec.optional
        )

    # --- holds ------------------------------------------------------------------------

    @property
    def label(self) -> Label:
        if self.server_hold:
            # Releasing the lease changes the epoch once, the next inference once more.
            if self.epoch <= self.foreign + 1:
                # Only the lease can be told what another client was answered.
                return Label.IN_FLIGHT if self.epoch == self.foreign else Label.LOST
            # Read once: the receiver may take it away meanwhile.
            channel = self.channel
            if channel is None or not channel.is_open:
                return Label.LOST
            return Label.IN_FLIGHT if self.leased else Label.LATE
        if self.leased:
            return Label.LENT if self.is_lent else Label.LEASED
        pinned = self.watches or (COUNTS_ARE_EXACT and not self.is_at_rest)
        return Label.PINNED if pinned else Label.FREE

    @property
    def sent_id(self) -> str:
        """The id of the request that was sent last."""
        return self.own_id or id_of(self.series, self.turn)

    @property
    def is_at_rest(self) -> bool:
        """True when no view of any tensor is alive."""
        if self.watches or not COUNTS_ARE_EXACT:
            return False
        # As `Tensor.is_at_rest`, without a call for each tensor: on the hot path.
        for tensor in self.tensors:
            if getrefcount(tensor.root) != tensor.resting:
                return False
        return True

    def watch(self, on_death: Callable[[RootWatch], None]) -> bool:
        """Keep the roots that have views by weak reference only; False if none has.

        `on_death` is called once or more for each of them, when its last view dies,
        possibly before this returns and from any thread; it must not do more than take
        note. Interrupted, this can be called again.
        """
        for tensor in self.tensors:
            # Views may die in another thread meanwhile: this is asked only once.
            if tensor.root is NOTHING or tensor.is_at_rest:
                continue
            watch = RootWatch(tensor.root, on_death)
            watch.slot = self
            self.watches.append(watch)
            # The root is held until here: no watch can fire before it knows its slot.
            tensor.array = tensor.root = NOTHING
        return bool(self.watches)

    def revive(self) -> bool:
        """Make the slot whole again if every watched root has died."""
        if not all(watch.has_died for watch in self.watches):
            return False
        for tensor in self.tensors:
            if tensor.root is NOTHING:
                tensor.revive()
        # Last: interrupted before, this can be called again.
        self.watches.clear()
        return True

    def renew_arrays(self) -> None:
        """Make all arrays in this thread, where reference counts are not exact.

        Without the GIL, what another thread than its maker lets go of dies only when
        the maker gets to it, which may be never: its slot would stay pinned.
        """
        for tensor in self.tensors:
            tensor.revive()

    # --- memory and registration ------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether the server reads and writes the slot's memory itself."""
        return bool(self.registrations)

    @property
    def is_step(self) -> bool:
        """Whether the last request was a step of a sequence."""
        options = None if self.prepared is None else self.prepared.options
        return options is not None and options.has_sequence

    def reshape(self, tensor: Tensor, shape: Shape, nbytes: int = 0) -> None:
        """Give `tensor` another shape that fits its block; `nbytes` if it is BYTES."""
        self.prepared = None
        tensor.reshape(shape, nbytes)

    def lend(self, tensor: Tensor, array: Array) -> None:
        """Send `array`, which has the tensor's shape, in the place of the block."""
        # First: interrupted after it, loans are looked for in vain, and ended.
        self.has_loans = True
        tensor.lent = array

    def end_loans(self) -> None:
        """Let go of callers' arrays; the blocks are what is sent again."""
        for tensor in self.inputs.values():
            tensor.lent = None
        self.has_loans = False

    def extend(
        self, tensor: Tensor, region: Memory, *, offset: int, capacity: int
    ) -> None:
        """Move `tensor` to a region of its own; its content is not kept.

        Arrays over the old block stay valid and are no part of a request any more. An
        input must not move while the server holds the slot; an output moves then
        because the server may still write to its old block.
        """
        self.generation += 1
        registration = Registration(region, self.index, self.generation)
        self.move(tensor, registration, offset=offset, capacity=capacity)

    def move(
        self, tensor: Tensor, place: Registration, *, offset: int, capacity: int
    ) -> None:
        """As `extend`, to a region that is registered or named already."""
        self.prepared = None
        self._drop_unused()
        if place.region.is_shared:
            self.registrations.append(place)
        tensor.bind(place, offset, capacity)
        # Last: interrupted before, the old block is still complete.
        old = self.extensions.get(tensor.name)
        self.extensions[tensor.name] = place
        if old is not None:
            self._outgrow(old)

    def move_home(self, tensor: Tensor) -> None:
        """Move `tensor` back to the slot's own region; its content is not kept."""
        self.prepared = None
        plan = tensor.plan
        tensor.bind(self.registrations[0], self.start + plan.offset, plan.capacity)
        self._outgrow(self.extensions.pop(tensor.name))

    def _drop_unused(self) -> None:
        """Let go of regions that tensors were to move to, and did not: Ctrl-C came."""
        used = [tensor.registration for tensor in self.tensors]
        for each in [each for each in self.registrations[1:] if each not in used]:
            self._outgrow(each)

    def _outgrow(self, old: Registration) -> None:
        self.outgrown.append(old.region)
        if old.region.is_shared:
            self.registrations.remove(old)
        if old.is_live:
            self.obsolete.append(old.name)
        self.drop_outgrown()

    def drop_outgrown(self) -> None:
        """Remove the blocks that tensors left, once the server has forgotten them.

        Until then their names stay: they tell whoever cleans up what to take back.
        """
        while self.outgrown and not self.obsolete:
            region = self.outgrown[-1]
            if not region.is_owned:
                self.outlived.append(region.name)
            region.close()
            self.outgrown.pop()

    @property
    def left_to_others(self) -> list[str]:
        """Regions of its tensors whose names are another process's to remove.

        That one may have found them in use here: whoever is last has to look.
        """
        return [*self.outlived, *(each.name for each in self._own if not each.is_owned)]

    @property
    def regions(self) -> list[str]:
        """All regions that its tensors lie in, or have left, in this process."""
        return [*self.outlived, *(each.name for each in self._own)]

    @property
    def _own(self) -> list[Memory]:
        """Memory of its tensors beside that which it shares with other slots."""
        moved = [each.region for each in self.extensions.values()]
        return [*moved, *self.outgrown]

    def renew_registrations(self) -> None:
        """The server forgot or may have forgotten this slot: all names anew."""
        self.prepared = None
        self.generation += 1
        self.renewals += len(self.registrations)
        for registration in self.registrations:
            self.obsolete.append(registration.name)
            registration.renew(self.generation)

    def unregistered(self) -> Iterator[Registration]:
        return (each for each in self.registrations if not each.is_live)

    @property
    def is_forgotten(self) -> bool:
        """True when the server has taken back all that it ever knew of this slot."""
        known = self.server_hold or self.obsolete
        return not known and not any(each.is_live for each in self.registrations)

    def close(self, *, leave: bool = False) -> None:
        """Let go of the connection and, unless somebody holds the slot, of the memory.

        The session is over. A request that the server still holds loses its connection;
        what the server writes then goes to memory that nobody else will ever see.
        leave: regions keep their names, for whoever cleans up after this session.
        """
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        for region in self._own:
            region.leave() if leave else region.close()
        if not self.leased and not self.server_hold:
            self.record = self.notes = NOTHING
            for tensor in self.tensors:
                tensor.array = tensor.root = NOTHING

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self.label.value} generation {self.generation}>"
