"""The record of a slot: what one process writes, others and other languages read."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.records import (
    Entry,
    Naming,
    Record,
    State,
    entry_bytes,
    record_bytes,
)

DIMENSIONS = 4
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
shapes = st.none() | st.lists(u64, max_size=DIMENSIONS).map(tuple)
entries = st.builds(
    Entry, u64, u64, u64, u64, u64, u32, st.booleans(), st.booleans(), shapes
)


def fresh(tensors: int = 2) -> tuple[Record, bytearray]:
    data = bytearray(record_bytes(tensors, DIMENSIONS))
    return Record(memoryview(data), entry_bytes(DIMENSIONS)), data


def test_a_record_that_nobody_wrote_says_that_the_slot_is_at_home() -> None:
    record, _ = fresh()
    assert record.state == State.HOME
    assert not record.is_in_flight
    assert (record.handoff, record.claimant, record.borrower) == (0, 0, 0)
    assert record.naming == Naming(0, 0, 0, False)


@given(u64, u64, u32, st.booleans(), st.lists(entries, min_size=2, max_size=2))
def test_what_is_written_is_read(
    counter: int, generation: int, slashes: int, known: bool, told: list[Entry]
) -> None:
    record, _ = fresh()
    record.naming = naming = Naming(counter, generation, slashes, known)
    record.state = State.ADOPTED
    record.handoff, record.claimant, record.borrower = generation, slashes, 7
    for number, entry in enumerate(told):
        record.write_entry(number, entry)
    assert record.naming == naming
    assert [record.entry(number) for number in range(2)] == told
    assert (record.state, record.handoff) == (State.ADOPTED, generation)
    assert (record.claimant, record.borrower) == (slashes, 7)


def test_a_stranger_finds_every_field_where_the_documentation_says() -> None:
    record, data = fresh()
    record.state = State.HANDED
    record.claimant, record.handoff, record.borrower = 11, 12, 13
    record.naming = Naming(14, 15, 16, True)
    record.write_entry(1, Entry(1, 2, 3, 4, 5, 6, True, True, (7, 8)))
    assert data[:3] == bytes([0, 1, 1])
    assert struct.unpack_from("<IQQQII", data, 4) == (11, 12, 14, 15, 16, 13)
    at = 64 + 128
    assert struct.unpack_from("<QQQQQIBBB", data, at) == (1, 2, 3, 4, 5, 6, 1, 1, 2)
    assert struct.unpack_from("<QQ", data, at + 48) == (7, 8)
    assert data[64:at] == bytes(128)


@pytest.mark.parametrize(
    ("dimensions", "nbytes"), [(0, 64), (2, 64), (3, 128), (10, 128), (11, 192)]
)
def test_entries_are_whole_cache_lines(dimensions: int, nbytes: int) -> None:
    assert entry_bytes(dimensions) == nbytes
    assert record_bytes(3, dimensions) == 64 + 3 * nbytes


def test_an_unknown_shape_is_not_a_scalar() -> None:
    record, _ = fresh()
    for number, shape in enumerate((None, ())):
        record.write_entry(number, Entry(0, 0, 0, 0, 0, 0, False, False, shape))
    assert [record.entry(number).shape for number in range(2)] == [None, ()]


def test_dimensions_beyond_the_entry_are_no_shape() -> None:
    record, data = fresh(1)
    data[64 + 46] = 200
    assert record.entry(0).shape is None


def test_changes_of_entries_are_seen() -> None:
    record, _ = fresh()
    before = record.entries()
    record.state = State.RETURNED
    record.naming = Naming(1, 1, 1, True)
    assert record.entries() == before
    record.write_entry(0, Entry(0, 0, 0, 0, 0, 0, False, True, None))
    assert record.entries() != before
