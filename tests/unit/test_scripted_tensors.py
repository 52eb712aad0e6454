"""What the scripted server knows of tensors: BF16, classes, parameters, the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shmlane import InferFailed, RequestOptions
from shmlane.datatypes import DTYPES, bfloat16_bits
from shmlane.testing import FakeModel, FakeTensor, ScriptedServer
from tests.raw_http import RawReply, ask
from tests.sessions import Array
from tests.unit.asked import scores, session_on

DATATYPES = [*DTYPES, "BYTES"]
NUMBERS = [0, 1, 1, 0, 1]


def identity(datatype: str, *, max_batch_size: int = 0) -> FakeModel:
    return FakeModel(
        "same",
        inputs={"X": (datatype, (-1,))},
        outputs={"Y": (datatype, (-1,))},
        run=lambda inputs: {"Y": inputs["X"]},
        max_batch_size=max_batch_size,
    )


def values(datatype: str) -> Array:
    if datatype == "BYTES":
        return np.array([b"one", b"", b"\0"], object)
    if datatype == "BF16":
        return bfloat16_bits(NUMBERS).view(DTYPES["BF16"])
    return np.array(NUMBERS, DTYPES[datatype])


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_every_datatype_goes_through_a_fake_model(datatype: str, memory: str) -> None:
    sent = values(datatype)
    with session_on(identity(datatype), memory=memory, rerun=True) as (_, session):
        for _ in range(3):
            came = session.infer({"X": sent})["Y"]
            assert came.dtype == sent.dtype
            assert came.tolist() == sent.tolist()
        assert session.infer({"X": sent[:0]})["Y"].shape == (0,)


def test_a_fake_model_may_give_bf16_as_bit_patterns() -> None:
    patterns = bfloat16_bits([1.5, -2])
    model = FakeModel(
        "m",
        inputs={"X": ("INT8", (1,))},
        outputs={"Y": ("BF16", (2,)), "BITS": ("UINT16", (2,))},
        run=lambda inputs: {"Y": patterns, "BITS": patterns},
    )
    for memory in ("system", "wire"):
        with session_on(model, memory=memory) as (_, session):
            came = session.infer({"X": np.zeros(1, np.int8)})
            assert came["Y"].view(np.uint16).tolist() == patterns.tolist()
            assert came["BITS"].tolist() == patterns.tolist()
            assert came["BITS"].dtype == np.uint16


def test_bit_patterns_are_no_other_datatype() -> None:
    model = FakeModel(
        "m",
        inputs={"X": ("INT8", (1,))},
        outputs={"Y": ("FP16", (2,))},
        run=lambda inputs: {"Y": np.zeros(2, np.uint16)},
    )
    with (
        session_on(model) as (_, session),
        pytest.raises(InferFailed, match=r"UINT16 .* declares FP16"),
    ):
        session.infer({"X": np.zeros(1, np.int8)})


def infer_as_json(server: ScriptedServer, tensor: Mapping[str, Any]) -> RawReply:
    """What the server makes of an input whose data is text."""
    body = json.dumps({"inputs": [{"name": "X", **tensor}]}).encode()
    head = f"POST /v2/models/same/infer HTTP/1.1\r\nContent-Length: {len(body)}"
    return ask(server.url, head.encode() + b"\r\n\r\n" + body)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_numbers_are_no_text(datatype: str) -> None:
    tensor = {"datatype": datatype, "shape": [1], "data": [1.0]}
    with ScriptedServer([identity(datatype)]) as server:
        reply = infer_as_json(server, tensor)
        assert reply.status == 400
        assert f"receiving {datatype} data via JSON is not supported" in reply.error
        reply = infer_as_json(server, tensor | {"shape": [0], "data": []})
        assert f"sending {datatype} data via JSON is not supported" in reply.error


def test_classes_are_those_of_each_item() -> None:
    rows = np.array([[1, 5, -2, 5], [4, 3, 2, 1]], np.float32)
    with session_on(scores()) as (_, session):
        for classes, count in ((1, 1), (3, 3), (9, 4)):
            wanted = RequestOptions(classification={"Y": classes})
            came = session.infer({"X": rows}, options=wanted)["Y"]
            best = [b"5.000000:1", b"5.000000:3", b"1.000000:0", b"-2.000000:2"]
            assert came.shape == (2, count)
            assert came[0].tolist() == best[:count]
            assert came[1, 0] == b"4.000000:0"


def test_classes_of_whole_numbers_and_without_a_batch() -> None:
    with session_on(identity("INT32"), outputs={"Y": (8,)}) as (_, session):
        wanted = RequestOptions(classification={"Y": 2})
        sent = np.array([3, 9, 7], np.int32)
        assert session.infer({"X": sent}, options=wanted)["Y"].tolist() == [
            b"9:1",
            b"7:2",
        ]


def test_a_tensor_tells_its_dims() -> None:
    assert identity("BF16").inputs["X"] == FakeTensor("BF16", (-1,))
    config = identity("BF16").config()
    assert config["input"][0]["data_type"] == "TYPE_BF16"
