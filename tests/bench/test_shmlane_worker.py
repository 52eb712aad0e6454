"""The contender shmlane: which session it makes, and what its lanes take for right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shmlane
from shmlane.bench import CONTENDERS, PAYLOADS
from shmlane.bench.workers.harness import Spec
from shmlane.bench.workers.shmlane_worker import (
    FromPicture,
    InPlace,
    InTheRequest,
    ThreadsClient,
)
from shmlane.testing import FakeModel, ScriptedServer, sink_model


def spec_of(contender: str, url: str = "here:8000", *, fill: bool = False) -> Spec:
    shape = PAYLOADS["tiny"].shape
    way = CONTENDERS[contender].way
    return Spec(contender, url, "sink", shape, 1, fill, way, "threads")


class FakeSession:
    """Remembers what it was made with."""

    made: dict[str, Any]

    def __init__(self, url: str, model: str, **options: Any) -> None:
        FakeSession.made = options

    def open(self) -> FakeSession:
        return self


@pytest.mark.parametrize(
    ("contender", "memory", "lane"),
    [
        ("shmlane-wire", "wire", InTheRequest),
        ("shmlane-http", "system", InPlace),
        ("shmlane-unix", "system", InPlace),
    ],
)
def test_only_the_wire_contender_does_without_shared_memory(
    contender: str, memory: str, lane: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shmlane, "Session", FakeSession)
    client = ThreadsClient(spec_of(contender))
    assert FakeSession.made.get("memory", "system") == memory
    assert type(client.lane(0)) is lane


@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize("kind", [InPlace, InTheRequest, FromPicture])
@pytest.mark.parametrize("fill", [True, False])
def test_a_lane_knows_the_right_reply_from_a_wrong_one(
    kind: type[InPlace | InTheRequest], fill: bool
) -> None:
    def stale(inputs: Any) -> Any:
        return {"OUTPUT__0": np.array([1.0], np.float32)}

    wrong = FakeModel(
        "stale",
        inputs={"INPUT__0": ("FP32", (-1, -1, -1, -1))},
        outputs={"OUTPUT__0": ("FP32", (1,))},
        run=stale,
    )
    models = [sink_model(), wrong]
    with ScriptedServer(models, allow_client_shm=True) as server:
        spec = spec_of("shmlane-http", server.url, fill=fill)
        shapes = {"INPUT__0": spec.shape}
        with shmlane.Session(server.url, "sink", slots=1, shapes=shapes) as session:
            lane = kind(session, spec)
            lane.prepare()
            assert [lane.call(marker) for marker in (1.0, 2.0, 3.0)] == [True] * 3
        with shmlane.Session(server.url, "stale", slots=1, shapes=shapes) as session:
            lane = kind(session, spec)
            assert [lane.call(marker) for marker in (1.0, 2.0)] == [True, False]


@pytest.mark.parametrize(
    ("kind", "fill", "written"),
    [(InPlace, False, False), (InPlace, True, True), (FromPicture, False, True)],
)
def test_a_lane_writes_the_whole_input_only_where_it_fills(
    kind: type[InPlace], fill: bool, written: bool
) -> None:
    unopened = shmlane.Session("here:8000", "sink")
    lane = kind(unopened, spec_of("shmlane-http", fill=fill))
    view = np.full(PAYLOADS["tiny"].shape, np.nan, np.float32)
    lane.fill(view)
    assert np.isfinite(view).all() == written
    assert np.isnan(view).all() != written
