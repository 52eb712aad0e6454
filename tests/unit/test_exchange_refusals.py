"""Replies that are no success: what each means for the caller and for the slot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmlane.errors import (
    AccessRestricted,
    InferFailed,
    ModelNotReady,
    ProtocolError,
    RequestLost,
    ServerError,
    SharedMemoryDisabled,
    ShmlaneError,
)
from shmlane.exchange import Answer, Exchange, Verdict
from shmlane.metadata import ModelMetadata, TensorSpec
from shmlane.slots import Slot
from tests.unit.scripted import (
    FIRST_ID,
    OF_FIRST,
    OPEN,
    OTHER_ID,
    PLAIN,
    REQUESTS,
    ROWS,
    answered,
    error,
    http,
    memory,
    model,
    output,
    parsed,
    request_id,
    success,
)

pytestmark = pytest.mark.usefixtures("counted_ids")

FULL = output("Y", (1, 4))
TWO = model(
    PLAIN.inputs.values(),
    [TensorSpec("Y", "FP32", (-1,)), TensorSpec("Z", "INT32", (-1,))],
)
SIZES = {"outputs": {"Y": (4,), "Z": (4,)}}


def prepared_slot(
    metadata: ModelMetadata = PLAIN, **plan: Any
) -> tuple[Exchange, Slot]:
    exchange = Exchange(REQUESTS, metadata)
    (slot,) = memory(metadata, **plan).make_slots(1)
    exchange.prepare(slot, 1)
    return exchange, slot


def is_held(slot: Slot) -> bool:
    """Whether the server holds the slot; the record in the region says the same."""
    assert slot.server_hold == bool(slot.record[0])
    return slot.server_hold


def refused(data: bytes) -> tuple[Slot, ShmlaneError]:
    """What a reply does to a slot that waits for it."""
    exchange, slot = prepared_slot()
    exchange.begin(slot)
    with pytest.raises(ShmlaneError) as caught:
        exchange.accept(slot, parsed(data), data)
    assert exchange.matches(slot, data) is None
    return slot, caught.value


def misfit(told: dict[str, Any], *, blobs: bytes = b"") -> InferFailed:
    """The error for an output that cannot be believed."""
    exchange, slot = prepared_slot()
    with pytest.raises(InferFailed) as caught:
        answered(exchange, slot, told, blobs=blobs)
    # The request is over; only what it tells of the output is worth nothing.
    assert not is_held(slot)
    return caught.value


# --- Triton's errors ------------------------------------------------------------------


def test_a_failure_of_the_model_frees_the_slot() -> None:
    slot, failure = refused(error(500, f"{OF_FIRST} the model broke."))
    assert type(failure) is InferFailed
    assert str(failure) == "inference on 'm' failed: the model broke."
    assert failure.context == {"status": 500, "text": "the model broke"}
    assert not is_held(slot)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (404, "Request for unknown model: 'm' is not found", ModelNotReady),
        (
            400,
            f"{OF_FIRST} model 'm', version 1 is not ready",
            ModelNotReady,
        ),
        (503, "Exceeds maximum queue size", InferFailed),
        (
            400,
            f"{OF_FIRST} input byte size mismatch for input 'X'",
            InferFailed,
        ),
        (403, "This API is restricted, expecting header 'K'", AccessRestricted),
        (501, "Client shared memory is disabled. Start it", SharedMemoryDisabled),
    ],
)
def test_errors_are_told_by_status_and_text(
    status: int, text: str, kind: type[ServerError]
) -> None:
    slot, failure = refused(error(status, text))
    assert type(failure) is kind
    assert failure.context["status"] == status
    assert not is_held(slot)


def test_a_model_that_is_not_ready_may_be_asked_again() -> None:
    _, failure = refused(error(404, "Request for unknown model: 'm' is not found"))
    assert failure.retryable
    assert str(failure) == (
        "the server cannot run model 'm' now: Request for unknown model: 'm' is not"
        " found."
    )


def test_a_block_that_is_too_small_is_named_with_both_sizes() -> None:
    slot, failure = refused(
        error(
            500,
            "shared memory size specified with the request for output 'Y' (16 bytes)"
            " should be at least 768 bytes to hold the results",
        )
    )
    assert type(failure) is InferFailed
    sizes = {name: failure.context[name] for name in ("output", "needed", "given")}
    assert sizes == {"output": "Y", "needed": 768, "given": 16}
    assert "outputs={'Y': " in failure.hint
    assert not is_held(slot)


@pytest.mark.parametrize("prefix", ["", f"{OF_FIRST} "])
def test_a_region_that_the_server_lost_is_registered_again(prefix: str) -> None:
    exchange, slot = prepared_slot()
    exchange.begin(slot)
    data = error(404, f"{prefix}Unable to find shared memory region: 'r'")
    verdict = exchange.accept(slot, parsed(data), data)
    assert verdict is Verdict.REGISTER_AGAIN
    assert not is_held(slot)


def test_a_lost_region_in_the_words_of_the_model_is_a_failure() -> None:
    _, failure = refused(error(500, "oops: Unable to find shared memory region: 'r'"))
    assert type(failure) is InferFailed


@pytest.mark.parametrize(
    "text",
    [
        f"[request id: {OTHER_ID}] the model broke",
        f"[request id: {OTHER_ID}] Unable to find shared memory region: 'r'",
    ],
)
def test_an_error_of_another_request_is_not_believed(text: str) -> None:
    slot, failure = refused(error(500, text))
    assert type(failure) is ProtocolError
    assert is_held(slot)


# --- replies of somebody else ---------------------------------------------------------


@pytest.mark.parametrize("status", [408, 499, 502, 504])
def test_what_gateways_answer_means_that_the_request_is_lost(status: int) -> None:
    slot, failure = refused(error(status, "upstream"))
    assert type(failure) is RequestLost
    assert f"status {status}" in str(failure)
    assert failure.retryable
    assert is_held(slot)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
@pytest.mark.parametrize(
    "body", ["<html>Bad</html>", "", "[]", '{"error": 5}', '{"detail": "no"}', "null"]
)
def test_another_body_than_tritons_means_that_the_request_is_lost(
    status: int, body: str
) -> None:
    slot, failure = refused(http(status, body))
    assert type(failure) is RequestLost
    assert is_held(slot)


@pytest.mark.parametrize(
    "data",
    [
        success(FIRST_ID, FULL, Via="1.1 varnish"),
        error(500, "the model broke", Via="1.1 varnish"),
        error(404, "Unable to find shared memory region: 'r'", Via="1.1 varnish"),
    ],
)
def test_whatever_came_by_a_proxy_means_that_the_request_is_lost(data: bytes) -> None:
    slot, failure = refused(data)
    assert type(failure) is RequestLost
    assert "Via: 1.1 varnish" in str(failure)
    assert is_held(slot)


@pytest.mark.parametrize(
    "data",
    [
        success(OTHER_ID, FULL),
        success("", FULL),
        success(FIRST_ID, FULL, name="other"),
        http(200, "<html>Welcome</html>"),
        http(200, json.dumps({"id": FIRST_ID, "model_name": "m"})),
        http(200),
    ],
)
def test_a_success_that_is_not_ours_is_not_believed(data: bytes) -> None:
    slot, failure = refused(data)
    assert type(failure) is ProtocolError
    assert is_held(slot)


# --- outputs that do not fit ----------------------------------------------------------


def test_an_output_that_is_missing_is_an_error() -> None:
    exchange, slot = prepared_slot(TWO, **SIZES)
    with pytest.raises(InferFailed, match=r"without output 'Z'.*sent: Y") as caught:
        answered(exchange, slot, output("Y", (4,)))
    assert caught.value.context["output"] == "Z"
    assert not is_held(slot)
    with pytest.raises(InferFailed, match="it sent: none"):
        answered(exchange, slot)


def test_an_output_of_another_type_is_an_error() -> None:
    failure = misfit(output("Y", (1, 4), datatype="INT32"))
    assert "came as INT32 (1, 4)" in str(failure)


@pytest.mark.parametrize("shape", [(5,), (2, 4), (1 << 62,), (1 << 70, 1 << 70)])
def test_an_output_larger_than_its_block_is_an_error(shape: tuple[int, ...]) -> None:
    failure = misfit(output("Y", shape))
    assert failure.context == {"output": "Y", "shape": shape}
    assert "that does not fit 16 bytes" in str(failure)


@pytest.mark.parametrize(
    "shape", [(0,) * 70, (1,) * 65, (0, 1 << 70), (0, 1 << 62, 1 << 62)]
)
def test_a_shape_that_no_array_can_have_is_an_error_every_time(
    shape: tuple[int, ...],
) -> None:
    exchange, slot = prepared_slot()
    for _ in range(3):
        with pytest.raises(InferFailed, match="no array can have that shape"):
            answered(exchange, slot, output("Y", shape))
        assert not is_held(slot)
    assert "no array" in str(misfit(output("Y", (0,) * 70, wire=0)))


@pytest.mark.parametrize("shape", [(3,), (5,), (0,)])
def test_data_of_another_size_than_its_shape_is_an_error(
    shape: tuple[int, ...],
) -> None:
    misfit(output("Y", shape, wire=16), blobs=bytes(16))


def test_an_output_asked_for_on_the_wire_must_come_there() -> None:
    exchange, slot = prepared_slot(OPEN, shapes={"X": (4,)})
    with pytest.raises(InferFailed, match="does not fit 0 bytes"):
        answered(exchange, slot, output("Y", (1,)))
    assert not is_held(slot)


def test_an_output_that_outgrew_its_block_must_come_on_the_wire() -> None:
    exchange, slot = prepared_slot(ROWS, shapes={"X": (2, 3)})
    slot.inputs["X"].shape = (8, 3)
    exchange.prepare(slot, 1)
    # It would fit what is left of the block, which this request did not name.
    with pytest.raises(InferFailed, match="does not fit 0 bytes"):
        answered(exchange, slot, output("SUM", (2, 1)))


def test_a_misfit_after_another_shape_leaves_no_reply_known() -> None:
    exchange, slot = prepared_slot(TWO, **SIZES)
    good = output("Y", (4,)), output("Z", (4,), datatype="INT32")
    for _ in range(2):
        answered(exchange, slot, *good)
    with pytest.raises(InferFailed):
        answered(exchange, slot, output("Y", (2,)), output("Z", (9,)))
    for _ in range(3):
        assert isinstance(answered(exchange, slot, *good), Answer)
        assert slot.outputs["Y"].array.shape == (4,)


def test_outputs_that_nobody_asked_for_are_left_alone() -> None:
    exchange, slot = prepared_slot()
    answer = answered(exchange, slot, FULL, output("EXTRA", (900,), datatype="BYTES"))
    assert isinstance(answer, Answer)
    assert answer.wire == {}


# --- anything at all ------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "shape", "error"]), inner)
    ),
    max_leaves=6,
)
NEARLY = st.fixed_dictionaries(
    {
        "id": st.sampled_from([OTHER_ID, FIRST_ID]),
        "model_name": st.just("m"),
        "model_version": st.just("1"),
        "outputs": st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["Y", "Z"]),
                    "datatype": st.sampled_from(["FP32", "INT32"]),
                    "shape": st.lists(st.integers(-2, 5), max_size=3) | ANYTHING,
                },
                optional={"parameters": ANYTHING},
            ),
            max_size=3,
        ),
    }
)


@given(status=st.sampled_from([200, 200, 400, 404, 500]), body=ANYTHING | NEARLY)
@settings(max_examples=300, deadline=None)
@example(
    status=200,
    body={
        "id": FIRST_ID,
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 4]}],
    },
)
def test_no_reply_gives_an_array_beyond_its_block_or_a_stray_error(
    status: int, body: object
) -> None:
    exchange, slot = prepared_slot()
    name = request_id(exchange.begin(slot))
    data = http(status, json.dumps(body))
    try:
        answer = exchange.accept(slot, parsed(data), data)
    except ShmlaneError:
        return
    if answer is not Verdict.REGISTER_AGAIN:
        assert isinstance(body, dict)
        assert body["id"] == name
        (told,) = [each for each in body["outputs"] if each["name"] == "Y"]
        assert list(slot.outputs["Y"].array.shape) == told["shape"]
        assert slot.outputs["Y"].array.nbytes <= 16
