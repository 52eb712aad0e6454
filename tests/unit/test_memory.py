"""Memory of a session: blocks that grow, names never reused, and how it all ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane.errors import OutOfSharedMemory, PoolClosed
from shmlane.exchange import Exchange
from shmlane.header import RegionHeader
from shmlane.memory import SessionMemory
from shmlane.regions import PAGE_BYTES, Region, RegionOptions
from shmlane.slots import Slot
from shmlane.tensors import Memory, Tensor
from tests.unit import interleaving
from tests.unit.interleaving import CtrlC, Intrusion, every
from tests.unit.scripted import OPEN, REQUESTS, SMALL, ScriptedChannel, memory, view_of

# --- tensors that move ----------------------------------------------------------------


@pytest.fixture
def memory_of_open() -> Iterator[SessionMemory]:
    made = memory(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)})
    yield made
    made.close()


def filled(slot: Slot) -> Slot:
    for number, tensor in enumerate(slot.tensors, start=1):
        tensor.array[...] = number
    return slot


def grown(memory: SessionMemory, slot: Slot, *, nbytes: int = PAGE_BYTES) -> Tensor:
    tensor = slot.inputs["X"]
    memory.grow(slot, tensor, nbytes)
    return tensor


def region_of(tensor: Tensor) -> Path:
    return Path(tensor.registration.region.path)


def test_growing_leaves_other_tensors_and_slots_alone(
    memory_of_open: SessionMemory,
) -> None:
    slot, neighbour = map(filled, memory_of_open.make_slots(2))
    before = {each: each.registration for each in (*slot.tensors, *neighbour.tensors)}
    tensor = grown(memory_of_open, slot)
    del before[tensor]
    assert {each: each.registration for each in before} == before
    assert slot.outputs["Y"].array.tolist() == [2] * 8
    assert neighbour.inputs["X"].array.tolist() == [1] * 8


def test_growing_leaves_older_views_alone(memory_of_open: SessionMemory) -> None:
    (slot,) = map(filled, memory_of_open.make_slots(1))
    kept = [view_of(tensor) for tensor in slot.tensors]
    tensor = grown(memory_of_open, slot)
    tensor.array[...] = 7
    assert [view.tolist() for view in kept] == [[1] * 8, [2] * 8]
    # A view of the old block keeps nobody from using the new one.
    del kept[1]
    assert slot.is_at_rest


def test_a_grown_tensor_has_its_first_shape_and_new_memory(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    tensor = grown(memory_of_open, slot, nbytes=PAGE_BYTES + 4)
    assert tensor.shape == (8,)
    assert tensor.capacity == 2 * PAGE_BYTES
    slot.reshape(tensor, (PAGE_BYTES // 2,))
    tensor.array[...] = 3
    assert tensor.array.nbytes == tensor.capacity
    assert slot.is_at_rest


def test_growing_again_removes_the_region_before(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    base = region_of(slot.inputs["X"])
    first = region_of(grown(memory_of_open, slot))
    kept = view_of(slot.inputs["X"])
    kept[...] = 5
    second = region_of(grown(memory_of_open, slot, nbytes=2 * PAGE_BYTES))
    assert base.exists()
    assert not first.exists()
    assert second.exists()
    assert kept.tolist() == [5] * 8
    assert [each.region.path for each in slot.registrations] == [
        str(base),
        str(second),
    ]


def test_a_region_that_the_server_knows_keeps_its_name_until_it_is_taken_back(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    first = region_of(grown(memory_of_open, slot))
    slot.registrations[1].is_live = True
    grown(memory_of_open, slot, nbytes=2 * PAGE_BYTES)
    assert slot.obsolete == [f"{first.name}.0.1"]
    assert first.exists()
    slot.obsolete.clear()
    slot.drop_outgrown()
    assert not first.exists()
    slot.close()


def test_growing_makes_the_prepared_requests_void(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    Exchange(REQUESTS, OPEN).prepare(slot, 1)
    assert slot.prepared is not None
    grown(memory_of_open, slot)
    assert slot.prepared is None


def is_consistent(slot: Slot) -> bool:
    """Whether every array lies where the next request will say that it lies."""
    for number, tensor in enumerate(slot.tensors):
        tensor.array[...] = number
        block = tensor.registration.region.array(tensor.offset, tensor.array.nbytes)
        told = block.view(np.float32)
        if tensor.registration not in slot.registrations or not (told == number).all():
            return False
    if slot.prepared is None:
        return True
    before = slot.prepared.request
    Exchange(REQUESTS, OPEN).prepare(slot, 1)
    return slot.prepared.request == before


def test_ctrl_c_at_any_moment_of_a_move_leaves_a_slot_that_works(
    memory_of_open: SessionMemory,
) -> None:
    def pressed_at(moment: int) -> CtrlC:
        (slot,) = memory_of_open.make_slots(1)
        tensor = grown(memory_of_open, slot)
        Exchange(REQUESTS, OPEN).prepare(slot, 1)
        region = Region(3 * PAGE_BYTES, header=b"", options=SMALL)
        press = CtrlC(
            lambda: slot.extend(
                tensor, region, offset=PAGE_BYTES, capacity=2 * PAGE_BYTES
            ),
            moment,
        )
        assert is_consistent(slot)
        assert slot.is_at_rest
        slot.close()
        region.close()
        return press

    assert len(list(every(pressed_at))) > 20


def test_ctrl_c_at_any_moment_of_a_new_shape_leaves_a_slot_that_works(
    memory_of_open: SessionMemory,
) -> None:
    def pressed_at(moment: int) -> CtrlC:
        (slot,) = memory_of_open.make_slots(1)
        Exchange(REQUESTS, OPEN).prepare(slot, 1)
        press = CtrlC(lambda: slot.reshape(slot.inputs["X"], (3,)), moment)
        tensor = slot.inputs["X"]
        assert tensor.array.shape == tensor.shape
        assert is_consistent(slot)
        slot.close()
        return press

    assert len(list(every(pressed_at))) > 2


def test_blocks_grow_by_half_at_least(memory_of_open: SessionMemory) -> None:
    (slot,) = memory_of_open.make_slots(1)
    tensor = grown(memory_of_open, slot, nbytes=100 * PAGE_BYTES)
    memory_of_open.grow(slot, tensor, 100 * PAGE_BYTES + 1)
    assert tensor.capacity == 150 * PAGE_BYTES
    assert memory_of_open.growths == 2


def test_memory_counts_its_regions(memory_of_open: SessionMemory) -> None:
    (slot,) = memory_of_open.make_slots(1)
    base = slot.registrations[0].region.nbytes
    assert memory_of_open.nbytes == base
    for nbytes in (PAGE_BYTES, 5 * PAGE_BYTES):
        tensor = grown(memory_of_open, slot, nbytes=nbytes)
        assert memory_of_open.nbytes == base + tensor.registration.region.nbytes
    memory_of_open.make_slots(1)
    assert memory_of_open.nbytes == 2 * base + tensor.registration.region.nbytes
    assert repr(memory_of_open) == (
        f"<SessionMemory 2 regions {memory_of_open.nbytes} bytes>"
    )


class Everywhere:
    """As a set of all files."""

    def __contains__(self, _file: str) -> bool:
        return True


def test_memory_can_be_counted_while_other_threads_move_tensors(
    memory_of_open: SessionMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaving, "_TRACED", Everywhere())
    (slot,) = memory_of_open.make_slots(1)
    region = grown(memory_of_open, slot).registration.region
    nbytes = memory_of_open.nbytes
    opened: list[Memory] = []

    def come_and_go() -> None:
        opened.clear()
        opened.append(memory_of_open.open_extension(region.name))

    for count in every(
        lambda at: Intrusion(lambda: memory_of_open.nbytes, come_and_go, at)
    ):
        assert count.result == nbytes


def test_a_limit_of_memory_holds_and_changes_nothing() -> None:
    limit = 6 * PAGE_BYTES
    limited = memory(
        OPEN,
        shapes={"X": (8,)},
        options=RegionOptions(max_bytes=limit, hugepages="never"),
    )
    (slot,) = map(filled, limited.make_slots(1))
    block = slot.inputs["X"].registration, slot.inputs["X"].capacity
    before = limited.nbytes
    with pytest.raises(OutOfSharedMemory, match=f"its limit is {limit}") as caught:
        grown(limited, slot, nbytes=limit)
    assert caught.value.context["limit"] == limit
    with pytest.raises(OutOfSharedMemory):
        limited.make_slots(10)
    assert (limited.nbytes, limited.growths) == (before, 0)
    assert (slot.inputs["X"].registration, slot.inputs["X"].capacity) == block
    assert slot.inputs["X"].array.tolist() == [1] * 8


def test_a_closed_memory_makes_nothing_more(memory_of_open: SessionMemory) -> None:
    (slot,) = memory_of_open.make_slots(1)
    memory_of_open.close()
    for make in (
        lambda: memory_of_open.make_slots(1),
        lambda: grown(memory_of_open, slot),
    ):
        with pytest.raises(PoolClosed):
            make()


# --- registrations --------------------------------------------------------------------


def test_no_registration_name_is_ever_used_again(
    memory_of_open: SessionMemory,
) -> None:
    every_slot = [*memory_of_open.make_slots(3), *memory_of_open.make_slots(2)]
    names: list[str] = []

    for slot in every_slot:
        names += [each.name for each in slot.registrations]
        for round_ in range(1, 4):
            grown(memory_of_open, slot, nbytes=round_ * PAGE_BYTES)
            names.append(slot.registrations[-1].name)
            slot.renew_registrations()
            names += [each.name for each in slot.registrations]
    assert len(names) == len(set(names)) == 5 * (1 + 3 * 3)


def test_keys_of_one_file_differ_in_their_leading_slashes(
    memory_of_open: SessionMemory,
) -> None:
    every_slot = memory_of_open.make_slots(5)
    keys = [slot.registrations[0].key for slot in every_slot]
    assert len(set(keys)) == 5
    file = region_of(every_slot[0].inputs["X"]).name
    assert [key.lstrip("/") for key in keys] == [file] * 5
    assert all(key.startswith("/") for key in keys)


def test_a_registration_is_not_live_before_the_server_says_so(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    (registration,) = slot.registrations
    assert list(slot.unregistered()) == [registration]
    assert repr(registration) == f"<Registration {registration.name} not live>"
    registration.is_live = True
    assert list(slot.unregistered()) == []
    assert repr(registration) == f"<Registration {registration.name} live>"


def test_new_names_leave_the_old_ones_to_be_taken_back(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    grown(memory_of_open, slot)
    for each in slot.registrations:
        each.is_live = True
    before = [each.name for each in slot.registrations]
    slot.renew_registrations()
    assert slot.obsolete == before
    assert list(slot.unregistered()) == slot.registrations
    assert {each.name for each in slot.registrations}.isdisjoint(before)


def test_a_slot_is_forgotten_when_the_server_knows_and_holds_nothing_of_it(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    assert slot.is_forgotten
    slot.registrations[0].is_live = True
    assert not slot.is_forgotten
    slot.renew_registrations()
    assert not slot.is_forgotten
    slot.obsolete.clear()
    assert slot.is_forgotten
    slot.server_hold = True
    assert not slot.is_forgotten
    slot.server_hold = False


def test_outputs_move_out_of_reach_and_inputs_stay(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = map(filled, memory_of_open.make_slots(1))
    before = {tensor: tensor.registration for tensor in slot.tensors}
    kept = view_of(slot.outputs["Y"])
    memory_of_open.move_outputs(slot)
    x, y = slot.inputs["X"], slot.outputs["Y"]
    assert x.registration is before[x]
    assert y.registration is not before[y]
    kept[...] = 9
    assert 9 not in y.array
    assert memory_of_open.growths == 0
    assert is_consistent(slot)


# --- the record and the end -----------------------------------------------------------


def test_each_slot_has_a_record_of_its_own_in_the_header(
    memory_of_open: SessionMemory,
) -> None:
    every_slot = memory_of_open.make_slots(3)
    region = every_slot[0].registrations[0].region
    header = RegionHeader.parse(region.array(0, PAGE_BYTES).tobytes())
    every_slot[1].record[0] = 1
    records = [
        int(region.array(header.record_offset(index), 1)[0]) for index in range(3)
    ]
    assert records == [0, 1, 0]


def mapped(*inodes: int) -> list[bool]:
    """Which of these files this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[4] for line in maps}
    return [str(inode) in found for inode in inodes]


def test_a_closed_slot_lets_go_of_connection_and_memory(
    memory_of_open: SessionMemory,
) -> None:
    (slot,) = memory_of_open.make_slots(1)
    grown(memory_of_open, slot)
    files = [region_of(tensor) for tensor in slot.tensors]
    inodes = [file.stat().st_ino for file in files]
    slot.channel = channel = ScriptedChannel()
    assert mapped(*inodes) == [True, True]
    slot.close()
    memory_of_open.close()
    assert not channel.is_open
    assert not any(file.exists() for file in files)
    assert mapped(*inodes) == [False, False]


def test_views_outlive_a_closed_slot(memory_of_open: SessionMemory) -> None:
    (slot,) = map(filled, memory_of_open.make_slots(1))
    grown(memory_of_open, slot).array[...] = 3
    inodes = [region_of(tensor).stat().st_ino for tensor in slot.tensors]
    kept = [view_of(tensor) for tensor in slot.tensors]
    slot.close()
    memory_of_open.close()
    assert [view.tolist() for view in kept] == [[3] * 8, [2] * 8]
    kept.pop()
    assert mapped(*inodes) == [True, False]
    kept.pop()
    assert mapped(*inodes) == [False, False]


@pytest.mark.parametrize("hold", ["leased", "server_hold"])
def test_a_held_slot_keeps_its_memory_when_it_is_closed(
    memory_of_open: SessionMemory, hold: str
) -> None:
    (slot,) = map(filled, memory_of_open.make_slots(1))
    setattr(slot, hold, True)
    slot.close()
    memory_of_open.close()
    assert [tensor.array.tolist() for tensor in slot.tensors] == [[1] * 8, [2] * 8]
    setattr(slot, hold, False)
    slot.close()
