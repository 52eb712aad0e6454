"""The case `preprocess`: what is compared, and when its limits count as held."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest

from shmlane.bench import (
    PAYLOADS,
    Preprocessing,
    Versus,
    measure_preprocess,
    preprocessing,
)
from shmlane.preprocess.opencv import opencv

HELD = Preprocessing(
    payload="yolov8",
    rounds=3,
    copies=20,
    backend="OpenCV",
    usual_us=1000.0,
    copyto_us=200.0,
    image_into_us=300.0,
    usual=Versus(ratio=0.3, least=0.2, most=0.4, limit=0.35),
    copyto=Versus(ratio=1.5, least=1.2, most=2.4, limit=3.0),
    verified=True,
)


@pytest.mark.usefixtures("no_leftovers")
def test_a_picture_is_measured_beside_the_usual_way_and_the_copy() -> None:
    found = measure_preprocess(PAYLOADS["resnet50"], rounds=2)
    assert (found.payload, found.rounds, found.verified) == ("resnet50", 2, True)
    assert min(found.usual_us, found.copyto_us, found.image_into_us) > 0
    for versus in (found.usual, found.copyto):
        assert 0 < versus.least <= versus.ratio <= versus.most


@pytest.mark.usefixtures("no_leftovers")
def test_values_that_are_not_those_of_the_usual_way_hold_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preprocessing, "image_into", lambda *_, **__: None)
    found = measure_preprocess(PAYLOADS["tiny"], rounds=1)
    assert not found.verified
    assert not found.is_held
    assert found.render().endswith(" NO\n")


def test_only_the_payload_of_the_promise_has_limits() -> None:
    pytest.importorskip("cv2")
    tiny = measure_preprocess(PAYLOADS["tiny"], rounds=1)
    assert (tiny.usual.limit, tiny.copyto.limit) == (None, None)
    large = measure_preprocess(PAYLOADS["yolov8"], rounds=1)
    assert (large.usual.limit, large.copyto.limit) == (0.35, 3.0)
    assert large.backend == "OpenCV"


def test_nothing_is_promised_without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    opencv.cache_clear()
    try:
        found = measure_preprocess(PAYLOADS["yolov8"], rounds=1)
    finally:
        opencv.cache_clear()
    assert (found.usual.limit, found.copyto.limit) == (None, None)
    assert found.backend == "NumPy"
    assert found.is_held


@pytest.mark.parametrize("name", ["usual", "copyto"])
def test_each_limit_is_for_the_median_ratio(name: str) -> None:
    versus: Versus = getattr(HELD, name)
    assert versus.limit is not None
    for ratio, expected in ((versus.limit, True), (versus.limit + 0.001, False)):
        changed: Any = {name: dataclasses.replace(versus, ratio=ratio)}
        found = dataclasses.replace(HELD, **changed)
        assert found.is_held is expected
        assert found.to_json()["is_held"] is expected
        assert ("NOT held" in found.render()) is not expected


def test_the_text_fits_80_columns_and_the_json_has_every_number() -> None:
    slow = dataclasses.replace(HELD, usual_us=1234567.89, copyto_us=234567.891)
    assert max(map(len, slow.render().splitlines())) <= 80
    names = {field.name for field in dataclasses.fields(Preprocessing)}
    told = json.loads(json.dumps(HELD.to_json()))
    assert set(told) == names | {"is_held"}
    assert told["usual"] == {"ratio": 0.3, "least": 0.2, "most": 0.4, "limit": 0.35}
