"""What may be written into an input: values arrive exactly, or an error says why."""

from __future__ import annotations

import array
import ctypes
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shmlane.datatypes import DTYPES, bfloat16_bits
from shmlane.errors import TensorMismatch
from shmlane.sources import as_array

MEBIBYTE = 1 << 20
NUMBERS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
FIXED = [name for name in DTYPES if name != "BF16"]
PAIRS = [(one, other) for one in FIXED for other in FIXED if one != other]
UINT16 = np.dtype(np.uint16)
INFINITY = 0x7F80


def taken(
    source: Any,
    datatype: str,
    *,
    cast: bool = False,
    dtype: np.dtype[Any] | None = None,
) -> Any:
    """The array that `source` is copied from."""
    dtype = DTYPES[datatype] if dtype is None else dtype
    return as_array(source, dtype, name="X", datatype=datatype, cast=cast)


def written(source: Any, datatype: str, **options: Any) -> Any:
    """What an input holds once `source` is written to it."""
    dtype = options.get("dtype") or DTYPES[datatype]
    copied = taken(source, datatype, **options)
    view = np.empty(copied.shape, dtype)
    np.copyto(view, copied, casting="unsafe")
    return view


def numbers(view: Any, datatype: str) -> Any:
    """What the input's memory means, where NumPy may have no type for it."""
    if datatype == "BF16":
        upper = view.view(np.uint16).astype(np.uint32)
        return np.left_shift(upper, 16, dtype=np.uint32).view(np.float32)
    return view


def refusal(source: Any, datatype: str, **options: Any) -> str:
    with pytest.raises(TensorMismatch) as caught:
        taken(source, datatype, **options)
    assert caught.value.context["tensor"] == "X"
    assert "'X'" in str(caught.value)
    return str(caught.value)


class WithInterface:
    """Something that is no array and says where its memory is, as PIL's images do."""

    def __init__(self, **interface: Any) -> None:
        self.__dict__.update(interface)


class WithDlpack:
    def __init__(self, values: Any, device: int = 1) -> None:
        self.values = values
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class WithArray:
    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values


class Unreadable:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("it is encrypted.")


# --- arrays ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        NUMBERS,
        NUMBERS.T,
        NUMBERS[::-1, :, ::-2],
        NUMBERS[:, 1],
        np.asfortranarray(NUMBERS),
        NUMBERS[0, 0, 0, ...],
        NUMBERS[:0],
        np.broadcast_to(np.float32(7), (3, 4)),
        NUMBERS.view(np.recarray),
    ],
)
def test_an_array_of_any_form_is_read_where_it_is(source: Any) -> None:
    copied = taken(source, "FP32")
    assert not copied.size or np.shares_memory(copied, source)
    np.testing.assert_array_equal(written(source, "FP32"), np.asarray(source))


@pytest.mark.parametrize("datatype", FIXED)
def test_an_array_of_the_inputs_datatype_is_itself(datatype: str) -> None:
    source = np.zeros((2, 3), DTYPES[datatype])
    assert taken(source, datatype) is source
    source.flags.writeable = False
    assert taken(source, datatype) is source


@pytest.mark.parametrize("datatype", FIXED)
def test_another_byte_order_has_the_same_values(datatype: str) -> None:
    source = np.array([[0, 1], [2, 3]]).astype(DTYPES[datatype].newbyteorder(">"))
    copied = taken(source, datatype)
    assert np.shares_memory(copied, source)
    np.testing.assert_array_equal(written(source, datatype), source)


@pytest.mark.parametrize(("datatype", "other"), PAIRS)
def test_another_datatype_needs_permission(datatype: str, other: str) -> None:
    source = np.array([0, 1], DTYPES[other])
    message = refusal(source, datatype)
    assert all(part in message for part in (datatype, str(source.dtype), "cast=True"))
    assert written(source, datatype, cast=True).tolist() == [0, 1]


@pytest.mark.parametrize(
    "source",
    [
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, object),
        np.array(["1"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, complex),
        np.float64(1),
        np.longdouble(1),
    ],
)
def test_a_datatype_that_no_tensor_has_is_refused(source: Any) -> None:
    assert str(source.dtype) in refusal(source, "FP32")


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_matrix_is_an_array_of_two_dimensions() -> None:
    source = np.matrix(np.eye(2, dtype=np.float32))
    copied = taken(source, "FP32")
    assert type(copied) is np.ndarray
    assert np.shares_memory(copied, source)


def test_a_masked_array_is_taken_where_nothing_is_masked() -> None:
    values = np.ma.MaskedArray(NUMBERS)
    assert np.shares_memory(taken(values, "FP32"), NUMBERS)
    values = np.ma.MaskedArray(NUMBERS, NUMBERS > 21)
    assert "2 masked" in refusal(values, "FP32", cast=True)
    assert written(values.filled(0), "FP32").max() == 21


@pytest.mark.parametrize("datatype", FIXED)
def test_a_numpy_scalar_keeps_its_datatype(datatype: str) -> None:
    one = DTYPES[datatype].type(1)
    assert written(one, datatype).tolist() == 1
    assert written(one, datatype).shape == ()


# --- other things with memory ---------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "datatype", "values"),
    [
        (b"ab", "UINT8", [97, 98]),
        (b"", "UINT8", []),
        (bytearray(b"ab"), "UINT8", [97, 98]),
        (memoryview(b"abcd")[::-2], "UINT8", [100, 98]),
        (NUMBERS[0].T.data, "FP32", NUMBERS[0].T.tolist()),
        (np.arange(3, dtype=">i4").data, "INT32", [0, 1, 2]),
        (array.array("d", [1.5, 2.5]), "FP64", [1.5, 2.5]),
        (array.array("h", [-1, 2]), "INT16", [-1, 2]),
        ((ctypes.c_float * 2)(1.5, 2.5), "FP32", [1.5, 2.5]),
        (WithArray(NUMBERS), "FP32", NUMBERS.tolist()),
        (WithDlpack(NUMBERS.T), "FP32", NUMBERS.T.tolist()),
        (WithDlpack(np.array(7)), "INT64", 7),
        (
            WithInterface(__array_interface__=NUMBERS.__array_interface__),
            "FP32",
            NUMBERS.tolist(),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_shows_its_memory_is_read_there(
    source: Any, datatype: str, values: Any
) -> None:
    copied = taken(source, datatype)
    assert copied.base is not None or type(source) is WithArray
    assert written(source, datatype).tolist() == values


@pytest.mark.parametrize(
    "source", [array.array("d"), memoryview(b"ab"), WithDlpack(NUMBERS.astype(float))]
)
def test_memory_of_another_datatype_is_refused_and_can_be_cast(source: Any) -> None:
    assert "cast=True" in refusal(source, "FP32")
    assert written(source, "FP32", cast=True).dtype == np.float32


@pytest.mark.parametrize(
    "source",
    [
        WithDlpack(NUMBERS, device=2),
        WithInterface(__cuda_array_interface__={}),
    ],
)
def test_memory_of_a_gpu_is_refused_with_a_hint(source: Any) -> None:
    message = refusal(source, "FP32", cast=True)
    assert "memory of a device" in message
    assert "cpu()" in message


def test_pinned_memory_is_read() -> None:
    copied = taken(WithDlpack(NUMBERS, device=3), "FP32")
    assert np.shares_memory(copied, NUMBERS)


def test_what_cannot_be_read_says_why() -> None:
    assert refusal(Unreadable(), "FP32", cast=True).endswith(": it is encrypted.")
    view = memoryview(b"abcd")
    view.release()
    assert "released" in refusal(view, "UINT8")


# --- lists and numbers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "datatype"),
    [
        (7, "INT8"),
        (7, "FP32"),
        (1.5, "FP16"),
        (1.5, "BF16"),
        (True, "BOOL"),
        ([True, False], "BOOL"),
        ([True, False], "INT32"),
        ([[1, 2], (3, 4)], "INT32"),
        (range(5), "INT64"),
        ([0.0, float("inf"), float("-inf")], "FP16"),
        ([-128, 127], "INT8"),
        ([0, 2**64 - 1], "UINT64"),
        ([2**63, 1], "UINT64"),
        ([-(2**63), 2**63 - 1], "INT64"),
        ([2**24, 2**25, -(2**100)], "FP32"),
        ([2**63, 1.5], "FP64"),
        ([256, 1.5, True], "BF16"),
        ([2**100, -256], "BF16"),
    ],
)
def test_python_numbers_that_fit_are_taken(source: Any, datatype: str) -> None:
    expected = np.asarray(source, object)
    view = written(source, datatype)
    assert view.shape == expected.shape
    assert (numbers(view, datatype).astype(object) == expected).all()


@pytest.mark.parametrize(("datatype"), list(DTYPES))
def test_an_empty_list_has_any_datatype(datatype: str) -> None:
    assert written([[], []], datatype).shape == (2, 0)


@pytest.mark.parametrize(
    ("source", "datatype", "told"),
    [
        ([[0, 1], [2, 300]], "INT8", "cannot hold 300 (element [1, 1])"),
        (-1, "UINT8", "cannot hold -1."),
        ([2**63, -1], "UINT64", "cannot hold -1 (element [1])"),
        ([2**64], "UINT64", "cannot hold 18446744073709551616"),
        ([2**63], "INT64", "cannot hold 9223372036854775808"),
        ([2**24 + 1], "FP32", "cannot hold 16777217"),
        ([2**53 + 1], "FP64", "cannot hold 9007199254740993"),
        ([257], "BF16", "cannot hold 257"),
        ([0.5, 1e39], "FP32", "cannot hold 1e+39 (element [1])"),
        ([65520.0], "FP16", "cannot hold 65520.0"),
        ([1e300], "BF16", "cannot hold 1e+300"),
        ([1.0], "INT32", "given was float64"),
        ([0, 1], "BOOL", "given was int64"),
        (1j, "FP32", "given was complex128"),
        ("7", "INT8", "given was str. Give an array"),
        ([b"7"], "INT8", "given was list. Give an array"),
        (None, "FP32", "given was None. Leave"),
        (b"1234", "FP32", "np.frombuffer(data, np.float32)"),
        ([1.0, None], "FP32", "None is among"),
        ({1: 2}, "FP32", "given was dict"),
        ([[1], [2, 3]], "FP32", "inhomogeneous"),
        ([10**400], "FP64", "too large"),
        ([WithDlpack(NUMBERS)], "FP32", "given was list"),
    ],
)
def test_python_numbers_that_do_not_fit_are_refused(
    source: Any, datatype: str, told: str
) -> None:
    message = refusal(source, datatype)
    assert told in message
    assert not message.endswith("..")


@pytest.mark.parametrize(
    ("source", "datatype", "values"),
    [
        ([1.9, -1.9], "INT32", [1, -1]),
        ([0, 2], "BOOL", [False, True]),
        ([2**24 + 1], "FP32", [2**24]),
        (["1.5"], "FP32", [1.5]),
        ([257], "BF16", [256]),
        ("1.5", "BF16", 1.5),
    ],
)
def test_permission_is_for_any_conversion(
    source: Any, datatype: str, values: Any
) -> None:
    view = written(source, datatype, cast=True)
    assert numbers(view, datatype).tolist() == values


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "UINT64"])
@pytest.mark.parametrize("source", [["x"], {1: 2}, [10**400], None, [[1, None]]])
def test_permission_makes_no_number_of_what_is_none(source: Any, datatype: str) -> None:
    refusal(source, datatype, cast=True)


@given(st.data())
def test_any_numbers_in_a_list_arrive_exactly(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(FIXED))
    shapes = hnp.array_shapes(min_dims=0, min_side=0, max_side=3)
    source = data.draw(hnp.arrays(DTYPES[datatype], shapes))
    view = written(source.tolist(), datatype)
    np.testing.assert_array_equal(view.reshape(source.shape), source)


# --- bfloat16 -------------------------------------------------------------------------


@pytest.fixture(params=["uint16", "ml_dtypes"])
def bfloat16(request: pytest.FixtureRequest) -> np.dtype[Any]:
    """The NumPy type for BF16, without and with the package that has it."""
    if request.param == "ml_dtypes":
        pytest.importorskip("ml_dtypes")
        return DTYPES["BF16"]
    return UINT16


def bits(view: Any) -> Any:
    return view.view(np.uint16).tolist()


def test_uint16_is_bit_patterns_for_bfloat16(bfloat16: np.dtype[Any]) -> None:
    patterns = np.array([[0x3F80, 0x7FC0], [0x8000, 0xFF80]], np.uint16)
    for source in (patterns, patterns.astype(">u2"), patterns[:, ::-1][:, ::-1]):
        for cast in (False, True):
            view = written(source, "BF16", dtype=bfloat16, cast=cast)
            assert bits(view) == patterns.tolist()
    assert np.shares_memory(taken(patterns.T, "BF16", dtype=bfloat16), patterns)
    assert bits(written(np.uint16(0x3F80), "BF16", dtype=bfloat16)) == 0x3F80


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "f8", "i4", "u8", "?", "i2"])
def test_other_numbers_are_rounded_for_bfloat16_on_request(
    bfloat16: np.dtype[Any], dtype: str
) -> None:
    source = (np.arange(600).reshape(2, 300).T * 1.2345).astype(dtype)
    message = refusal(source, "BF16", dtype=bfloat16)
    assert "rounds to nearest" in message
    assert str(source.dtype) in message
    view = written(source, "BF16", dtype=bfloat16, cast=True)
    assert bits(view) == bfloat16_bits(source).tolist()


def test_wide_numbers_are_rounded_once_for_bfloat16(bfloat16: np.dtype[Any]) -> None:
    source = np.array([1 + 2**-8 + 2**-40])
    assert bits(written(source, "BF16", dtype=bfloat16, cast=True)) == [0x3F81]


def test_lists_are_rounded_for_bfloat16_as_for_other_floats(
    bfloat16: np.dtype[Any],
) -> None:
    view = written([[1.0, 0.1]], "BF16", dtype=bfloat16)
    assert bits(view) == [[0x3F80, 0x3DCD]]
    assert "257" in refusal([257], "BF16", dtype=bfloat16)
    assert bits(written([257], "BF16", dtype=bfloat16, cast=True)) == [0x4380]


def test_bfloat16_is_another_datatype_than_the_rest() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    source = np.array([1.5, -2], bfloat16)
    assert taken(source, "BF16") is source
    for datatype in ("UINT16", "FP16", "FP32"):
        assert "bfloat16" in refusal(source, datatype)
    assert written(source, "FP32", cast=True).tolist() == [1.5, -2]


# --- one pass -------------------------------------------------------------------------


@pytest.fixture
def frames() -> Any:
    """50 MiB, channels last."""
    return np.ones((1, 2048, 2048, 12 + 1), np.uint8)[..., :12]


def test_no_copy_is_made_in_between(frames: Any) -> None:
    source = frames.transpose(0, 3, 1, 2)
    view = np.empty(source.shape, np.uint8)
    tracemalloc.start()
    try:
        copied = taken(source, "UINT8")
        np.copyto(view, copied, casting="unsafe")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.nbytes > 45 * MEBIBYTE
    assert peak < MEBIBYTE
    assert view.min() == 1


@pytest.fixture
def other_threads_wait() -> Iterator[None]:
    """Nobody is made to let others run: they run where the interpreter is let go."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("other_threads_wait")
def test_other_threads_run_during_the_copy(frames: Any) -> None:
    source = taken(frames.transpose(0, 3, 1, 2), "UINT8")
    view = np.empty(source.shape, np.uint8)
    seen = SimpleNamespace(turns=0, over=False)

    def watch() -> None:
        while not seen.over:
            seen.turns += 1
            time.sleep(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        before = seen.turns
        np.copyto(view, source, casting="unsafe")
        during = seen.turns - before
    finally:
        seen.over = True
        watcher.join()
    assert during > 0


# --- PyTorch --------------------------------------------------------------------------


def test_tensors_of_pytorch_are_read_where_they_are() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    for source in (tensor, tensor.T, tensor.clone().requires_grad_(), tensor[:, 1]):
        copied = taken(source, "FP32")
        assert copied.ctypes.data == source.data_ptr()
        assert copied.tolist() == source.tolist()
    assert "float64" in refusal(tensor.double(), "FP32")
    assert "cast=True" in refusal(tensor.half(), "FP32")
    assert written([tensor[0], tensor[1]], "FP32").tolist() == tensor.tolist()


def test_tensors_of_pytorch_that_numpy_cannot_read_say_why() -> None:
    torch = pytest.importorskip("torch")
    assert "meta" in refusal(torch.ones(2, device="meta"), "FP32")
    assert "parse" in refusal(torch.ones(2).to_sparse(), "FP32")
    if torch.cuda.is_available():
        assert "cpu()" in refusal(torch.ones(2, device="cuda"), "FP32")


def test_bfloat16_of_pytorch_is_taken_with_its_bits(bfloat16: np.dtype[Any]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1.5, -0.0], [float("inf"), 2.0]], dtype=torch.bfloat16)
    for source in (tensor.T, tensor.T.clone().requires_grad_()):
        view = written(source, "BF16", dtype=bfloat16)
        assert bits(view) == [[0x3FC0, INFINITY], [0x8000, 0x4000]]
    assert taken(tensor, "BF16", dtype=bfloat16).ctypes.data == tensor.data_ptr()
    assert "torch.bfloat16" in refusal(tensor, "FP32")
    assert "torch.bfloat16" in refusal(tensor, "UINT16")
    assert written(tensor, "FP32", cast=True).tolist() == tensor.tolist()
