"""One inference: what is asked, what a reply means, and what is never believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlane.errors import ProtocolError
from shmlane.exchange import Answer, Exchange, Verdict
from shmlane.metadata import ModelMetadata, TensorSpec
from shmlane.slots import Slot
from shmlane.tensors import Tensor
from tests.unit.interleaving import CtrlC, every
from tests.unit.scripted import (
    FIRST_ID,
    OPEN,
    PLAIN,
    REQUESTS,
    ROWS,
    Request,
    answered,
    memory,
    model,
    output,
    parsed,
    request_id,
    success,
)

pytestmark = pytest.mark.usefixtures("counted_ids")

FULL = output("Y", (1, 4))
X, MARK = 1, 2


def open_slot(x: int = 8, y: int = 8) -> tuple[Exchange, Slot]:
    """A prepared slot of a model whose caller says how much goes in and out."""
    return prepared_slot(OPEN, shapes={"X": (x,)}, outputs={"Y": (y,)})


def prepared_slot(
    metadata: ModelMetadata = PLAIN, bits: int = X, **plan: Any
) -> tuple[Exchange, Slot]:
    exchange = Exchange(REQUESTS, metadata)
    (slot,) = memory(metadata, **plan).make_slots(1)
    exchange.prepare(slot, bits)
    return exchange, slot


def is_held(slot: Slot) -> bool:
    """Whether the server holds the slot; the record in the region says the same."""
    assert slot.server_hold == bool(slot.record[0])
    return slot.server_hold


def accept(exchange: Exchange, slot: Slot, data: bytes) -> Answer | Verdict:
    return exchange.accept(slot, parsed(data), data)


def request_id_of(slot: Slot) -> str:
    assert slot.prepared is not None
    return slot.sent_id


# --- what is asked --------------------------------------------------------------------


def asked(exchange: Exchange, slot: Slot) -> Mapping[str, Any]:
    request = Request.read(exchange.begin(slot))
    exchange.withdraw(slot)
    assert request.line == "POST /v2/models/m/infer"
    body: Mapping[str, Any] = request.body
    return body


def place(tensor: Tensor, nbytes: int) -> Mapping[str, object]:
    return {
        "shared_memory_region": tensor.registration.name,
        "shared_memory_offset": tensor.offset,
        "shared_memory_byte_size": nbytes,
    }


def test_a_request_says_where_each_tensor_lies() -> None:
    exchange, slot = prepared_slot()
    (x,), (y,) = slot.inputs.values(), slot.outputs.values()
    body = asked(exchange, slot)
    assert body["inputs"] == [
        {"name": "X", "shape": [1, 4], "datatype": "FP32", "parameters": place(x, 16)}
    ]
    assert body["outputs"] == [{"name": "Y", "parameters": place(y, 16)}]


@pytest.mark.parametrize("often", [1, 3, 63, 64, 65, 1000])
def test_no_id_comes_twice_however_often_requests_are_built_anew(often: int) -> None:
    exchange, slot = prepared_slot()
    ids = []
    for number in range(500):
        ids.append(asked(exchange, slot)["id"])
        assert ids[-1] == slot.sent_id
        if number % often == often - 1:
            exchange.prepare(slot, X)
    assert len(set(ids)) == 500
    assert {len(each) for each in ids} == {len(FIRST_ID)}


def test_a_reply_is_known_again_however_many_came_since() -> None:
    exchange, slot = prepared_slot()
    assert isinstance(answered(exchange, slot, FULL), Answer)
    for _ in range(500):
        name = request_id(exchange.begin(slot))
        assert exchange.matches(slot, success(name, FULL)) is not None


def test_ctrl_c_at_any_moment_of_a_begin_leaves_ids_that_are_told_apart() -> None:
    exchange, slot = prepared_slot()
    for number in range(62):
        assert isinstance(answered(exchange, slot, FULL), Answer), number

    def begin() -> None:
        # The last turn of one series, and the first of the next.
        for _ in range(2):
            exchange.begin(slot)

    seen = set()
    for _ in every(lambda moment: CtrlC(begin, moment)):
        exchange.withdraw(slot)
        while slot.turn != 62:
            name = request_id(exchange.begin(slot))
            assert name == slot.sent_id
            assert name not in seen
            seen.add(name)
            data = success(name, FULL)
            if exchange.matches(slot, data) is None:
                assert isinstance(accept(exchange, slot, data), Answer)


def test_an_input_has_its_exact_size_and_an_output_its_whole_block() -> None:
    exchange, slot = open_slot(x=8, y=6)
    slot.reshape(slot.inputs["X"], (3,))
    exchange.prepare(slot, X)
    body = asked(exchange, slot)
    assert body["inputs"][0]["shape"] == [3]
    assert body["inputs"][0]["parameters"]["shared_memory_byte_size"] == 12
    assert body["outputs"][0]["parameters"]["shared_memory_byte_size"] == 24


def test_only_inputs_that_were_given_are_sent() -> None:
    exchange, slot = prepared_slot(ROWS, X)
    assert [each["name"] for each in asked(exchange, slot)["inputs"]] == ["X"]
    exchange.prepare(slot, X | MARK)
    assert [each["name"] for each in asked(exchange, slot)["inputs"]] == ["X", "MARK"]


def test_an_empty_input_is_sent_on_the_wire() -> None:
    exchange, slot = open_slot()
    slot.reshape(slot.inputs["X"], (0,))
    exchange.prepare(slot, X)
    assert asked(exchange, slot)["inputs"] == [
        {"name": "X", "shape": [0], "datatype": "FP32", "data": []}
    ]


def test_an_output_of_unknown_size_is_asked_for_on_the_wire() -> None:
    exchange, slot = prepared_slot(OPEN, shapes={"X": (8,)})
    assert asked(exchange, slot)["outputs"] == [
        {"name": "Y", "parameters": {"binary_data": True}}
    ]


@pytest.mark.parametrize("shape", [(1, 0), (2, 0, 3)])
def test_an_output_that_is_always_empty_is_asked_for_on_the_wire(
    shape: tuple[int, ...],
) -> None:
    empty = model(PLAIN.inputs.values(), [TensorSpec("Y", "FP32", shape)])
    exchange, slot = prepared_slot(empty)
    assert asked(exchange, slot)["outputs"][0]["parameters"] == {"binary_data": True}
    answer = answered(exchange, slot, output("Y", shape, wire=0))
    assert isinstance(answer, Answer)
    assert answer.wire["Y"].shape == shape


def test_an_output_that_grew_with_the_batch_needs_a_larger_block() -> None:
    exchange, slot = prepared_slot(ROWS, shapes={"X": (2, 3)})
    x, total = slot.inputs["X"], slot.outputs["SUM"]
    assert exchange.building.outgrown(slot, X) == []
    slot.reshape(x, (1, 3))
    assert exchange.building.outgrown(slot, X) == []
    # Eight rows have not been heard of: their sums need four times the block.
    x.shape = (8, 3)
    assert exchange.building.outgrown(slot, X) == [(total, 32)]
    exchange.prepare(slot, X)
    assert asked(exchange, slot)["outputs"][0]["parameters"] == {"binary_data": True}


def test_outputs_of_models_that_do_not_batch_never_outgrow_their_block() -> None:
    exchange, slot = open_slot()
    assert exchange.building.outgrown(slot, X) == []
    exchange, slot = prepared_slot()
    assert exchange.building.outgrown(slot, X) == []


def test_the_batch_is_that_of_the_inputs_given() -> None:
    exchange, slot = prepared_slot(ROWS, MARK, shapes={"X": (8, 3), "MARK": (8, 2)})
    slot.reshape(slot.inputs["MARK"], (2, 2))
    slot.outputs["SUM"].capacity = 8
    assert exchange.building.outgrown(slot, MARK) == []
    assert exchange.building.outgrown(slot, X) == [(slot.outputs["SUM"], 32)]


def test_a_model_without_dimensions_or_inputs_has_batches_of_one() -> None:
    scalar = model(
        [TensorSpec("X", "FP32", ())], [TensorSpec("Y", "FP32", (-1, 2), False, 4)]
    )
    exchange, slot = prepared_slot(scalar)
    slot.outputs["Y"].capacity = 0
    assert exchange.building.outgrown(slot, X) == [(slot.outputs["Y"], 8)]


# --- the hold -------------------------------------------------------------------------


def test_the_server_holds_a_slot_from_before_its_request_leaves() -> None:
    exchange, slot = prepared_slot()
    assert not is_held(slot)
    exchange.begin(slot)
    assert is_held(slot)


def test_a_request_that_did_not_leave_holds_nothing() -> None:
    exchange, slot = prepared_slot()
    exchange.begin(slot)
    exchange.withdraw(slot)
    assert not is_held(slot)


def test_a_success_frees_the_slot_and_tells_what_came() -> None:
    exchange, slot = prepared_slot()
    data = success(request_id(exchange.begin(slot)), FULL)
    answer = accept(exchange, slot, data)
    assert isinstance(answer, Answer)
    assert not is_held(slot)
    assert answer.reply.model_version == "1"
    assert answer.wire == {}


# --- replies known by their bytes -----------------------------------------------------


def test_a_success_is_known_again_byte_for_byte_but_for_its_id() -> None:
    exchange, slot = prepared_slot()
    data = success(request_id(exchange.begin(slot)), FULL)
    assert exchange.matches(slot, data) is None
    assert is_held(slot)
    answer = accept(exchange, slot, data)
    for _ in range(4):
        name = request_id(exchange.begin(slot))
        assert exchange.matches(slot, data) is None
        assert is_held(slot)
        assert exchange.matches(slot, success(name, FULL)) is answer
        assert not is_held(slot)


def test_a_reply_that_tells_its_id_twice_is_read_every_time() -> None:
    exchange, slot = prepared_slot()
    for _ in range(4):
        name = request_id(exchange.begin(slot))
        data = success(name, FULL, output(name, (1,)))
        assert exchange.matches(slot, data) is None
        assert isinstance(accept(exchange, slot, data), Answer)


@pytest.mark.parametrize("data", [b"", success(FIRST_ID, FULL)[:-1]])
def test_other_bytes_are_not_known(data: bytes) -> None:
    exchange, slot = prepared_slot()
    for _ in range(3):
        assert isinstance(answered(exchange, slot, FULL), Answer)
    exchange.begin(slot)
    assert exchange.matches(slot, data) is None
    assert is_held(slot)


@pytest.mark.parametrize("age", range(1, 9))
def test_no_earlier_reply_is_taken_for_that_to_the_next(age: int) -> None:
    exchange, slot = prepared_slot()
    ids = []
    for _ in range(8):
        assert isinstance(answered(exchange, slot, FULL), Answer)
        ids.append(request_id_of(slot))
    earlier = success(ids[-age], FULL)
    exchange.begin(slot)
    assert exchange.matches(slot, earlier) is None
    with pytest.raises(
        ProtocolError, match=f"belongs to another request: id '{ids[-age]}'"
    ):
        accept(exchange, slot, earlier)
    assert is_held(slot)


def test_a_reply_that_came_in_pieces_is_not_known_by_its_first() -> None:
    exchange, slot = prepared_slot()
    data = success(request_id(exchange.begin(slot)), FULL)
    exchange.accept(slot, parsed(data), data[:-20])
    for cut in (60, 80, -20):
        exchange.begin(slot)
        assert exchange.matches(slot, success(request_id_of(slot), FULL)[:cut]) is None
        assert is_held(slot)


def test_a_reply_that_ends_its_connection_is_read_every_time() -> None:
    exchange, slot = prepared_slot()
    for _ in range(4):
        data = success(request_id(exchange.begin(slot)), FULL, Connection="close")
        assert exchange.matches(slot, data) is None
        accept(exchange, slot, data)


def test_the_reply_to_requests_built_before_is_not_taken_for_a_new_one() -> None:
    exchange, slot = prepared_slot()
    for _ in range(4):
        assert isinstance(answered(exchange, slot, FULL), Answer)
        earlier = success(request_id_of(slot), FULL)
        exchange.prepare(slot, X)
        exchange.begin(slot)
        assert exchange.matches(slot, earlier) is None
        with pytest.raises(ProtocolError, match="belongs to another request"):
            accept(exchange, slot, earlier)
        exchange.withdraw(slot)


def test_a_reply_of_no_known_bytes_is_never_known() -> None:
    exchange, slot = prepared_slot()
    data = success(request_id(exchange.begin(slot)), FULL)
    exchange.accept(slot, parsed(data), b"")
    exchange.begin(slot)
    exchange.begin(slot)
    assert exchange.matches(slot, b"") is None
    assert exchange.matches(slot, data) is None


# --- shapes that change ---------------------------------------------------------------


def y_shape(slot: Slot) -> tuple[int, ...]:
    return tuple(slot.outputs["Y"].array.shape)


def test_each_reply_gives_its_output_the_shape_it_tells() -> None:
    exchange, slot = open_slot()
    shapes = [(8,), (3,), (3,), (5,), (0,), (8,), (8,), (8,), (1,), (8,)]
    for shape in shapes:
        assert isinstance(answered(exchange, slot, output("Y", shape)), Answer)
        assert y_shape(slot) == shape


def test_shapes_that_alternate_are_told_apart() -> None:
    exchange, slot = open_slot()
    for number in range(8):
        shape = (2,) if number % 2 else (7,)
        assert isinstance(answered(exchange, slot, output("Y", shape)), Answer)
        assert y_shape(slot) == shape


def test_a_shape_that_stays_is_known_and_one_that_changed_is_not() -> None:
    exchange, slot = open_slot()

    def is_known(shape: tuple[int, ...]) -> bool:
        data = success(request_id(exchange.begin(slot)), output("Y", shape))
        if exchange.matches(slot, data) is not None:
            return True
        accept(exchange, slot, data)
        return False

    shapes = [(8,), (8,), (8,), (4,), (8,), (8,), (8,)]
    known = [is_known(shape) for shape in shapes]
    assert known == [False, True, True, False, False, True, True]


@given(st.lists(st.integers(0, 8), max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_row_of_shapes_is_told_apart(sizes: list[int]) -> None:
    exchange, slot = open_slot()
    y = slot.outputs["Y"]
    for size in sizes:
        assert isinstance(answered(exchange, slot, output("Y", (size,))), Answer)
        assert y.array.shape == (size,)
        assert y.array.nbytes == 4 * size


def test_ctrl_c_at_any_moment_of_a_reply_leaves_no_reply_known_by_mistake() -> None:
    def pressed_at(moment: int) -> CtrlC:
        exchange, slot = open_slot()
        for _ in range(2):
            answered(exchange, slot, output("Y", (8,)))
        press = CtrlC(lambda: answered(exchange, slot, output("Y", (3,))), moment)
        for size in (8, 3, 8):
            answered(exchange, slot, output("Y", (size,)))
            assert y_shape(slot) == slot.outputs["Y"].shape == (size,)
        return press

    assert len(list(every(pressed_at))) > 20


def test_a_shape_of_another_rank_is_told_too() -> None:
    exchange, slot = open_slot()
    for shape in [(2, 4), (8,), (), (1, 1, 1)]:
        assert isinstance(answered(exchange, slot, output("Y", shape)), Answer)
        assert y_shape(slot) == shape


# --- outputs on the wire --------------------------------------------------------------


def test_outputs_on_the_wire_are_arrays_of_their_own() -> None:
    exchange, slot = prepared_slot(OPEN, shapes={"X": (8,)})
    for values in ([1.0, 2.0], [3.0], [4.0, 5.0, 6.0]):
        blob = np.array(values, np.float32).tobytes()
        told = output("Y", (len(values),), wire=len(blob))
        answer = answered(exchange, slot, told, blobs=blob)
        assert isinstance(answer, Answer)
        assert answer.wire["Y"].tolist() == values
        assert answer.wire["Y"].flags.writeable
        assert not is_held(slot)


def test_equal_replies_with_data_are_read_every_time() -> None:
    exchange, slot = prepared_slot(OPEN, shapes={"X": (8,)})
    told = output("Y", (1,), wire=4)
    answers = [answered(exchange, slot, told, blobs=b"\0\0\x80?") for _ in range(4)]
    arrays = [answer.wire["Y"] for answer in answers if isinstance(answer, Answer)]
    assert [array.tolist() for array in arrays] == [[1.0]] * 4
    arrays[0][0] = 7
    assert [array.tolist() for array in arrays[1:]] == [[1.0]] * 3


def test_an_empty_output_comes_on_the_wire() -> None:
    exchange, slot = prepared_slot(OPEN, shapes={"X": (8,)})
    answer = answered(exchange, slot, output("Y", (0,), wire=0))
    assert isinstance(answer, Answer)
    assert answer.wire["Y"].shape == (0,)


def test_data_may_come_although_its_place_was_shared_memory() -> None:
    exchange, slot = prepared_slot()
    blob = np.arange(4, dtype=np.float32).tobytes()
    answer = answered(exchange, slot, output("Y", (1, 4), wire=16), blobs=blob)
    assert isinstance(answer, Answer)
    assert answer.wire["Y"].tolist() == [[0, 1, 2, 3]]
