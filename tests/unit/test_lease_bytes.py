"""BYTES in leases, and what else was added to writing: scalars, sizes in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import InferFailed, InputMissing, TensorMismatch, UsageError
from shmlane.metadata import TensorSpec
from shmlane.regions import PAGE_BYTES
from shmlane.testing import FakeModel
from tests.unit.asked import session_on, words
from tests.unit.interleaving import CtrlC, every
from tests.unit.scripted import Desk, model, output

WORDS = model([TensorSpec("W", "BYTES", (-1,))], [TensorSpec("N", "INT32", (-1,))])
ONE = model(
    [
        TensorSpec("X", "FP32", (1,)),
        TensorSpec("W", "BYTES", (1, 1)),
        TensorSpec("OPEN", "INT64", (-1, -1)),
        TensorSpec("NONE", "INT64", ()),
        TensorSpec("TWO", "INT64", (2,)),
    ],
    [TensorSpec("Y", "FP32", (1,))],
)


@pytest.fixture
def desk() -> Desk:
    return Desk(WORDS, outputs={"N": (8,)})


GIVEN: dict[str, tuple[Any, list[bytes]]] = {
    "text": (["one", "zwölf"], [b"one", "zwölf".encode()]),
    "bytes": ([b"", b"\0", b"a\0\0"], [b"", b"\0", b"a\0\0"]),
    "objects": (np.array([b"x\0", "y"], object), [b"x\0", b"y"]),
    "fixed width": (np.array([b"ab", b"c"]), [b"ab", b"c"]),
    "every other": (np.array([b"a", b"-", b"c"], object)[::2], [b"a", b"c"]),
    "none": ([], []),
}


@pytest.mark.parametrize(("given", "wanted"), GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_elements_go_there_and_come_back(
    given: Any, wanted: list[bytes], memory: str
) -> None:
    with session_on(words(), memory=memory, rerun=True) as (_, session):
        for _ in range(3):
            came = session.infer({"W": given})
            assert came["W_OUT"].tolist() == wanted
            assert came["LENGTHS"].tolist() == [len(each) for each in wanted]


def test_nothing_of_longer_elements_is_seen_behind_shorter_ones() -> None:
    with session_on(
        words(), shapes={"W": 4096}, outputs={"W_OUT": 4096, "LENGTHS": (8,)}
    ) as (_, session):
        for given in ([b"secret" * 50] * 4, [b"a"], [], [b"", b"b\0"]):
            with session.lease() as lease:
                lease.write("W", given)
                result = lease.infer()
                assert result["W_OUT"].tolist() == given
                assert result.copy()["W_OUT"].tolist() == given


def test_a_result_of_bytes_outlives_its_lease() -> None:
    with session_on(
        words(), shapes={"W": 4096}, outputs={"W_OUT": 4096, "LENGTHS": (8,)}
    ) as (_, session):
        kept = []
        for given in ([b"one"], [b"two"]):
            with session.lease() as lease:
                lease.write("W", given)
                kept.append(lease.infer()["W_OUT"])
        assert [each.tolist() for each in kept] == [[b"one"], [b"two"]]
        # A copy pins nothing.
        assert session.stats().free == 1


def test_bytes_have_no_view(desk: Desk) -> None:
    with desk.lease() as lease:
        with pytest.raises(UsageError, match="'W' is BYTES") as caught:
            lease["W"]
        assert "lease.write('W', array)" in caught.value.hint
        with pytest.raises(UsageError, match="'W' is BYTES"):
            lease.view("W", (2,))
        with pytest.raises(InputMissing):
            lease.infer()
        lease.write("W", ["a", "bc"])
        with pytest.raises(UsageError, match="'W' is BYTES"):
            lease["W"]
        lease.infer(output("N", (2,), datatype="INT32"))
    (told,) = desk.request["inputs"]
    assert told["shape"] == [2]
    assert told["parameters"]["shared_memory_byte_size"] == 4 + 1 + 4 + 2


@pytest.mark.parametrize(
    "given", [[1, 2], ["a", 3], [["a", "b"]], np.zeros(2), None, [b"x", None]]
)
def test_what_is_no_bytes_is_refused_and_not_sent(desk: Desk, given: Any) -> None:
    with desk.lease() as lease:
        lease.write("W", ["before"])
        with pytest.raises(TensorMismatch, match="'W'"):
            lease.write("W", given)
        with pytest.raises(InputMissing):
            lease.infer()
        lease.write("W", ["after"])
        lease.infer(output("N", (1,), datatype="INT32"))


def test_longer_elements_than_ever_move_the_input(desk: Desk) -> None:
    with desk.lease() as lease:
        lease.write("W", [b"x" * PAGE_BYTES])
        lease.infer(output("N", (1,), datatype="INT32"))
    w = desk.slot.inputs["W"]
    (told,) = desk.request["inputs"]
    assert told["parameters"]["shared_memory_region"] == w.registration.name
    assert told["parameters"]["shared_memory_byte_size"] == 4 + PAGE_BYTES
    assert desk.host.memory.growths == 1


def test_elements_are_written_anew_in_each_lease(desk: Desk) -> None:
    with desk.lease() as lease:
        lease.write("W", ["theirs"])
        lease.infer(output("N", (1,), datatype="INT32"))
    with desk.lease() as lease, pytest.raises(InputMissing, match="'W'"):
        lease.infer()


def test_ctrl_c_at_any_moment_of_writing_bytes_leaves_them_whole_or_not_given() -> None:
    def pressed_at(moment: int) -> CtrlC:
        desk = Desk(WORDS, shapes={"W": 64}, outputs={"N": (8,)})
        with desk.lease() as lease:
            lease.write("W", ["old"])
            press = CtrlC(lambda: lease.write("W", [b"x", b"yz"]), moment)
            w = desk.slot.inputs["W"]
            if lease._given:
                data = bytes(w.root[: w.nbytes])
                new = b"\1\0\0\0x\2\0\0\0yz"
                assert (w.shape, data) in (((1,), b"\3\0\0\0old"), ((2,), new))
        return press

    assert len(list(every(pressed_at))) > 5


# --- one number for one element -------------------------------------------------------


def test_one_number_fills_an_input_of_one_element() -> None:
    desk = Desk(ONE)
    with desk.lease() as lease:
        lease.write("X", 2.5)
        lease.write("OPEN", 7)
        lease.write("NONE", np.int64(9))
        assert lease["X"].tolist() == [2.5]
        assert lease["OPEN"].tolist() == [[7]]
        assert lease["NONE"].tolist() == 9
        for wrong in (1, np.int64(1)):
            with pytest.raises(TensorMismatch, match="'TWO' cannot have shape"):
                lease.write("TWO", wrong)


def test_one_number_goes_over_the_wire_too() -> None:
    one = FakeModel(
        "one",
        inputs={"X": ("INT64", (1,)), "E": ("INT64", ())},
        outputs={"Y": ("INT64", (1,))},
        run=lambda inputs: {"Y": inputs["X"] + inputs["E"]},
    )
    for memory in ("system", "wire"):
        with session_on(one, memory=memory) as (_, session):
            for given in (3, np.int64(3), np.array(3), [3]):
                assert session.infer({"X": given, "E": 4})["Y"].tolist() == [7]


# --- sizes of BYTES -------------------------------------------------------------------


@pytest.mark.parametrize("size", [(3,), [64], -1, 2.0, "64", None, True])
@pytest.mark.parametrize("which", ["shapes", "outputs"])
def test_a_size_of_bytes_is_one_number_of_bytes(which: str, size: Any) -> None:
    name = "W" if which == "shapes" else "W_OUT"
    with (
        pytest.raises(TensorMismatch, match=f"'{name}' is BYTES") as caught,
        session_on(words(), **{which: {name: size}}),
    ):
        pass
    assert repr(size) in str(caught.value)
    assert "as one number" in caught.value.hint


def test_a_number_is_no_shape() -> None:
    with (
        pytest.raises(TensorMismatch, match=r"'LENGTHS' cannot have shape"),
        session_on(words(), outputs={"LENGTHS": -5}),
    ):
        pass


def test_elements_fit_the_size_that_was_declared_for_them() -> None:
    with session_on(words(), shapes={"W": 3 * (4 + 5)}) as (_, session):
        session.infer({"W": ["12345"] * 3})
        assert session.stats().growths == 0
        session.infer({"W": ["12345"] * 4})
        assert session.stats().growths == 1


def test_elements_beyond_the_declared_size_are_told() -> None:
    with session_on(words(), outputs={"W_OUT": 10}) as (_, session):
        assert session.infer({"W": ["123456"]})["W_OUT"].tolist() == [b"123456"]
        with pytest.raises(InferFailed, match="'W_OUT' needs 11 bytes, its block has"):
            session.infer({"W": ["1234567"]})
