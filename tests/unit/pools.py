"""Pools of real slots for the tests, callers that wait for them, and what must hold.

Owns the threads that wait and the check that no slot is lost. Refuses servers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from shmlane import pool, slots, tensors
from shmlane.errors import LeaseTimeout, OutOfSharedMemory
from shmlane.memory import SessionMemory
from shmlane.metadata import Array
from shmlane.pool import SlotPool
from shmlane.slots import Holder, Slot
from tests.unit.scripted import memory, view_of

_PATIENCE = 10.0


WITH_AND_WITHOUT_GIL = ("exact counts", "weak references")


def find_views_by(how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have slots and pools look for views as with the GIL, or as without it."""
    for module in (tensors, slots, pool):
        monkeypatch.setattr(module, "COUNTS_ARE_EXACT", how == "exact counts")
    return how


class Spare:
    """Makes spare slots as a session does, or says that there is no room."""

    def __init__(self, shared: SessionMemory, count: int) -> None:
        self.shared = shared
        self.count = count
        self.calls = 0
        self.has_room = True

    def __call__(self) -> Sequence[Slot]:
        self.calls += 1
        if not self.has_room:
            raise OutOfSharedMemory("full.")
        return self.shared.make_slots(self.count)


class Guest(Holder):
    """Gives back at its end what it was given too late, as a lease does."""

    __slots__ = ("_pool",)

    def __init__(self, pool: SlotPool) -> None:
        super().__init__()
        self._pool = pool

    def let_go(self) -> Slot:
        slot: Slot = self._hold.pop()
        return slot

    def __del__(self) -> None:
        if self.held is not None:
            self._pool.release(self)


class Pool(SlotPool):
    """A pool that makes its own memory; `spare` says what was asked of it."""

    def __init__(self, count: int, *, has_spare: bool = True) -> None:
        self.spare = Spare(memory(), count)
        super().__init__(self.spare.shared.make_slots(count), spare=self.spare)
        if not has_spare:
            self._spare = None

    def __del__(self) -> None:
        self.spare.shared.close()

    def all(self) -> list[Slot]:
        """Take every slot."""
        return [self.get(0) for _ in self.slots]

    def get(self, timeout: float | None) -> Slot:
        """A slot that the test looks after, without a holder."""
        guest = Guest(self)
        self.acquire(guest, timeout)
        return guest.let_go()

    def get_at_once(self) -> Slot | None:
        """As `get`, where nobody waits."""
        guest = Guest(self)
        return guest.let_go() if self.take(guest) else None


class Caller(threading.Thread):
    """Waits for a slot in a thread of its own; the queue has it when this returns."""

    def __init__(self, wanted: Pool, timeout: float | None = 30.0) -> None:
        super().__init__(daemon=True)
        self.pool = wanted
        self.timeout = timeout
        self.slot: Slot | None = None
        self.error: BaseException | None = None
        before = wanted.waits
        self.start()
        deadline = time.monotonic() + _PATIENCE
        while wanted.waits == before:
            assert time.monotonic() < deadline, "the caller does not wait"
            time.sleep(0)

    def run(self) -> None:
        try:
            self.slot = self.pool.get(self.timeout)
        except BaseException as error:
            self.error = error

    def end(self) -> Slot | None:
        """What the call returned; `error` has what it raised."""
        self.join(_PATIENCE)
        assert not self.is_alive()
        return self.slot


def pinned(source: Pool, count: int) -> list[object]:
    """Release so many slots with views alive; the views."""
    taken = [source.get(0) for _ in range(count)]
    views: list[object] = [input_of(slot) for slot in taken]
    for slot in taken:
        source.put_back(slot)
    return views


def input_of(slot: Slot) -> Array:
    """A view of the slot's input, as its lease hands it out."""
    return view_of(slot.inputs["X"])


def at_once(wanted: Pool) -> Slot | None:
    """A slot without waiting, None if there is none."""
    try:
        return wanted.get(0)
    except LeaseTimeout:
        return None


def held(*slots: Slot | None) -> list[Slot]:
    return [slot for slot in slots if slot is not None]


def labels(counted: SlotPool) -> dict[str, int]:
    return {label.value: n for label, n in counted.counts().items() if n}


def assert_whole(checked: Pool, out: Sequence[Slot] = ()) -> None:
    """Every slot is either out or can be had once more, and none of them twice."""
    free: list[Slot] = []
    while (slot := at_once(checked)) is not None:
        free.append(slot)
    assert sorted(map(id, [*out, *free])) == sorted(map(id, checked.slots))
    for slot in free:
        checked.put_back(slot)
