"""The documented header: others can read a region, and nothing else passes for one."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.datatypes import DTYPES
from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.layout import SlotLayout
from shmlane.metadata import ModelMetadata
from shmlane.regions import PAGE_BYTES, Region

Tensor = tuple[str, str, list[int]]
names = st.text(max_size=8)
tensors = st.lists(
    st.tuples(
        names, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 50), max_size=3)
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda tensor: tensor[0],
)


def layout_of(inputs: list[Tensor], outputs: list[Tensor]) -> SlotLayout:
    def declared(tensors: list[Tensor]) -> list[dict[str, Any]]:
        keys = ("name", "datatype", "shape")
        return [dict(zip(keys, tensor, strict=True)) for tensor in tensors]

    metadata = {"name": "m", "inputs": declared(inputs), "outputs": declared(outputs)}
    return SlotLayout.plan(ModelMetadata.from_json(metadata, {}, server_version="2.51"))


def plan(layout: SlotLayout, slots: int) -> RegionHeader:
    return RegionHeader.plan(layout, slots, pid=7, server="h:1", model='"modèle"')


@pytest.fixture
def header() -> RegionHeader:
    layout = layout_of([("x", "FP32", [2, 3])], [("y", "INT64", [5])])
    return plan(layout, 3)


def read_like_a_stranger(data: bytes) -> dict[str, Any]:
    """A reader made from nothing but the text of the documentation."""
    assert data[:8] == b"shmlane\0"
    version, slots = struct.unpack_from("<II", data, 8)
    first_record, first, stride, text, length = struct.unpack_from("<QQQQQ", data, 16)
    record, entry = struct.unpack_from("<II", data, 56)
    table, tensors, claimable = struct.unpack_from("<QII", data, 64)
    assert version == 2
    assert record == 64 + tensors * entry
    description = json.loads(data[text : text + length].decode("utf-8"))
    records = [data[first_record + record * n :][:record] for n in range(slots)]
    starts = [first + index * stride for index in range(slots)]
    rows = [data[table + 64 * n :][:64] for n in range(tensors)]
    return {
        "records": records,
        "starts": starts,
        "end": text + length,
        "claimable": claimable,
        "table": [read_row(row, data) for row in rows],
        **description,
    }


def read_row(row: bytes, data: bytes) -> dict[str, Any]:
    """One row of the tensor table."""
    offset, capacity, name, length, kind = struct.unpack_from("<QQQII", row)
    return {
        "name": data[name : name + length].decode("utf-8"),
        "datatype": row[32:40].rstrip(b"\0").decode("ascii"),
        "kind": ["input", "output"][kind],
        "offset": offset,
        "capacity": capacity,
    }


# --- what is written ------------------------------------------------------------------


@given(tensors, tensors, st.integers(1, 40))
def test_what_is_packed_is_parsed_as_it_was(
    inputs: list[Tensor], outputs: list[Tensor], slots: int
) -> None:
    header = plan(layout_of(inputs, outputs), slots)
    assert RegionHeader.parse(header.pack()) == header
    # A whole region starts with the header too.
    assert (
        RegionHeader.parse(header.pack().ljust(header.region_bytes, b"\xff")) == header
    )


@given(tensors, tensors, st.integers(1, 40))
def test_header_records_and_slots_lie_apart_in_the_region(
    inputs: list[Tensor], outputs: list[Tensor], slots: int
) -> None:
    layout = layout_of(inputs, outputs)
    header = plan(layout, slots)
    assert header.record_offset(0) >= 80
    assert all(header.record_offset(index) % 64 == 0 for index in range(slots))
    assert header.record_offset(slots) <= len(header.pack())
    assert len(header.pack()) <= header.first_slot < len(header.pack()) + PAGE_BYTES
    starts = [header.slot_offset(index) for index in range(slots)]
    assert all(start % PAGE_BYTES == 0 for start in starts)
    assert starts == [header.first_slot + n * layout.nbytes for n in range(slots)]
    assert header.region_bytes == starts[-1] + layout.nbytes


@given(tensors, tensors, st.integers(1, 9))
def test_a_reader_made_from_the_documentation_finds_everything(
    inputs: list[Tensor], outputs: list[Tensor], slots: int
) -> None:
    layout = layout_of(inputs, outputs)
    header = plan(layout, slots)
    seen = read_like_a_stranger(header.pack().ljust(header.region_bytes, b"\0"))
    assert (seen["pid"], seen["server"], seen["model"]) == (7, "h:1", '"modèle"')
    assert seen["starts"] == [header.slot_offset(index) for index in range(slots)]
    assert seen["records"] == [bytes(header.record_stride)] * slots
    assert seen["claimable"] == 0
    assert [
        (each["name"], each["datatype"], each["kind"]) for each in seen["tensors"]
    ] == [
        *((name, datatype, "input") for name, datatype, _ in inputs),
        *((name, datatype, "output") for name, datatype, _ in outputs),
    ]
    assert [(each["offset"], each["capacity"]) for each in seen["tensors"]] == [
        (tensor.offset, tensor.capacity) for tensor in layout.tensors
    ]
    told = seen["table"]
    assert told == [{name: each[name] for name in told[0]} for each in seen["tensors"]]


def test_a_region_whose_slots_may_be_claimed_says_so_and_what_is_needed() -> None:
    layout = layout_of([("x", "FP32", [2])], [("y", "INT64", [5])])
    header = RegionHeader.plan(
        layout, 2, pid=7, server="h:1", model="m", session={"version": "3"}
    )
    seen = read_like_a_stranger(header.pack().ljust(header.region_bytes, b"\0"))
    assert seen["claimable"] == 1
    assert seen["session"] == {"version": "3"}
    assert RegionHeader.parse(header.pack()) == header


# --- a region on disk -----------------------------------------------------------------


@pytest.fixture
def region(header: RegionHeader) -> Iterator[Region]:
    region = Region(header.region_bytes, header=header.pack())
    yield region
    region.close()


def test_a_stranger_reads_tensors_and_states_from_the_file(
    header: RegionHeader, region: Region
) -> None:
    region.array(header.record_offset(1), 1)[0] = 1
    offset = header.slot_offset(2) + header.description["tensors"][0]["offset"]
    region.array(offset, 24).view("<f4")[:] = [0, 1, 2, 3, 4, 5]

    data = Path(region.path).read_bytes()
    seen = read_like_a_stranger(data)
    assert [record[0] for record in seen["records"]] == [0, 1, 0]
    x, y = seen["tensors"]
    start = seen["starts"][2] + x["offset"]
    content = data[start : start + x["capacity"]]
    assert struct.unpack("<6f", content) == (0, 1, 2, 3, 4, 5)
    assert (y["name"], y["datatype"], y["capacity"]) == ("y", "INT64", 40)


def test_the_file_holds_all_slots_and_no_more(
    header: RegionHeader, region: Region
) -> None:
    assert os.stat(region.path).st_size == header.region_bytes == region.nbytes
    assert RegionHeader.parse(Path(region.path).read_bytes()) == header


# --- what is not a region -------------------------------------------------------------


def test_a_header_cut_anywhere_is_refused(header: RegionHeader) -> None:
    whole = header.pack()
    for length in range(len(whole)):
        with pytest.raises(RegionError):
            RegionHeader.parse(whole[:length])


@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RegionError, match="region"):
        RegionHeader.parse(data)


@given(st.binary(max_size=400))
def test_foreign_bytes_behind_the_magic_are_refused(data: bytes) -> None:
    with pytest.raises(RegionError, match=r"region header cannot be read|cut short"):
        RegionHeader.parse(b"shmlane\0" + struct.pack("<I", 2) + data)


def forged(header: RegionHeader, text: bytes) -> bytes:
    """The header with another description."""
    whole = header.pack()
    (start,) = struct.unpack_from("<Q", whole, 40)
    return whole[:48] + struct.pack("<Q", len(text)) + whole[56:start] + text


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff{}", b"5", b"[]", b"null", b'"tensors"', b"[" * 200_000],
    ids=lambda text: repr(text[:12]),
)
def test_a_description_that_is_no_json_object_is_refused(
    header: RegionHeader, text: bytes
) -> None:
    assert RegionHeader.parse(forged(header, b"{}")).description == {}
    with pytest.raises(RegionError, match="region header cannot be read"):
        RegionHeader.parse(forged(header, text))


@pytest.mark.parametrize("version", [0, 1, 3, 2**32 - 1])
def test_another_version_is_refused_by_its_number(
    header: RegionHeader, version: int
) -> None:
    whole = header.pack()
    data = whole[:8] + struct.pack("<I", version) + whole[12:]
    with pytest.raises(RegionError, match=f"version {version}.* reads version 2"):
        RegionHeader.parse(data)


@pytest.mark.parametrize("magic", [b"shmlane\1", b"Shmlane\0", b"\0shmlane", bytes(8)])
def test_another_magic_is_refused(header: RegionHeader, magic: bytes) -> None:
    with pytest.raises(RegionError, match="not a shmlane region"):
        RegionHeader.parse(magic + header.pack()[8:])


@pytest.mark.parametrize("field", range(40, 56, 8))
def test_a_description_beyond_the_file_is_refused(
    header: RegionHeader, field: int
) -> None:
    whole = header.pack()
    data = whole[:field] + b"\xff" * 8 + whole[field + 8 :]
    with pytest.raises(RegionError, match="cut short"):
        RegionHeader.parse(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [(12, 2**32 - 1), (12, 50), (16, 2**64 - 1), (56, 0), (56, 2**32 - 1)],
)
def test_more_slots_than_there_is_room_for_are_refused(
    header: RegionHeader, field: int, value: int
) -> None:
    """Whoever lists them would not come to an end."""
    whole = header.pack()
    kind = "<Q" if field == 16 else "<I"
    lying = bytearray(whole)
    struct.pack_into(kind, lying, field, value)
    with pytest.raises(RegionError, match="no room for the records"):
        RegionHeader.parse(bytes(lying))
