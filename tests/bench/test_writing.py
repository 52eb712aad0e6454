"""The case `write`: what is compared, and when its limit counts as held."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from shmlane import Lease
from shmlane.bench import PAYLOADS, Versus, Writing, measure_write
from shmlane.bench.writing import picture

HELD = Writing(
    payload="yolov8",
    rounds=3,
    copies=20,
    copyto_us=1000.0,
    write_us=1100.0,
    copyto=Versus(ratio=1.1, least=0.9, most=1.3, limit=1.15),
    verified=True,
)


@pytest.mark.usefixtures("no_leftovers")
def test_a_write_is_measured_beside_the_bare_copy() -> None:
    found = measure_write(PAYLOADS["resnet50"], rounds=2)
    assert (found.payload, found.rounds, found.verified) == ("resnet50", 2, True)
    assert found.copyto_us > 0
    assert found.write_us > 0
    assert 0 < found.copyto.least <= found.copyto.ratio <= found.copyto.most


def test_the_picture_is_a_turned_view_of_what_a_camera_gives() -> None:
    turned = picture(PAYLOADS["resnet50"])
    assert turned.shape == PAYLOADS["resnet50"].shape
    assert turned.dtype == np.float32
    assert turned.strides == (224 * 224 * 12, 4, 224 * 12, 12)


@pytest.mark.usefixtures("no_leftovers")
def test_a_write_that_does_not_arrive_holds_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(self: Lease, name: str, array: Any) -> None:
        """Write nothing."""

    monkeypatch.setattr(Lease, "write", forget)
    found = measure_write(PAYLOADS["tiny"], rounds=1)
    assert not found.verified
    assert not found.is_held
    assert "values right" in found.render()
    assert found.render().endswith(" NO\n")


def test_only_the_payload_of_the_promise_has_a_limit() -> None:
    assert measure_write(PAYLOADS["tiny"], rounds=1).copyto.limit is None
    assert measure_write(PAYLOADS["yolov8"], rounds=1).copyto.limit == 1.15


@pytest.mark.parametrize(
    ("ratio", "limit", "expected"),
    [(1.15, 1.15, True), (1.1501, 1.15, False), (2.3, None, True)],
)
def test_the_limit_is_for_the_median_ratio(
    ratio: float, limit: float | None, expected: bool
) -> None:
    versus = dataclasses.replace(HELD.copyto, ratio=ratio, limit=limit)
    found = dataclasses.replace(HELD, copyto=versus)
    assert found.is_held is expected
    assert found.to_json()["is_held"] is expected
    assert ("NOT held" in found.render()) is not expected


def test_the_text_fits_80_columns_and_the_json_has_every_number() -> None:
    slow = dataclasses.replace(HELD, copyto_us=123456.789, write_us=234567.891)
    assert max(map(len, slow.render().splitlines())) <= 80
    names = {field.name for field in dataclasses.fields(Writing)}
    assert set(json.loads(json.dumps(HELD.to_json()))) == names | {"is_held"}
