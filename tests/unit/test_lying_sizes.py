"""A server that tells sizes which cannot be true: an error, and the slot is free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmlane import InferFailed, ProtocolError, Session
from shmlane.testing import Answer, FakeModel, Status
from tests.polling import eventually
from tests.unit.asked import session_on

ONE = FakeModel(
    "one",
    inputs={"X": ("FP32", (1,))},
    outputs={"S": ("BYTES", (-1,)), "Y": ("FP32", (-1,))},
    run=lambda inputs: {"S": np.array([b"abc"], object), "Y": inputs["X"]},
)
DECLARED: dict[str, Any] = {"outputs": {"S": 100, "Y": (8,)}}

LIES: dict[str, str] = {
    "beyond 64 bits": f"[0,{1 << 70}]",
    "elements beyond 64 bits": f"[{1 << 70}]",
    "more dimensions than arrays have": f"[{','.join(['1'] * 70)}]",
    "no elements in many dimensions": f"[{','.join(['0'] * 70)}]",
    "a product beyond 64 bits": f"[0,{1 << 62},{1 << 62}]",
    "more than the block": "[5000]",
    "negative": "[-1]",
    "two negatives": "[-1,-1]",
    "fractions": "[1.5]",
    "true": "[true]",
    "text": '["1"]',
    "nothing": "null",
    "digits without end": f"[{'9' * 5000}]",
}


def with_shape(output: str, shape: str) -> Callable[[bytes], bytes]:
    """The true reply, with another shape of one output."""

    def twisted(reply: bytes) -> bytes:
        head, _, body = reply.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)inference-header-content-length: *(\d+)", head)
        size = int(length[1]) if length else len(body)
        text, blobs = body[:size].decode(), body[size:]
        told = re.compile(rf'("name":"{output}".*?"shape":)\[1\]')
        text, count = told.subn(rf"\g<1>{shape}", text, count=1)
        assert count == 1, text
        lengths = {
            rb"(?i)(\ncontent-length: *)\d+": len(text) + len(blobs),
            rb"(?i)(inference-header-content-length: *)\d+": len(text),
        }
        for pattern, value in lengths.items():
            head = re.sub(pattern, rb"\g<1>%d" % value, head)
        return head + b"\r\n\r\n" + text.encode() + blobs

    return twisted


def serves(session: Session) -> None:
    eventually(lambda: session.stats().free == 1, lambda: repr(session))
    for value in (1.0, 2.0, 3.0):
        came = session.infer({"X": [value]})
        assert (came["S"].tolist(), came["Y"].tolist()) == ([b"abc"], [value])
    stats = session.stats()
    assert (stats.free, stats.pinned, stats.reruns) == (1, 0, 0)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("output", ["S", "Y"])
@pytest.mark.parametrize("options", [DECLARED, {}, {"memory": "wire"}])
def test_a_shape_that_cannot_be_is_an_error_and_no_more(
    options: dict[str, Any], output: str, lie: str
) -> None:
    with session_on(ONE, **options) as (server, session):
        for before in range(3):
            # Where no reply is known yet, and where both are.
            for _ in range(before):
                session.infer({"X": [9.0]})
            server.script(Answer(with_shape(output, lie)))
            with pytest.raises((InferFailed, ProtocolError)):
                session.infer({"X": [9.0]})
            eventually(lambda: session.stats().free == 1, lambda: repr(session))
        serves(session)


TOO_SMALL = (
    "shared memory size specified with the request for output '{}' (4 bytes) should be"
    " at least {} bytes to hold the results"
)
SIZES = ["9" * 5000, "9" * 19, "1" + "0" * 17, str(1 << 62), str(1 << 50), "0", "-5"]


@pytest.mark.parametrize("nbytes", SIZES, ids=lambda size: size[:20])
@pytest.mark.parametrize("output", ["S", "Y", "nobody's", ""])
@pytest.mark.parametrize("rerun", [False, True])
def test_a_size_that_no_block_can_have_fails_one_call(
    rerun: bool, output: str, nbytes: str
) -> None:
    text = json.dumps({"error": TOO_SMALL.format(output, nbytes)})
    with session_on(ONE, rerun=rerun, **DECLARED) as (server, session):
        session.infer({"X": [9.0]})
        for _ in range(2):
            server.script(Status(400, text, model_runs=False))
            try:
                session.infer({"X": [9.0]})
            except InferFailed:
                continue
            # Run again, with room for what was told as far as there is any.
            assert rerun
        stats = session.stats()
        assert (stats.free, stats.slots) == (1, 1)
        assert session.infer({"X": [2.0]})["Y"].tolist() == [2.0]
