"""What a region says of each slot while slots change hands between processes.

Owns the bytes of a slot's record: who may use the slot by which hand-off, under which
name the server knows it, and what its tensors hold. Refuses to lock: who writes holds
the lock that allows it (`claims`), and readers without one know that what they see may
be old.

All numbers are little-endian. A record starts on a cache line:

    offset  size  field
         0     1  1 from before a request is sent until its reply is complete
         1     1  hand-off: 0 at home, 1 handed over, 2 adopted, 3 returned
         2     1  1 while the server has the registration named below
         4     4  process that has the slot for life, 0 if none
         8     8  generation of the hand-off, one more with each
        16     8  highest generation that a registration of this slot had
        24     8  generation of the registration of this region
        32     4  slashes in front of the name, in the key of that registration
        36     4  process that adopted the slot last

Behind these 64 bytes there is an entry for each tensor, in the order of the header:

         0     8  bytes that the tensor has now
         8     8  where its block begins, from the start of the file
        16     8  bytes of the block
        24     8  file of the block: 0 for this one, else the number that its name has
                  behind "shmlane.", in 16 hexadecimal digits
        32     8  generation of the registration of that file
        40     4  slashes in the key of that registration
        44     1  1 while the server has that registration
        45     1  1 if the tensor was given: an input that may be sent
        46     1  number of dimensions, 255 while the shape is not known
        48   8 *  sizes of the dimensions

The two parts are written before the byte that tells of the hand-off. What a process
that died in the middle has written of the entries is never read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEAD_BYTES = 64
LINE_BYTES = 64
NO_SHAPE = 255
# No array of NumPy's has more.
MOST_DIMENSIONS = 64

_IN_FLIGHT, _STATE, _REGISTERED, _CLAIMANT = 0, 1, 2, 4
_HANDOFF, _COUNTER, _BORROWER = 8, 16, 36
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NAMING = struct.Struct("<QQI")
_ENTRY = struct.Struct("<QQQQQIBBBx")


class State(IntEnum):
    """Where a slot is in its hand-off."""

    HOME = 0
    HANDED = 1
    ADOPTED = 2
    RETURNED = 3


class Naming(NamedTuple):
    """Under which names a server may know a slot.

    counter: highest generation that was ever used. generation, slashes: of the
    registration of the slot's own region. registered: whether the server has it.
    """

    counter: int
    generation: int
    slashes: int
    registered: bool


class Entry(NamedTuple):
    """One tensor: where it lies, as what the server knows that, and what it holds.

    token: the number of the file, 0 for that of the record.
    """

    nbytes: int
    offset: int
    capacity: int
    token: int
    generation: int
    slashes: int
    registered: bool
    given: bool
    shape: tuple[int, ...] | None


def entry_bytes(dimensions: int) -> int:
    """Bytes of an entry for tensors of at most so many dimensions."""
    return -(-(_ENTRY.size + 8 * dimensions) // LINE_BYTES) * LINE_BYTES


def record_bytes(tensors: int, dimensions: int) -> int:
    """Bytes of a record for so many tensors."""
    return HEAD_BYTES + tensors * entry_bytes(dimensions)


class Record:
    """The record of one slot, over shared memory.

    Everything but `is_in_flight` is off the hot path: a session sets that byte itself.
    """

    __slots__ = ("_bytes", "_entry_bytes")

    def __init__(self, view: memoryview, stride: int) -> None:
        """view: the bytes of the record. stride: bytes of one entry."""
        self._bytes = view
        self._entry_bytes = stride

    # --- the hand-off -----------------------------------------------------------------

    @property
    def is_in_flight(self) -> bool:
        return self._bytes[_IN_FLIGHT] != 0

    @property
    def state(self) -> int:
        """One of `State`, where nobody else wrote into the file."""
        return self._bytes[_STATE]

    @state.setter
    def state(self, state: State) -> None:
        self._bytes[_STATE] = state

    @property
    def handoff(self) -> int:
        """Generation of the last hand-off."""
        return self._read(_U64, _HANDOFF)

    @handoff.setter
    def handoff(self, generation: int) -> None:
        _U64.pack_into(self._bytes, _HANDOFF, generation & (1 << 64) - 1)

    @property
    def claimant(self) -> int:
        return self._read(_U32, _CLAIMANT)

    @claimant.setter
    def claimant(self, pid: int) -> None:
        _U32.pack_into(self._bytes, _CLAIMANT, pid)

    @property
    def borrower(self) -> int:
        return self._read(_U32, _BORROWER)

    @borrower.setter
    def borrower(self, pid: int) -> None:
        _U32.pack_into(self._bytes, _BORROWER, pid)

    # --- the registration -------------------------------------------------------------

    @property
    def naming(self) -> Naming:
        counter, generation, slashes = _NAMING.unpack_from(self._bytes, _COUNTER)
        return Naming(counter, generation, slashes, self._bytes[_REGISTERED] == 1)

    @naming.setter
    def naming(self, naming: Naming) -> None:
        # Whoever finds this half done must not believe that the server knows a name.
        self._bytes[_REGISTERED] = 0
        _NAMING.pack_into(self._bytes, _COUNTER, *naming[:3])
        self._bytes[_REGISTERED] = naming.registered

    # --- the tensors ------------------------------------------------------------------

    def entry(self, number: int) -> Entry:
        start = HEAD_BYTES + number * self._entry_bytes
        nbytes, offset, capacity, token, generation, slashes, known, given, rank = (
            _ENTRY.unpack_from(self._bytes, start)
        )
        shape: tuple[int, ...] | None = None
        if rank <= (self._entry_bytes - _ENTRY.size) // 8:
            shape = struct.unpack_from(f"<{rank}Q", self._bytes, start + _ENTRY.size)
        return Entry(
            nbytes,
            offset,
            capacity,
            token,
            generation,
            slashes,
            known == 1,
            given == 1,
            shape,
        )

    def write_entry(self, number: int, entry: Entry) -> None:
        start = HEAD_BYTES + number * self._entry_bytes
        shape = entry.shape
        rank = NO_SHAPE if shape is None else len(shape)
        _ENTRY.pack_into(self._bytes, start, *entry[:8], rank)
        if shape:
            struct.pack_into(f"<{rank}Q", self._bytes, start + _ENTRY.size, *shape)

    def entries(self) -> bytes:
        """All entries as they are, to see later whether any has changed."""
        return bytes(self._bytes[HEAD_BYTES:])

    def _read(self, number: struct.Struct, offset: int) -> int:
        value: int = number.unpack_from(self._bytes, offset)[0]
        return value

    def __repr__(self) -> str:
        return f"<Record hand-off {self.handoff}, state {self.state}>"
