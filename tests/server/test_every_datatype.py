"""Every datatype in every size, through shared memory and over the wire."""

from __future__ import annotations

import numpy as np
import pytest

from shmlane import InferFailed, Session, TensorMismatch
from shmlane.server import TritonServer
from tests.sessions import Array, all_free
from tests.tensor_models import DATATYPES
from tests.tensor_values import SHAPES, STORED, assert_same, nbytes, tensor

pytestmark = pytest.mark.usefixtures("no_leftovers")

MEMORY = ("system", "wire")


def echo(session: Session, sent: Array) -> Array:
    return session.infer({"INPUT__0": sent})["OUTPUT__0"]


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("memory", MEMORY)
def test_every_datatype_and_size_comes_back_as_it_was(
    tensors_url: str, memory: str, datatype: str, size: str
) -> None:
    model = f"echo_{datatype.lower()}"
    with Session(tensors_url, model, memory=memory, slots=1) as session:
        # Nothing is known of the size, then something; nothing stays from the call
        # before.
        for turn in range(3):
            sent = tensor(datatype, SHAPES[size], seed=turn)
            assert_same(echo(session, sent), sent)
        stats = all_free(session)
        assert (stats.registrations == 0) == (memory == "wire")


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("memory", MEMORY)
def test_a_tensor_that_fits_what_was_declared_never_grows(
    tensors_url: str, memory: str, datatype: str
) -> None:
    largest = tensor(datatype, SHAPES["large"])
    size: tuple[int, ...] | int = (
        nbytes(largest) if datatype == "BYTES" else largest.shape
    )
    with Session(
        tensors_url,
        f"echo_{datatype.lower()}",
        memory=memory,
        slots=1,
        shapes={"INPUT__0": size},
        outputs={"OUTPUT__0": size},
    ) as session:
        for name in ("large", "one element", "empty", "odd size", "large"):
            sent = tensor(datatype, SHAPES[name], seed=name)
            with session.lease() as lease:
                lease.write("INPUT__0", sent)
                assert_same(lease.infer()["OUTPUT__0"].copy(), sent)
        assert all_free(session).growths == 0


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("memory", MEMORY)
def test_a_smaller_tensor_shows_nothing_of_a_larger_one(
    tensors_url: str, memory: str, datatype: str
) -> None:
    model = f"echo_{datatype.lower()}"
    with Session(tensors_url, model, memory=memory, slots=1) as session:
        for turn, elements in enumerate((400, 7, 0, 399, 1, 0, 2, 400, 3, 7)):
            sent = tensor(datatype, (1, elements, 1), seed=turn)
            with session.lease() as lease:
                lease.write("INPUT__0", sent)
                result = lease.infer()
                assert_same(result["OUTPUT__0"].copy(), sent)
                assert result.copy()["OUTPUT__0"].size == elements


@pytest.mark.parametrize("datatype", STORED)
@pytest.mark.parametrize("memory", MEMORY)
def test_an_input_can_be_filled_in_place(
    tensors_server: TritonServer, memory: str, datatype: str
) -> None:
    sent = tensor(datatype, (2, 3, 4))
    model = f"echo_{datatype.lower()}"
    with (
        Session(tensors_server.http_url, model, memory=memory) as session,
        session.lease() as lease,
    ):
        view = lease.view("INPUT__0", sent.shape)
        view.view(sent.dtype)[...] = sent
        result = lease.infer()
        assert_same(result["OUTPUT__0"], sent)
        # What is written into a result must not reach the next request.
        result["OUTPUT__0"].view(np.uint8)[...] = 0
        assert_same(lease.infer()["OUTPUT__0"], sent)
        del view


# --- BF16 -----------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY)
def test_floats_become_bfloat16_only_when_asked_to(
    tensors_server: TritonServer, memory: str
) -> None:
    numbers = np.array([[[1.0, -2.5, 3.140625, 1e38, 1 + 2**-8]]], np.float32)
    bits = np.array([[[0x3F80, 0xC020, 0x4049, 0x7E96, 0x3F80]]], np.uint16)
    with Session(tensors_server.http_url, "echo_bf16", memory=memory) as session:
        with pytest.raises(TensorMismatch, match=r"'INPUT__0'.*BF16.*cast=True"):
            echo(session, numbers)
        cast = session.infer({"INPUT__0": numbers}, cast=True)["OUTPUT__0"]
        assert cast.view(np.uint16).tolist() == bits.tolist()
        assert echo(session, bits).view(np.uint16).tolist() == bits.tolist()
        all_free(session)


# --- BYTES ----------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    "given",
    [
        [[["grün", "", "\0 in between"]]],
        [[[b"\0", b"", b"ends with \0\0"]]],
        np.array([[["a", "bc", "def"]]], np.object_),
        np.array([[[b"a", b"bc", b"def"]]]),
        np.array([[["strings", "of", "NumPy"]]]),
    ],
    ids=["list of str", "list of bytes", "objects", "S", "U"],
)
def test_texts_of_every_kind_arrive_as_bytes(
    tensors_server: TritonServer, memory: str, given: object
) -> None:
    texts = np.array(given, np.object_).ravel().tolist()
    expected = [each.encode() if isinstance(each, str) else each for each in texts]
    url = tensors_server.http_url
    with Session(url, "echo_bytes", memory=memory) as session:
        received = session.infer({"INPUT__0": given})["OUTPUT__0"]
    assert received.shape == (1, 1, 3)
    assert received.ravel().tolist() == expected


@pytest.mark.parametrize("memory", MEMORY)
def test_texts_as_long_as_their_input_says_come_whole(
    tensors_server: TritonServer, memory: str
) -> None:
    # The shape of the output follows from that of the input; its bytes do not.
    url = tensors_server.http_url
    with Session(url, "spelled", memory=memory, slots=1) as session:
        for lengths in ([1, 2, 3], [0, 0, 0], [9000, 0, 1], [1, 1, 1], [0, 20_000, 9]):
            inputs = {"LENGTHS": np.array(lengths, np.int32)}
            texts = session.infer(inputs)["TEXTS"].tolist()
            assert texts == [b"%d" % i * n for i, n in enumerate(lengths)]
        all_free(session)


def test_texts_beyond_what_was_declared_fail_and_the_slot_goes_on(
    tensors_server: TritonServer,
) -> None:
    def ask(length: int) -> list[bytes]:
        inputs = {"LENGTHS": np.array([length], np.int32)}
        texts: list[bytes] = session.infer(inputs)["TEXTS"].tolist()
        return texts

    url = tensors_server.http_url
    with Session(url, "spelled", slots=1, outputs={"TEXTS": 100}) as session:
        assert ask(96) == [b"0" * 96]
        with pytest.raises(InferFailed, match=r"'TEXTS'.* 101 .* 100"):
            ask(97)
        assert ask(3) == [b"000"]
        all_free(session)
