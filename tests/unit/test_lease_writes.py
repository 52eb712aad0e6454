"""Filling inputs: shapes that change, arrays of any form, and what is not taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane.errors import (
    InputMissing,
    OutOfSharedMemory,
    TensorMismatch,
)
from shmlane.regions import PAGE_BYTES, RegionOptions
from tests.unit.interleaving import CtrlC, every
from tests.unit.scripted import (
    OPEN,
    PLAIN,
    ROWS,
    Desk,
    output,
)

FULL = output("Y", (1, 4))


@pytest.fixture
def open_desk() -> Desk:
    return Desk(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)})


@pytest.fixture
def rows() -> Desk:
    return Desk(ROWS, shapes={"X": (4, 3), "MARK": (4, 2)})


# --- shapes ---------------------------------------------------------------------------


def test_a_view_may_have_another_shape_that_fits(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        lease.view("X", [3])[:] = (1, 2, 3)
        assert lease["X"].tolist() == [1, 2, 3]
        lease.infer(output("Y", (2,)))
    assert open_desk.request["inputs"][0]["shape"] == [3]
    assert open_desk.host.memory.growths == 0


def test_a_larger_shape_than_ever_moves_the_input(open_desk: Desk) -> None:
    count = PAGE_BYTES
    with open_desk.lease() as lease:
        view = lease.view("X", (count,))
        view[:] = np.arange(count)
        lease.infer(output("Y", (1,)))
        assert lease["X"].tolist() == list(range(count))
    x = open_desk.slot.inputs["X"]
    (told,) = open_desk.request["inputs"]
    assert told["parameters"]["shared_memory_region"] == x.registration.name
    assert told["parameters"]["shared_memory_byte_size"] == 4 * count
    assert open_desk.host.memory.growths == 1


def test_the_shape_of_an_earlier_lease_is_not_that_of_the_next(
    open_desk: Desk,
) -> None:
    for shape in [(3,), (PAGE_BYTES,), (0,)]:
        with open_desk.lease() as lease:
            lease.view("X", shape).fill(1)
            lease.infer(output("Y", (1,)))
        with open_desk.lease() as lease:
            assert lease["X"].shape == (8,)
            lease.infer(output("Y", (1,)))
            assert open_desk.request["inputs"][0]["shape"] == [8]


def test_an_input_that_never_had_a_shape_asks_for_one() -> None:
    desk = Desk(OPEN, outputs={"Y": (8,)})
    for _ in range(2):
        with desk.lease() as lease:
            # Also after an earlier lease has said one.
            with pytest.raises(TensorMismatch, match="has no shape yet") as caught:
                lease["X"]
            assert "lease.view(name, shape)" in caught.value.hint
            with pytest.raises(InputMissing):
                lease.infer()
            lease.write("X", np.zeros(5, np.float32))
            assert lease["X"].shape == (5,)


@pytest.mark.parametrize("shape", [(9, 3), (4, 2), (4,), (-1, 3), (4, 3, 1), ()])
def test_a_shape_that_the_model_forbids_changes_nothing(
    rows: Desk, shape: tuple[int, ...]
) -> None:
    with rows.lease() as lease:
        lease["X"][...] = 5
        with pytest.raises(TensorMismatch, match="cannot have shape"):
            lease.view("X", shape)
        with pytest.raises(TensorMismatch):
            lease.write("MARK", np.zeros((max(2, len(shape)), 9), np.int8))
        assert lease["X"].tolist() == [[5] * 3] * 4
        lease.infer(output("SUM", (4, 1)))
    assert [each["name"] for each in rows.request["inputs"]] == ["X"]


def test_a_lease_goes_on_where_memory_for_a_larger_shape_is_missing() -> None:
    options = RegionOptions(max_bytes=4 * PAGE_BYTES, hugepages="never")
    desk = Desk(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)}, options=options)
    with desk.lease() as lease:
        lease["X"][...] = 5
        for use in (
            lambda: lease.view("X", (1 << 20,)),
            lambda: lease.write("X", np.zeros(1 << 20, np.float32)),
        ):
            with pytest.raises(OutOfSharedMemory):
                use()
        assert lease["X"].tolist() == [5] * 8
        lease.infer(output("Y", (8,)))


# --- writing --------------------------------------------------------------------------

BASE = np.arange(24, dtype=np.float32)
SOURCES = {
    "contiguous": BASE[:8],
    "every third": BASE[::3],
    "backwards": BASE[7::-1],
    "every other, backwards": BASE[15::-2],
    "a column": BASE.reshape(8, 3)[:, 1],
    "broadcast": np.broadcast_to(np.float32(5), (8,)),
    "read-only": np.frombuffer(BASE[:8].tobytes(), np.float32),
    "unaligned": np.frombuffer(b"x" + BASE[:8].tobytes(), np.uint8)[1:].view("<f4"),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_an_array_of_any_strides_is_written(
    open_desk: Desk, source: np.ndarray[Any, Any]
) -> None:
    with open_desk.lease() as lease:
        lease.write("X", source)
        assert lease["X"].tolist() == source.tolist()


def test_a_transposed_array_is_written_in_its_own_order(rows: Desk) -> None:
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    with rows.lease() as lease:
        lease.write("X", source.T)
        assert lease["X"].tolist() == source.T.tolist()
        lease.write("X", np.asfortranarray(source.T))
        assert lease["X"].tolist() == source.T.tolist()


def test_an_input_may_be_written_from_its_own_view(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        lease["X"][:] = np.arange(8)
        lease.write("X", lease["X"][::-1])
        assert lease["X"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_lists_of_numbers_that_fit_are_written_as_they_are() -> None:
    desk = Desk(PLAIN)
    with desk.lease() as lease:
        lease.write("X", [[1, 2, 3, 4]])
        assert lease["X"].tolist() == [[1, 2, 3, 4]]
        lease.write("X", [[0.5, 1, -2, 4.25]])
        assert lease["X"].tolist() == [[0.5, 1, -2, 4.25]]
        with pytest.raises(TensorMismatch, match="'X' takes FP32"):
            lease.write("X", [["1", "2", "3", "4"]])


def test_another_byte_order_is_no_other_type(open_desk: Desk) -> None:
    source = np.arange(8, dtype=">f4")
    with open_desk.lease() as lease:
        lease.write("X", source)
        assert lease["X"].tolist() == source.tolist()


@pytest.mark.parametrize(
    "datatype", ["float64", "float16", "int32", ">f8", "complex64", "object", "U4"]
)
def test_another_type_is_refused_and_changes_nothing(
    open_desk: Desk, datatype: str
) -> None:
    with open_desk.lease() as lease:
        with pytest.raises(TensorMismatch) as caught:
            lease.write("X", np.ones(4, datatype))
        assert "takes FP32 (float32)" in str(caught.value)
        assert caught.value.context["given"] == str(np.dtype(datatype))
        assert "cast=True" in caught.value.hint
        with pytest.raises(InputMissing):
            lease.infer()
        assert lease["X"].shape == (8,)


@pytest.mark.parametrize("datatype", ["float64", "float16", "int32", ">f4", "bool"])
def test_another_type_is_converted_where_that_is_allowed(
    open_desk: Desk, datatype: str
) -> None:
    source = np.array([0, 1, 1, 0], datatype)
    with open_desk.lease() as lease:
        lease.write("X", source, cast=True)
        assert lease["X"].tolist() == [0, 1, 1, 0]


def test_what_cannot_be_converted_counts_as_not_given(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        lease["X"][...] = 5
        with pytest.raises(TensorMismatch, match="could not convert") as caught:
            lease.write("X", np.array(["1", "2", "three", "4"]), cast=True)
        assert caught.value.context["tensor"] == "X"
        # Half of it was written: it must not be sent.
        with pytest.raises(InputMissing):
            lease.infer()


def test_ctrl_c_at_any_moment_of_writing_leaves_the_input_whole_or_not_given() -> None:
    def pressed_at(moment: int) -> CtrlC:
        desk = Desk(OPEN, shapes={"X": (4,)}, outputs={"Y": (8,)})
        with desk.lease() as lease:
            lease["X"][:] = 5
            source = np.ones(3, np.float32)
            press = CtrlC(lambda: lease.write("X", source), moment)
            x = desk.slot.inputs["X"]
            content = x.array.tolist()
            assert x.shape == (len(content),)
            assert content in ([5] * 4, [5] * 3, [1] * 3) or not lease._given
        return press

    assert len(list(every(pressed_at))) > 5
