"""BYTES tensors: what may be given, the bytes that it becomes, and the way back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shmlane.elements import Elements, count_bytes, decode
from shmlane.errors import ProtocolError, TensorMismatch

GUARD = 0xA5


def written(source: Any, *, cast: bool = False) -> tuple[bytes, tuple[int, ...]]:
    """What the input becomes in memory that is larger; behind it nothing changes."""
    elements = Elements.of(source, name="X", cast=cast)
    memory = bytearray([GUARD]) * (elements.nbytes + 16)
    elements.write_into(memoryview(memory))
    assert memory[elements.nbytes :] == bytes([GUARD]) * 16
    return bytes(memory[: elements.nbytes]), elements.shape


def serialized(*items: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def refusal(source: Any, *, cast: bool = False) -> str:
    with pytest.raises(TensorMismatch) as caught:
        Elements.of(source, name="X", cast=cast)
    assert caught.value.context["tensor"] == "X"
    assert "'X'" in str(caught.value)
    return str(caught.value)


# --- what may be given ----------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "naïve",
        "naïve".encode(),
        bytearray("naïve".encode()),
        memoryview("naïve".encode()),
        np.str_("naïve"),
        np.bytes_("naïve".encode()),
        np.array("naïve"),
        np.array("naïve".encode()),
        np.array("naïve", object),
        np.frombuffer("naïve".encode(), np.int8).data,
    ],
    ids=lambda source: type(source).__name__,
)
def test_one_element_needs_no_list(source: Any) -> None:
    assert written(source) == (serialized("naïve".encode()), ())


@pytest.mark.parametrize(
    "source",
    [
        [["a", b"bc", ""], (bytearray(b"d"), memoryview(b"ef"), np.str_("g"))],
        np.array([["a", b"bc", ""], ["d", b"ef", "g"]], object),
        np.array([["a", "bc", ""], ["d", "ef", "g"]]),
        np.array([[b"a", b"bc", b""], [b"d", b"ef", b"g"]]),
        np.array([["a", "d"], ["bc", "ef"], ["", "g"]]).T,
        np.array([["a", "bc", ""], ["d", "ef", "g"]], dtype=">U2", order="F"),
        np.array([["", "bc", "a"], ["g", "ef", "d"]], object)[:, ::-1],
        np.ma.MaskedArray([["a", "bc", ""], ["d", "ef", "g"]]),
    ],
)
def test_elements_lie_in_c_order_whatever_they_were_given_as(source: Any) -> None:
    items = serialized(b"a", b"bc", b"", b"d", b"ef", b"g")
    assert written(source) == (items, (2, 3))


def test_numpy_strings_of_variable_width_are_taken() -> None:
    dtypes = pytest.importorskip("numpy.dtypes")
    if not hasattr(dtypes, "StringDType"):
        pytest.skip("this NumPy has no such strings")
    source = np.array(["a\0", "", "long " * 20], dtype=dtypes.StringDType())
    assert written(source)[0] == serialized(b"a\0", b"", b"long " * 20)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ([], (0,)),
        ([[], []], (2, 0)),
        ([[]], (1, 0)),
        (np.empty((3, 0), object), (3, 0)),
        (np.empty((0, 2), "S5"), (0, 2)),
        (np.empty((0,), "U5"), (0,)),
    ],
)
def test_no_element_is_no_byte(source: Any, shape: tuple[int, ...]) -> None:
    assert written(source) == (b"", shape)


@pytest.mark.parametrize(
    "array",
    [
        np.array([[b"ab", b"cd", b"ef"], [b"gh", b"ij", b"kl"]]),
        np.array([[b"ab", b"gh"], [b"cd", b"ij"], [b"ef", b"kl"]]).T,
        np.array([[b"ef", b"cd", b"ab"], [b"kl", b"ij", b"gh"]])[:, ::-1],
    ],
)
def test_elements_of_one_length_are_written_at_once(array: Any) -> None:
    items = serialized(b"ab", b"cd", b"ef", b"gh", b"ij", b"kl")
    assert written(array) == (items, (2, 3))


def test_a_view_that_is_not_contiguous_is_one_element() -> None:
    assert written([memoryview(b"abcdef")[::2]])[0] == serialized(b"ace")
    assert written([memoryview(b"")])[0] == serialized(b"")
    assert written(np.arange(3, dtype="<u2").data)[0] == serialized(b"\0\0\1\0\2\0")


def test_a_bytearray_cannot_change_its_length_before_it_is_written() -> None:
    item = bytearray(b"abc")
    elements = Elements.of([item], name="X")
    with pytest.raises(BufferError):
        item.append(0)
    assert repr(elements) == "<Elements [1] of 7 bytes>"


# --- byte-exact -----------------------------------------------------------------------


@given(st.lists(st.binary() | st.text(), max_size=20))
def test_every_byte_comes_back(items: list[bytes | str]) -> None:
    raw = [item.encode() if isinstance(item, str) else item for item in items]
    data, shape = written(items)
    assert data == serialized(*raw)
    array = decode(memoryview(data), shape)
    assert array.dtype == object
    assert array.tolist() == raw
    assert count_bytes(memoryview(data), len(items)) == len(data)


@given(hnp.array_shapes(min_dims=0, min_side=0), st.randoms(use_true_random=False))
def test_every_shape_comes_back(shape: tuple[int, ...], random: Any) -> None:
    array = np.empty(shape, object)
    for index in np.ndindex(shape):
        array[index] = random.randbytes(random.randrange(4))
    data, given_shape = written(array)
    assert given_shape == shape
    back = decode(memoryview(data), shape)
    assert back.shape == shape
    assert back.tolist() == array.tolist()


def test_zeros_at_the_end_of_bytes_in_a_list_are_data() -> None:
    assert written([b"a\0", b"\0\0", b""])[0] == serialized(b"a\0", b"\0\0", b"")
    assert written(["a\0"])[0] == serialized(b"a\0")
    assert written(np.array([b"a\0", "b\0"], object))[0] == serialized(b"a\0", b"b\0")


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.array([b"a\0\0", b"bc"]), (b"a", b"bc")),
        (np.array(["a\0\0", "bc"]), (b"a", b"bc")),
        (np.array([b"\0"]), (b"",)),
        (np.array(b"ab", "S8"), (b"ab",)),
        (np.array(["é"], "U8"), ("é".encode(),)),
    ],
)
def test_zeros_that_numpy_hides_are_told_of(
    array: Any, shown: tuple[bytes, ...]
) -> None:
    message = refusal(array)
    assert str(array.dtype) in message
    assert "cast=True" in message
    assert written(array, cast=True)[0] == serialized(*shown)


def test_zeros_before_the_end_are_no_matter() -> None:
    assert written(np.array([b"\0a", b"b"]))[0] == serialized(b"\0a", b"b")
    assert written(np.array(["\0a", "b"]))[0] == serialized(b"\0a", b"b")


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "given was NoneType"),
        (7, "given was int"),
        ({"a": 1}, "given was dict"),
        (np.zeros(3), "given was float64"),
        (np.zeros(3, "V4"), "given was |V4"),
        (["a", 7], "element [1] is of type int"),
        ([["a", "b"], ["c", None]], "element [1, 1] is of type NoneType"),
        (np.array(["a", 1.5], object), "element [1] is of type float"),
        (np.array(None, object), "it is of type NoneType"),
        ([["a"], "b"], "element [1] is of type str, not a list"),
        (["a", ["b"]], "element [1] is of type list"),
        ([[["a", "b"]], [["c"]]], "element [1, 0] is a list of 1"),
        ([["a"], []], "element [1] is a list of 0"),
        ([np.array(["a"])], "element [0] is of type ndarray"),
        (["a", "\ud800"], "element [1] has no UTF-8 form"),
        (
            np.ma.MaskedArray(["a", "b"], [False, True]),
            "element [1] is of type NoneType",
        ),
    ],
)
def test_what_is_no_string_is_named_with_its_place(source: Any, told: str) -> None:
    assert told in refusal(source, cast=True)


def test_a_list_that_contains_itself_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "64 dimensions" in refusal(endless)


def test_an_element_whose_length_has_no_uint32_is_refused() -> None:
    # 4 GiB that lie in one byte.
    huge = np.broadcast_to(np.uint8(0), 1 << 32).data
    message = refusal([b"", huge])
    assert "element [1] has 4294967296 bytes" in message
    assert "4294967295" in message


def test_memory_that_is_too_small_is_left_within_its_bounds() -> None:
    for source in (["ab", "c"], np.array(["ab", "cd"], "S2")):
        elements = Elements.of(source, name="X")
        memory = bytearray(elements.nbytes - 1)
        with pytest.raises(ValueError, match=r"."):
            elements.write_into(memoryview(memory))


# --- what a server sends --------------------------------------------------------------


def test_what_follows_the_elements_is_left_alone() -> None:
    view = memoryview(serialized(b"ab", b"") + b"\xff" * 9)
    assert decode(view, (2, 1)).tolist() == [[b"ab"], [b""]]
    assert decode(view, ()).item() == b"ab"
    assert decode(view, (0, 5)).shape == (0, 5)
    assert count_bytes(view, 2) == 10
    assert count_bytes(view, 0) == 0


def test_decoded_elements_are_copies() -> None:
    memory = bytearray(serialized(b"ab"))
    array = decode(memoryview(memory), (1,))
    memory[:] = bytes(len(memory))
    assert array[0] == b"ab"


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"", 1),
        (b"\x01\0\0", 1),
        (serialized(b"abc")[:-1], 1),
        (serialized(b"abc", b"d")[:-2], 2),
        (serialized(b"abc"), 2),
        (b"\xff\xff\xff\xff" + b"abcd", 1),
        (serialized(b"abcdefgh") + b"\0\0\0", 2),
        (serialized(b"a"), 10**15),
    ],
)
def test_a_length_that_leads_out_of_memory_is_refused(data: bytes, count: int) -> None:
    with pytest.raises(ProtocolError, match=f"{count} elements has only {len(data)}"):
        decode(memoryview(data), (count,))
    with pytest.raises(ProtocolError, match=f"{count} elements has only {len(data)}"):
        count_bytes(memoryview(data), count)
