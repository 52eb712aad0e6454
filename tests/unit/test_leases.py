"""Leases and results: what callers may do with a slot, and when it is over."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

from shmlane import Session, leases, session
from shmlane.errors import (
    InputMissing,
    LeaseBusy,
    LeaseExpired,
    UnknownTensor,
    UsageError,
)
from shmlane.leases import BaseLease, Result
from shmlane.metadata import Array
from shmlane.slots import Slot
from shmlane.testing import ScriptedServer, identity_model
from tests.unit.scripted import (
    OPEN,
    PLAIN,
    ROWS,
    Desk,
    Lease,
    ScriptedChannel,
    output,
)

FULL = output("Y", (1, 4))
SHAPES = {"INPUT__0": (1, 1, 2, 2)}


@pytest.fixture
def desk() -> Desk:
    return Desk(PLAIN)


@pytest.fixture
def open_desk() -> Desk:
    return Desk(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)})


@pytest.fixture
def rows() -> Desk:
    return Desk(ROWS, shapes={"X": (4, 3), "MARK": (4, 2)})


# --- inputs ---------------------------------------------------------------------------


def test_an_input_is_a_writable_view_of_shared_memory(desk: Desk) -> None:
    with desk.lease() as lease:
        lease["X"][...] = [[1, 2, 3, 4]]
        x = desk.slot.inputs["X"]
        block = x.registration.region.array(x.offset, 16)
        assert block.view(np.float32).tolist() == [1, 2, 3, 4]
        assert lease["X"].tolist() == [[1, 2, 3, 4]]


def test_an_input_is_filled_and_not_replaced(desk: Desk) -> None:
    with desk.lease() as lease:
        with pytest.raises(UsageError, match=r"lease\['X'\]\[\.\.\.\] = array"):
            lease["X"] = np.zeros((1, 4), np.float32)
        with pytest.raises(InputMissing):
            lease.infer()


def test_an_input_that_was_not_given_is_refused(rows: Desk) -> None:
    with rows.lease() as lease:
        lease["MARK"][...] = 1
        with pytest.raises(InputMissing, match="input 'X' in this lease") as caught:
            lease.infer()
        assert caught.value.context["missing"] == ["X"]


@pytest.mark.parametrize("way", ["item", "view", "write"])
def test_each_way_of_filling_gives_the_input(rows: Desk, way: str) -> None:
    values = np.ones((4, 3), np.float32)
    with rows.lease() as lease:
        if way == "item":
            lease["X"][...] = values
        elif way == "view":
            lease.view("X", (4, 3))[...] = values
        else:
            lease.write("X", values)
        assert list(lease.infer(output("SUM", (4, 1)))) == ["SUM"]


def test_what_an_earlier_lease_gave_does_not_count(desk: Desk) -> None:
    with desk.lease() as lease:
        lease["X"][...] = 1
        lease.infer(FULL)
    with desk.lease() as lease, pytest.raises(InputMissing):
        lease.infer(FULL)


def test_a_second_inference_sends_the_same_inputs_again(desk: Desk) -> None:
    with desk.lease() as lease:
        lease["X"][...] = 7
        lease.infer(FULL)
        lease.infer(FULL)
        assert desk.slot.inputs["X"].array.tolist() == [[7] * 4]


def test_an_optional_input_is_sent_only_by_leases_that_gave_it(rows: Desk) -> None:
    def sent(*names: str) -> list[str]:
        with rows.lease() as lease:
            for name in names:
                lease[name].fill(1)
            lease.infer(output("SUM", (4, 1)))
        return [each["name"] for each in rows.request["inputs"]]

    assert sent("X") == ["X"]
    assert sent("MARK", "X") == ["X", "MARK"]
    assert sent("X") == ["X"]


@pytest.mark.parametrize("name", ["Y", "x", "", None])
def test_an_unknown_input_is_named_with_those_there_are(desk: Desk, name: Any) -> None:
    with desk.lease() as lease:
        for use in (
            lambda: lease[name],
            lambda: lease.view(name, (1, 4)),
            lambda: lease.write(name, np.zeros((1, 4), np.float32)),
        ):
            with pytest.raises(UnknownTensor, match="this model has: 'X'"):
                use()


# --- results --------------------------------------------------------------------------


def inferred(desk: Desk, lease: Lease, shape: tuple[int, ...] = (8,)) -> Result:
    lease["X"].fill(1)
    return lease.infer(output("Y", shape))


def test_a_result_maps_names_to_writable_views(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        result = inferred(open_desk, lease, (2,))
        open_desk.slot.outputs["Y"].root.view(np.float32)[:2] = (3, 4)
        assert list(result) == ["Y"]
        assert len(result) == 1
        assert "Y" in result
        assert "X" not in result
        assert result["Y"].tolist() == [3, 4]
        result["Y"][0] = 9
        assert result["Y"].tolist() == [9, 4]
        assert result.model_version == "1"
        assert result.parameters == {}


def test_a_result_names_the_outputs_there_are(desk: Desk) -> None:
    with desk.lease() as lease:
        lease["X"].fill(1)
        result = lease.infer(FULL)
        with pytest.raises(UnknownTensor, match="no output 'X'; this model has: 'Y'"):
            result["X"]


def test_copies_and_views_outlive_the_lease(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        result = inferred(open_desk, lease)
        result["Y"][:] = 4
        copies, view = result.copy(), result["Y"]
    assert not open_desk.slot.is_at_rest
    assert copies["Y"].tolist() == view.tolist() == [4] * 8
    del view
    assert open_desk.slot.is_at_rest


def test_a_result_expires_with_its_lease(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        result = inferred(open_desk, lease)
    for use in (
        lambda: result["Y"],
        lambda: result["nothing"],
        result.copy,
        lambda: "Y" in result,
    ):
        with pytest.raises(LeaseExpired, match="this result has expired"):
            use()
    assert repr(result) == "<Result expired>"


def test_a_second_inference_expires_the_first_result(open_desk: Desk) -> None:
    with open_desk.lease() as lease:
        first = inferred(open_desk, lease)
        second = lease.infer(output("Y", (3,)))
        with pytest.raises(LeaseExpired):
            first["Y"]
        assert second["Y"].shape == (3,)


def test_outputs_on_the_wire_belong_to_their_result() -> None:
    desk = Desk(OPEN, shapes={"X": (8,)})
    with desk.lease() as lease:
        lease["X"].fill(1)
        slot = desk.slot
        desk.host.exchange.prepare(slot, 1)
        result = lease.infer(output("Y", (0,), wire=0))
        assert result["Y"].shape == (0,)
        assert repr(result) == "<Result Y [0]>"
    with pytest.raises(LeaseExpired):
        result["Y"]


# --- the end --------------------------------------------------------------------------


def uses(lease: Lease) -> list[Any]:
    return [
        lambda: lease["X"],
        lambda: lease.view("X", (1, 4)),
        lambda: lease.write("X", np.zeros((1, 4), np.float32)),
        lambda: lease.infer(FULL),
    ]


def test_a_released_lease_refuses_every_use(desk: Desk) -> None:
    lease = desk.lease()
    assert desk.slot.leased
    lease.release()
    lease.release()
    assert desk.host.returned == [desk.slot]
    assert not desk.slot.leased
    for use in uses(lease):
        with pytest.raises(LeaseExpired, match="this lease was released"):
            use()


def test_the_block_gives_the_slot_back_whatever_is_raised(desk: Desk) -> None:
    with pytest.raises(KeyboardInterrupt), desk.lease():
        raise KeyboardInterrupt
    assert desk.host.returned == [desk.slot]
    with desk.lease() as lease:
        lease.release()
    assert desk.host.returned == [desk.slot] * 2


def test_a_lease_in_flight_refuses_every_use_but_release(desk: Desk) -> None:
    lease = desk.lease()
    lease["X"].fill(1)
    desk.slot.channel = ScriptedChannel()
    desk.slot.server_hold = True
    for use in uses(lease):
        with pytest.raises(LeaseBusy, match="still waits for the reply"):
            use()
    assert repr(lease) == "<Lease <Slot 0 in flight generation 0>>"
    lease.release()
    assert desk.host.returned == [desk.slot]


def test_a_lease_that_is_dropped_comes_back_with_a_warning(desk: Desk) -> None:
    lease = desk.lease()
    with pytest.warns(ResourceWarning, match=r"<Lease <Slot 0 leased .* was dropped"):
        del lease
    assert desk.host.returned == [desk.slot]


def test_a_dropped_lease_comes_back_where_warnings_are_errors(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda told: raised.append(told.exc_type)
    )
    lease = desk.lease()
    del lease
    assert raised == [ResourceWarning]
    assert desk.host.returned == [desk.slot]
    assert not desk.slot.leased


def test_a_released_lease_is_dropped_in_silence(desk: Desk) -> None:
    lease = desk.lease()
    lease.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
    assert desk.host.returned == [desk.slot]


def test_a_lease_tells_its_state(desk: Desk) -> None:
    with desk.lease() as lease:
        assert repr(lease) == "<Lease <Slot 0 leased generation 0>>"
        lease["X"].fill(1)
        assert repr(lease.infer(FULL)) == "<Result Y [1, 4]>"
    assert repr(lease) == "<Lease released>"


@pytest.mark.parametrize("how", ["lease", "stream"])
def test_without_the_gil_a_lease_makes_its_arrays_itself(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An array that another thread than its maker lets go of may die much later."""
    for module in (leases, session):
        monkeypatch.setattr(module, "COUNTS_ARE_EXACT", False)
    # Nor can anybody tell that no view is alive.
    monkeypatch.setattr(Slot, "is_at_rest", False)
    roots: list[weakref.ref[Array]] = []

    def look(lease: BaseLease, _item: object) -> None:
        assert all(root() is None for root in roots)
        root = lease["INPUT__0"].base
        assert root is not None
        roots.append(weakref.ref(root))

    with (
        ScriptedServer([identity_model()]) as server,
        Session(server.url, "identity", slots=1, shapes=SHAPES) as asked,
    ):
        if how == "stream":
            list(asked.stream(range(2), write=look))
        for _ in range(2):
            with asked.lease() as lease:
                look(lease, None)
    assert len(roots) == (4 if how == "stream" else 2)
