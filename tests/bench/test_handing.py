"""The case `handoff`: two processes, and when the limit counts as held."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from typing import Any

import pytest

from shmlane.bench import PAYLOADS, Handoff, find_case, make_plan, measure_handoff
from shmlane.bench.handing import other_process
from shmlane.errors import ContenderFailed
from shmlane.server import TritonServer
from shmlane.testing import FakeModel, ScriptedServer

HELD = Handoff(
    payload="yolov8",
    rounds=3,
    requests=20,
    local_us=100.0,
    pipe_us=40.0,
    handoff_us=220.0,
    added_us=120.0,
    added_us_min=90.0,
    added_us_max=180.0,
    limit_us=150.0,
    verified=True,
)


@pytest.mark.usefixtures("no_leftovers")
def test_a_slot_is_sent_by_another_process(server: TritonServer) -> None:
    found = measure_handoff(server.http_url, PAYLOADS["resnet50"], rounds=2)
    assert (found.payload, found.rounds, found.verified) == ("resnet50", 2, True)
    assert min(found.local_us, found.pipe_us, found.handoff_us) > 0
    assert found.added_us_min <= found.added_us <= found.added_us_max
    assert found.limit_us is None
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("no_leftovers")
def test_a_value_that_is_not_the_one_sent_holds_no_limit() -> None:
    def stale(inputs: Any) -> Any:
        return {"OUTPUT__0": inputs["INPUT__0"].reshape(-1)[:1] * 0 - 1}

    wrong = FakeModel(
        "sink",
        inputs={"INPUT__0": ("FP32", (-1, -1, -1, -1))},
        outputs={"OUTPUT__0": ("FP32", (1,))},
        run=stale,
    )
    with ScriptedServer([wrong], allow_client_shm=True) as server:
        found = measure_handoff(server.url, PAYLOADS["tiny"], rounds=1)
    assert not found.verified
    assert not found.is_held
    assert found.render().endswith(" NO\n")


def test_an_adopter_that_cannot_start_is_an_error_and_not_a_wait() -> None:
    nobody = "127.0.0.1:1"
    with (
        pytest.raises(ContenderFailed, match="broke off"),
        other_process(nobody, PAYLOADS["tiny"]),
    ):
        pytest.fail("it started")
    assert multiprocessing.active_children() == []


def test_the_limit_is_for_the_payload_of_the_promise() -> None:
    plan = make_plan(defaults=find_case("handoff").defaults)
    assert [payload.name for payload in plan.payloads] == ["yolov8"]


@pytest.mark.parametrize(
    ("added", "limit", "expected"),
    [(150.0, 150.0, True), (150.1, 150.0, False), (900.0, None, True)],
)
def test_the_limit_is_for_the_median_difference(
    added: float, limit: float | None, expected: bool
) -> None:
    found = dataclasses.replace(HELD, added_us=added, limit_us=limit)
    assert found.is_held is expected
    assert found.to_json()["is_held"] is expected
    assert ("NOT held" in found.render()) is not expected


def test_the_text_fits_80_columns_and_the_json_has_every_number() -> None:
    slow = dataclasses.replace(HELD, added_us_min=-12345.67, added_us_max=123456.78)
    assert max(map(len, slow.render().splitlines())) <= 80
    names = {field.name for field in dataclasses.fields(Handoff)}
    assert set(json.loads(json.dumps(HELD.to_json()))) == names | {"is_held"}
