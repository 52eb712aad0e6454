"""Shapes beyond any memory: refused by name wherever they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import Session, ShmlaneError, TensorMismatch
from shmlane.errors import RegionError
from shmlane.testing import FakeModel
from tests.unit.asked import session_on

PLANE = FakeModel(
    "plane",
    inputs={"X": ("FP32", (-1, -1))},
    outputs={"Y": ("FP32", (-1, -1))},
    run=lambda inputs: {"Y": 2 * inputs["X"]},
)
GOOD = np.ones((2, 3), np.float32)

# More than an address can tell apart, also where one size is 0: no array has them.
IMPOSSIBLE = [
    (1, 1 << 70),
    (1 << 70, 0),
    (0, 1 << 62),
    (1 << 40, 1 << 40),
    (1, (1 << 63) - 1),
    (1, 1 << 63),
    (1, 1 << 64),
    (0, 1 << 63),
]
# An array could be so large, but there is no such machine.
TOO_LARGE = [(1, 1 << 44), (1 << 22, 1 << 22), (1, 1 << 57)]


def serves(session: Session) -> None:
    assert session.infer({"X": GOOD})["Y"].tolist() == (2 * GOOD).tolist()
    assert session.stats().free == session.stats().slots


@pytest.mark.parametrize("shape", IMPOSSIBLE)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_view_of_an_impossible_shape_is_refused(
    memory: str, shape: tuple[int, ...]
) -> None:
    with session_on(PLANE, memory=memory) as (server, session):
        with session.lease() as lease:
            with pytest.raises(TensorMismatch, match="'X' cannot have shape") as caught:
                lease.view("X", shape)
            assert caught.value.context["given"] == shape
            # The lease is usable.
            lease.write("X", GOOD)
            assert lease.infer()["Y"].tolist() == (2 * GOOD).tolist()
        assert sum(each.is_inference for each in server.requests) == 1
        serves(session)


@pytest.mark.parametrize("shape", TOO_LARGE)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_view_larger_than_the_machine_is_told_and_the_lease_goes_on(
    memory: str, shape: tuple[int, ...]
) -> None:
    with session_on(PLANE, memory=memory) as (_, session):
        with session.lease() as lease:
            with pytest.raises(RegionError, match=r"\d{14} bytes"):
                lease.view("X", shape)
            lease.write("X", GOOD)
            assert lease.infer()["Y"].tolist() == (2 * GOOD).tolist()
        serves(session)


@pytest.mark.parametrize("shape", [(1, 1 << 44), (1 << 30, 1 << 14)])
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_an_array_that_only_looks_so_large_cannot_be_written(
    memory: str, shape: tuple[int, ...]
) -> None:
    # Nothing of it is in memory, but all of it would have to be.
    vast = np.broadcast_to(np.float32(1), shape)
    with session_on(PLANE, memory=memory) as (_, session):
        with session.lease() as lease, pytest.raises(RegionError):
            lease.write("X", vast)
        with pytest.raises(RegionError):
            session.infer({"X": vast})
        serves(session)


@pytest.mark.parametrize("shape", [*IMPOSSIBLE, *TOO_LARGE])
@pytest.mark.parametrize("memory", ["system", "wire"])
@pytest.mark.parametrize("which", ["shapes", "outputs"])
def test_a_session_is_not_opened_for_what_no_machine_has(
    which: str, memory: str, shape: tuple[int, ...]
) -> None:
    name = "X" if which == "shapes" else "Y"
    wanted: type[ShmlaneError] = RegionError
    if shape in IMPOSSIBLE:
        wanted = TensorMismatch
    with (
        pytest.raises(wanted) as caught,
        session_on(PLANE, memory=memory, **{which: {name: shape}}),
    ):
        pytest.fail("the session is open")
    if shape in IMPOSSIBLE:
        assert f"'{name}' cannot have shape {shape}" in str(caught.value)


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 63, 1 << 70])
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_elements_of_more_bytes_than_any_machine_has_are_told(
    memory: str, nbytes: int
) -> None:
    text = FakeModel(
        "text",
        inputs={"W": ("BYTES", (-1,))},
        outputs={"W_OUT": ("BYTES", (-1,))},
        run=lambda inputs: {"W_OUT": inputs["W"]},
    )
    for which, name in (("shapes", "W"), ("outputs", "W_OUT")):
        told: dict[str, Any] = {which: {name: nbytes}}
        with (
            pytest.raises(RegionError, match=r"\d{15} bytes"),
            session_on(text, memory=memory, **told),
        ):
            pytest.fail("the session is open")


@pytest.mark.parametrize("memory", ["system", "wire", "auto"])
def test_tensors_that_are_possible_one_by_one_may_be_too_many(memory: str) -> None:
    names = [f"X{number}" for number in range(5)]
    many = FakeModel(
        "many",
        inputs=dict.fromkeys(names, ("INT64", (-1,))),
        outputs={"Y": ("INT64", (1,))},
        run=lambda inputs: {"Y": inputs["X0"]},
    )
    with (
        pytest.raises(RegionError, match=r"no machine has \d+ bytes of memory"),
        session_on(many, memory=memory, shapes=dict.fromkeys(names, (1 << 59,))),
    ):
        pytest.fail("the session is open")
