"""Slots: holds and labels, views that pin, memory that moves, names never reused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shmlane.memory import SessionMemory
from shmlane.metadata import Array
from shmlane.slots import Label, RootWatch, Slot
from shmlane.tensors import Tensor
from tests.unit.interleaving import Intrusion, every
from tests.unit.pools import find_views_by
from tests.unit.scripted import OPEN, PLAIN, ScriptedChannel, memory, view_of


@pytest.fixture
def memory_of_plain() -> Iterator[SessionMemory]:
    made = memory(PLAIN)
    yield made
    made.close()


@pytest.fixture
def slot(memory_of_plain: SessionMemory) -> Slot:
    return memory_of_plain.make_slots(1)[0]


@pytest.fixture
def x(slot: Slot) -> Tensor:
    return slot.inputs["X"]


@pytest.fixture
def y(slot: Slot) -> Tensor:
    return slot.outputs["Y"]


def label(slot: Slot) -> Label:
    return slot.label


class Deaths:
    """What a pool notes of roots that died, and counts later."""

    def __init__(self) -> None:
        self.noted: list[RootWatch] = []

    def __call__(self, watch: RootWatch) -> None:
        self.noted.append(watch)

    def count(self) -> list[bool]:
        """Which of the deaths made their slot whole again."""
        counted = [watch.slot.revive() for watch in self.noted]
        self.noted.clear()
        return counted


# --- labels ---------------------------------------------------------------------------


def expected_label(server: bool, connection: str, leased: bool, views: bool) -> Label:
    """The table of the design, row by row."""
    if server and connection != "alive":
        return Label.LOST
    if server:
        return Label.IN_FLIGHT if leased else Label.LATE
    if leased:
        return Label.LEASED
    return Label.PINNED if views else Label.FREE


@pytest.mark.parametrize(
    ("server", "connection", "leased", "views"),
    [
        (server, connection, leased, views)
        for server in (False, True)
        for connection in ("none", "alive", "broken")
        for leased in (False, True)
        for views in (False, True)
    ],
)
def test_label_follows_from_the_holds(
    slot: Slot, x: Tensor, server: bool, connection: str, leased: bool, views: bool
) -> None:
    if connection != "none":
        slot.channel = ScriptedChannel()
        slot.channel.is_open = connection == "alive"
    slot.server_hold = server
    slot.leased = leased
    kept = [view_of(x)] if views else []
    expected = expected_label(server, connection, leased, views)
    assert label(slot) is expected
    assert repr(slot) == f"<Slot 0 {expected.value} generation 0>"
    del kept


# --- views pin ------------------------------------------------------------------------

DERIVED: dict[str, Callable[[Array], object]] = {
    "the view": lambda view: view,
    "a slice": lambda view: view[:, 1:],
    "a reversed slice": lambda view: view[:, ::-1],
    "one row": lambda view: view[0],
    "a reshape": lambda view: view.reshape(2, 2),
    "a transpose": lambda view: view.T,
    "other bytes": lambda view: view.view(np.uint8),
    "a view of views": lambda view: view[...].T[...].ravel()[1:].reshape(3, 1),
    "a subclass": lambda view: view.view(np.matrix),
    "a view of a subclass": lambda view: view.view(np.matrix)[0].view(np.ndarray),
    "a broadcast": lambda view: np.broadcast_to(view, (5, 1, 4)),
    "a strided trick": lambda view: np.lib.stride_tricks.as_strided(view, (2, 2)),
    "asarray": np.asarray,
    "DLPack": np.from_dlpack,
    "a memoryview": lambda view: view.data,
    "a slice of a memoryview": lambda view: view.data.cast("B")[4:],
    "an array over a buffer": lambda view: np.frombuffer(view.data, np.uint8),
    "an iterator": lambda view: view.flat,
    "a list": lambda view: [view],
    "a dict": lambda view: {"x": {"y": view}},
    "an object array": lambda view: np.array([view, None], dtype=object),
    "a closure": lambda view: lambda: view,
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_whatever_refers_to_a_view_pins_the_slot(
    slot: Slot, x: Tensor, derive: Callable[[Array], object]
) -> None:
    kept = derive(view_of(x))
    assert not slot.is_at_rest
    assert label(slot) is Label.PINNED
    del kept
    assert slot.is_at_rest
    assert label(slot) is Label.FREE


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_whatever_refers_to_a_view_is_waited_for(
    slot: Slot, x: Tensor, derive: Callable[[Array], object]
) -> None:
    deaths = Deaths()
    kept = derive(view_of(x))
    slot.watch(deaths)
    assert not deaths.noted
    assert label(slot) is Label.PINNED
    del kept
    assert deaths.count() == [True]
    assert label(slot) is Label.FREE


def test_a_cycle_pins_until_it_is_collected(slot: Slot, x: Tensor) -> None:
    gc.disable()
    try:
        cycle: list[object] = [view_of(x)]
        cycle.append(cycle)
        del cycle
        assert not slot.is_at_rest
        gc.collect()
        assert slot.is_at_rest
    finally:
        gc.enable()


def test_copies_and_numbers_pin_nothing(slot: Slot, x: Tensor) -> None:
    kept = [view_of(x).copy(), view_of(x)[0, 1], view_of(x).tolist(), view_of(x) + 1]
    assert slot.is_at_rest
    del kept


def test_every_tensor_pins(slot: Slot) -> None:
    for tensor in slot.tensors:
        kept = view_of(tensor)
        assert not slot.is_at_rest
        del kept
        assert slot.is_at_rest


def test_a_new_shape_does_not_hide_older_views() -> None:
    (slot,) = memory(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)}).make_slots(1)
    tensor = slot.inputs["X"]
    kept = view_of(tensor)
    slot.reshape(tensor, (2,))
    assert tensor.array.shape == (2,)
    assert not slot.is_at_rest
    del kept
    assert slot.is_at_rest


# --- waiting for views to die ---------------------------------------------------------


def test_the_last_view_of_one_tensor_makes_the_slot_whole(
    slot: Slot, x: Tensor
) -> None:
    deaths = Deaths()
    first = view_of(x)
    second = first[:, 2:]
    slot.watch(deaths)
    del first
    assert deaths.noted == []
    del second
    assert [watch.slot for watch in deaths.noted] == [slot]
    assert deaths.count() == [True]
    assert slot.is_at_rest


def test_views_of_several_tensors_must_all_die(
    slot: Slot, x: Tensor, y: Tensor
) -> None:
    deaths = Deaths()
    kept = {"x": view_of(x), "y": view_of(y)}
    slot.watch(deaths)
    del kept["y"]
    assert deaths.count() == [False]
    assert label(slot) is Label.PINNED
    assert not slot.is_at_rest
    del kept["x"]
    assert deaths.count() == [True]
    assert label(slot) is Label.FREE


def test_views_may_die_in_another_thread(slot: Slot, x: Tensor) -> None:
    deaths = Deaths()
    kept = [view_of(x)]
    slot.watch(deaths)
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert deaths.count() == [True]
    assert slot.is_at_rest


def test_a_slot_at_rest_has_nothing_to_wait_for(slot: Slot) -> None:
    deaths = Deaths()
    assert not slot.watch(deaths)
    assert deaths.noted == []
    assert label(slot) is Label.FREE


def test_no_death_is_missed_while_the_watch_begins(
    memory_of_plain: SessionMemory,
) -> None:
    def views_die_at(instruction: int) -> Intrusion[bool]:
        (slot,) = memory_of_plain.make_slots(1)
        deaths = Deaths()
        kept = [view_of(tensor) for tensor in slot.tensors]
        begun = Intrusion(lambda: slot.watch(deaths), kept.clear, instruction)
        kept.clear()
        assert deaths.count()[-1:] == [True] * begun.result
        assert slot.is_at_rest
        return begun

    assert {begun.result for begun in every(views_die_at)} == {True, False}


def test_fresh_arrays_have_the_old_content_and_shape() -> None:
    (slot,) = memory(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)}).make_slots(1)
    tensor = slot.inputs["X"]
    slot.reshape(tensor, (3,))
    kept = view_of(tensor)
    kept[:] = (1, 2, 3)
    deaths = Deaths()
    slot.watch(deaths)
    kept[:] = (4, 5, 6)
    del kept
    deaths.count()
    assert tensor.array.tolist() == [4, 5, 6]
    assert tensor.shape == (3,)


def test_a_slot_can_be_pinned_again_and_again(slot: Slot, x: Tensor) -> None:
    for number in range(3):
        deaths = Deaths()
        kept = view_of(x)
        kept[...] = number
        slot.watch(deaths)
        assert label(slot) is Label.PINNED
        del kept
        assert deaths.count() == [True]
        assert x.array.tolist() == [[number] * 4]


def test_without_exact_counts_weak_references_decide(
    slot: Slot, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_views_by("weak references", monkeypatch)
    deaths = Deaths()
    kept = view_of(x)
    assert slot.watch(deaths)
    assert label(slot) is Label.PINNED
    # The other tensor had no views: its root died on the spot.
    assert deaths.count() == [False]
    del kept
    assert deaths.count() == [True]
    assert label(slot) is Label.FREE


def test_everything_tells_its_state(slot: Slot) -> None:
    assert repr(slot.inputs["X"]) == "<Tensor X (1, 4) of 16 bytes>"
    assert repr(slot) == "<Slot 0 free generation 0>"
    slot.renew_registrations()
    assert repr(slot) == "<Slot 0 free generation 1>"
