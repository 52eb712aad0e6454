"""What a complete reply says: whose it is, and the inference in it, or nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmlane.errors import ProtocolError
from shmlane.replies import HttpReply, InferReply

DEEP = b"[" * 200_000
JSON_LENGTH = "inference-header-content-length"


def reply(body: bytes, *, status: int = 200, **headers: str) -> HttpReply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpReply(status, named, bytearray(body), True)


def inference(answer: object, blobs: bytes | None = None) -> HttpReply:
    """A reply with this JSON and, where there are blobs, the binary extension."""
    text = json.dumps(answer).encode()
    if blobs is None:
        return reply(text)
    return HttpReply(200, {JSON_LENGTH: str(len(text))}, bytearray(text + blobs), True)


def output(name: str = "y", shape: object = (1, 2), **more: object) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": shape, **more}


def binary(nbytes: object, name: str = "y") -> dict[str, Any]:
    return output(name, parameters={"binary_data_size": nbytes})


def answer(*outputs: object, **more: object) -> dict[str, Any]:
    named = {"id": "1", "model_name": "m", "model_version": "7"}
    return {**named, "outputs": list(outputs), **more}


# --- whose reply it is ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":"no such model"}', "no such model"),
        (b'{"error":""}', ""),
        (b'{"error":"\xc3\xbc","more":1}', "ü"),
        (b'{"error":404}', None),
        (b'{"error":null}', None),
        (b'{"message":"x"}', None),
        (b'"error"', None),
        (b'["error"]', None),
        (b"7", None),
        (b"null", None),
        (b"", None),
        (b"<html><body>502 Bad Gateway</body></html>", None),
        (b'{"error":"\xff"}', None),
        (b'{"error":"cut', None),
        (DEEP, None),
        (b'{"error":' + DEEP, None),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_only_tritons_error_object_has_an_error_text(
    body: bytes, text: str | None
) -> None:
    assert reply(body, status=400).error_text == text


ERROR = b'{"error":"x"}'
HTML = b"<html><body>bad</body></html>"


@pytest.mark.parametrize("status", [200, 400, 403, 404, 405, 500, 501, 503])
def test_a_success_and_an_error_object_are_tritons(status: int) -> None:
    assert reply(ERROR, status=status).is_from_triton


@pytest.mark.parametrize("status", [408, 499, 502, 504])
@pytest.mark.parametrize("body", [ERROR, HTML, b"", b"{}"])
def test_statuses_of_gateways_are_not_tritons(status: int, body: bytes) -> None:
    assert not reply(body, status=status).is_from_triton


@pytest.mark.parametrize("status", [200, 400, 404, 500])
def test_what_came_via_something_is_not_tritons(status: int) -> None:
    assert not reply(ERROR, status=status, via="1.1 varnish").is_from_triton
    assert not reply(ERROR, status=status, via="").is_from_triton


@pytest.mark.parametrize("status", [201, 204, 302, 400, 403, 404, 429, 500, 503])
@pytest.mark.parametrize("body", [HTML, b"", b"{}", DEEP], ids=["html", "", "{}", "["])
def test_an_error_without_tritons_object_is_not_tritons(
    status: int, body: bytes
) -> None:
    assert not reply(body, status=status).is_from_triton


def test_json_of_a_reply_is_what_it_says() -> None:
    assert reply(b'[{"name":"m","state":"READY"}]').json() == [
        {"name": "m", "state": "READY"}
    ]


@pytest.mark.parametrize("body", [b"", HTML, b"{", b"\xff", b"{}{}", DEEP])
def test_a_reply_that_is_not_json_is_refused_with_its_beginning(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="status 200 is not JSON") as caught:
        reply(body).json()
    assert repr(body[:80]) in str(caught.value)


# --- the inference in it --------------------------------------------------------------

texts = st.text(max_size=6)
dims = st.lists(st.integers(0, 2**40), max_size=4)
Output = tuple[str, str, list[int], bytes | None]
outputs_sent: st.SearchStrategy[list[Output]] = st.lists(
    st.tuples(texts, texts, dims, st.none() | st.binary(max_size=9)),
    max_size=4,
    unique_by=lambda each: each[0],
)


@given(texts, texts, texts, outputs_sent, st.dictionaries(texts, st.integers()))
def test_an_inference_is_read_as_it_was_sent(
    request_id: str,
    model: str,
    version: str,
    sent: Sequence[Output],
    parameters: dict[str, int],
) -> None:
    outputs = []
    for name, datatype, shape, data in sent:
        size = {} if data is None else {"binary_data_size": len(data)}
        outputs.append(
            {"name": name, "datatype": datatype, "shape": shape, "parameters": size}
        )
    blobs = b"".join(data for *_, data in sent if data is not None)
    read = InferReply.parse(
        inference(
            {
                "id": request_id,
                "model_name": model,
                "model_version": version,
                "outputs": outputs,
                "parameters": parameters,
            },
            blobs,
        )
    )
    assert (read.request_id, read.model_name, read.model_version) == (
        request_id,
        model,
        version,
    )
    assert read.parameters == parameters
    assert [
        (each.name, each.datatype, list(each.shape), each.data and bytes(each.data))
        for each in read.outputs
    ] == [(*rest, data and bytes(data)) for *rest, data in sent]
    assert [each.data is None for each in read.outputs] == [
        data is None for *_, data in sent
    ]


def test_id_and_parameters_may_be_absent() -> None:
    short = {"model_name": "m", "model_version": "7", "outputs": []}
    read = InferReply.parse(inference(short))
    assert (read.request_id, read.outputs, read.parameters) == ("", (), {})


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_binary_data_is_a_view_and_no_copy(
    kind: type[bytearray | memoryview],
) -> None:
    whole = inference(answer(binary(4, "a"), output("b"), binary(2, "c")), b"abcdef")
    whole = replace(whole, body=kind(whole.body))
    first, second, third = InferReply.parse(whole).outputs
    assert first.data is not None
    assert third.data is not None
    assert second.data is None
    whole.body[-6:] = b"ABCDEF"
    assert (bytes(first.data), bytes(third.data)) == (b"ABCD", b"EF")


REFUSED: dict[str, HttpReply] = {
    "nothing": reply(b""),
    "HTML": reply(HTML),
    "cut JSON": reply(json.dumps(answer(output())).encode()[:-1]),
    "more behind the JSON": reply(json.dumps(answer(output())).encode() + b"x"),
    "not UTF-8": reply(b'{"id":"\xff"}'),
    "deep nesting": reply(DEEP),
    "deep parameters": reply(b'{"outputs":[],"parameters":{"a":' + DEEP),
    "a list": inference([answer()]),
    "a string": inference("outputs"),
    "null": inference(None),
    "an error object": inference({"error": "x"}),
    "no outputs": inference({"model_name": "m", "model_version": "7"}),
    "no model name": inference({"model_version": "7", "outputs": []}),
    "no model version": inference({"model_name": "m", "outputs": []}),
    "outputs null": inference(answer() | {"outputs": None}),
    "outputs a dict": inference(answer() | {"outputs": {}}),
    "outputs a string": inference(answer() | {"outputs": ""}),
    "output null": inference(answer(None)),
    "output a string": inference(answer("y")),
    "output a list": inference(answer([["name", "y"]])),
    "output without name": inference(answer({"datatype": "FP32", "shape": []})),
    "output without datatype": inference(answer({"name": "y", "shape": []})),
    "output without shape": inference(answer({"name": "y", "datatype": "FP32"})),
    "output as JSON text": inference(answer(output(data=[1.0, 2.0]))),
    "output as no text": inference(answer(output(data=None))),
    "output named twice": inference(answer(output("y"), output("y", [2]))),
    "shape a number": inference(answer(output(shape=2))),
    "shape a string": inference(answer(output(shape="12"))),
    "shape a dict": inference(answer(output(shape={"1": 2}))),
    "negative dimension": inference(answer(output(shape=[-1, 2]))),
    "two negative dimensions": inference(answer(output(shape=[-1, -2]))),
    "dimension 1.0": inference(answer(output(shape=[1.0]))),
    "dimension 1.5": inference(answer(output(shape=[1.5]))),
    "dimension true": inference(answer(output(shape=[True]))),
    "dimension a string": inference(answer(output(shape=["1"]))),
    "dimension null": inference(answer(output(shape=[None]))),
    "dimension infinite": inference(answer(output(shape=[float("inf")]))),
    "dimension not a number": inference(answer(output(shape=[float("nan")]))),
    "id a number": inference(answer(output(), id=1)),
    "name a number": inference(answer(output() | {"name": 1})),
    "datatype null": inference(answer(output() | {"datatype": None})),
    "model name null": inference(answer(output(), model_name=None)),
    "model version a number": inference(answer(output(), model_version=7)),
    "parameters a list": inference(answer(output(), parameters=[["a", 1]])),
    "parameters null": inference(answer(output(), parameters=None)),
    "output parameters a list": inference(answer(output(parameters=[]))),
    "output parameters a string": inference(answer(output(parameters="x"))),
    "size a string": inference(answer(binary("4")), b"abcd"),
    "size 4.0": inference(answer(binary(4.0)), b"abcd"),
    "size true": inference(answer(binary(True)), b"a"),
    "size null": inference(answer(binary(None)), b""),
    "size negative": inference(answer(binary(-1)), b""),
    "sizes that cancel out": inference(
        answer(binary(6, "a"), binary(-2, "b")), b"abcd"
    ),
    "size infinite": inference(answer(binary(float("inf"))), b"abcd"),
    "size too large": inference(answer(binary(5)), b"abcd"),
    "second size too large": inference(answer(binary(3, "a"), binary(2, "b")), b"abcd"),
    "bytes of no output": inference(answer(binary(3)), b"abcd"),
    "bytes without binary output": inference(answer(output()), b"abcd"),
    "binary output without bytes": inference(answer(binary(4))),
}


@pytest.mark.parametrize("whole", REFUSED.values(), ids=REFUSED)
def test_a_success_that_is_no_inference_is_refused(whole: HttpReply) -> None:
    with pytest.raises(ProtocolError):
        InferReply.parse(whole)


@pytest.mark.parametrize(
    "length", ["", "-1", "+2", "2.0", "0x2", "two", "2, 2", "9999"]
)
def test_a_length_of_the_json_part_that_cannot_be_is_refused(length: str) -> None:
    body = json.dumps(answer(output())).encode()
    with pytest.raises(ProtocolError, match=re.escape(f"announces {length!r}")):
        InferReply.parse(reply(body, inference_header_content_length=length))


def test_a_refusal_names_the_output_and_its_bytes() -> None:
    with pytest.raises(ProtocolError, match="'b' announces 2 bytes, 1 are left"):
        InferReply.parse(inference(answer(binary(3, "a"), binary(2, "b")), b"abcd"))
    with pytest.raises(ProtocolError, match="1 bytes belong to no output"):
        InferReply.parse(inference(answer(binary(3, "a")), b"abcd"))
    with pytest.raises(ProtocolError, match="'y' comes twice"):
        InferReply.parse(inference(answer(output("y"), output("y"))))


# --- any JSON at any place ------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2)
    ),
    max_leaves=4,
)
PLACES: list[tuple[str | int, ...]] = [
    ("id",),
    ("model_name",),
    ("model_version",),
    ("parameters",),
    ("outputs",),
    ("outputs", 0),
    ("outputs", 0, "name"),
    ("outputs", 0, "datatype"),
    ("outputs", 0, "shape"),
    ("outputs", 0, "shape", 1),
    ("outputs", 0, "parameters"),
    ("outputs", 0, "parameters", "binary_data_size"),
]


def planted(place: Sequence[str | int], value: object) -> dict[str, Any]:
    whole = answer(binary(4) | {"shape": [1, 1]}, parameters={})
    target: Any = whole
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    return whole


@given(st.sampled_from(PLACES), json_values)
@example(("outputs", 0, "shape", 1), -1)
def test_odd_json_is_refused_or_read_for_what_it_is(
    place: Sequence[str | int], value: object
) -> None:
    sent = planted(place, value)
    try:
        read = InferReply.parse(inference(sent, b"abcd"))
    except ProtocolError:
        return
    assert [read.request_id, read.model_name, read.model_version] == [
        sent[name] for name in ("id", "model_name", "model_version")
    ]
    assert read.parameters == sent["parameters"]
    assert [
        {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
        for each in read.outputs
    ] == [
        {name: each[name] for name in ("name", "datatype", "shape")}
        for each in sent["outputs"]
    ]
    for each in read.outputs:
        assert all(type(dim) is int and dim >= 0 for dim in each.shape)


@given(json_values)
def test_any_json_ends_in_a_reply_or_a_refusal(value: object) -> None:
    with pytest.raises(ProtocolError):
        InferReply.parse(inference(value))
