"""A slot lent to tritonclient, of which this environment has a likeness of its own.

What is tested here is what goes wrong; `tests/server/test_migration.py` has the real
client on a real server.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmlane import (
    ExtraMissing,
    ForkedSession,
    InferFailed,
    InputMissing,
    LeaseBusy,
    LeaseTimeout,
    ProtocolError,
    Session,
    UsageError,
    migration,
)
from shmlane.testing import ScriptedServer, identity_model
from tests.polling import eventually
from tests.raw_http import RawReply, ask, request
from tests.sessions import Array, all_free, frame
from tests.unit.asked import slots_of
from tests.unit.flowing import in_a_child
from tests.unit.one_slot import INPUT, OUTPUT, one_slot, serving, state


class InferInput:
    """What both protocols' class of this name can do, as far as it is asked for."""

    def __init__(self, name: str, shape: list[int], datatype: str) -> None:
        self.tensor: dict[str, Any] = {
            "name": name,
            "shape": shape,
            "datatype": datatype,
        }

    def name(self) -> str:
        return str(self.tensor["name"])

    def set_shared_memory(self, name: str, nbytes: int, offset: int = 0) -> None:
        self.tensor["parameters"] = _place(name, nbytes, offset)

    def set_data_from_numpy(self, array: Array) -> None:
        self.tensor["data"] = array.reshape(-1).tolist()

    def _get_tensor(self) -> dict[str, Any]:
        return self.tensor


class InferRequestedOutput:
    def __init__(self, name: str) -> None:
        self.tensor: dict[str, Any] = {"name": name}

    def set_shared_memory(self, name: str, nbytes: int, offset: int = 0) -> None:
        self.tensor["parameters"] = _place(name, nbytes, offset)


def _place(name: str, nbytes: int, offset: int) -> dict[str, Any]:
    return {
        "shared_memory_region": name,
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }


class InferResult:
    def __init__(self, response: Any, arrays: dict[str, Array] | None = None) -> None:
        self.response = response
        self.arrays = arrays or {}

    def get_response(self) -> Any:
        return self.response

    def as_numpy(self, name: str) -> Array:
        return self.arrays[name]


def likeness(name: str) -> Any:
    """A module of tritonclient, as a program finds it."""
    module: Any = types.ModuleType(name)
    module.InferInput = InferInput
    module.InferRequestedOutput = InferRequestedOutput
    module.InferResult = InferResult
    return module


@pytest.fixture(autouse=True)
def tritonclient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package: Any = types.ModuleType("tritonclient")
    monkeypatch.setitem(sys.modules, "tritonclient", package)
    for protocol in migration.PROTOCOLS:
        name = f"tritonclient.{protocol}"
        setattr(package, protocol, likeness(name))
        monkeypatch.setitem(sys.modules, name, getattr(package, protocol))
    migration.triton_api.cache_clear()
    yield package
    migration.triton_api.cache_clear()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    with one_slot(server.url) as session:
        yield session
        all_free(session)


def send(url: str, inputs: list[Any], outputs: list[Any]) -> RawReply:
    """One request of such a client."""
    content = {
        "inputs": [each._get_tensor() for each in inputs],
        "outputs": [each.tensor for each in outputs],
    }
    return ask(url, request("POST", "/v2/models/identity/infer", content))


def infer(url: str, inputs: list[Any], outputs: list[Any]) -> InferResult:
    reply = send(url, inputs, outputs)
    assert reply.status == 200, reply.body
    return InferResult(reply.json())


def answer(**changes: Any) -> dict[str, Any]:
    """A reply to `frame`, with some of it changed."""
    output = {"name": OUTPUT, "datatype": "FP32", "shape": [1, 1, 1, 8]}
    known = {"model_name": "identity", "model_version": "1", "outputs": [output]}
    of_output = {key: changes.pop(key) for key in output.keys() & changes.keys()}
    output.update(of_output)
    return known | changes


# --- what tritonclient is -------------------------------------------------------------


@pytest.mark.parametrize("protocol", migration.PROTOCOLS)
def test_a_missing_tritonclient_is_told_with_what_installs_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setitem(sys.modules, f"tritonclient.{protocol}", None)
    with session.lease() as lease:
        lease.write(INPUT, frame(1))
        with pytest.raises(ExtraMissing, match=rf"tritonclient\[{protocol}\]") as told:
            lease.triton_inputs(protocol=protocol)
        assert told.value.context["extra"] == f"tritonclient[{protocol}]"
        # Nothing was lent.
        assert lease.infer()[OUTPUT].tolist() == frame(1).tolist()


def test_a_tritonclient_that_builds_requests_in_another_way_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(InferInput, "_get_tensor")
    with session.lease() as lease:
        lease.write(INPUT, frame(1))
        with pytest.raises(UsageError, match="does not know"):
            lease.triton_inputs()


def test_there_are_two_protocols_and_one_request_is_of_one(session: Session) -> None:
    with session.lease() as lease:
        lease.write(INPUT, frame(1))
        with pytest.raises(UsageError, match="give 'http' or 'grpc'"):
            lease.triton_inputs(protocol="https")
        inputs = lease.triton_inputs(protocol="grpc")
        with pytest.raises(UsageError, match="begun with protocol='grpc', now 'http'"):
            lease.triton_outputs()
        assert [each.name() for each in inputs] == [INPUT]
    eventually(lambda: state(session) == "free", "the slot is drained")


# --- what is lent ---------------------------------------------------------------------


def test_inputs_that_were_not_given_are_not_lent(session: Session) -> None:
    with session.lease() as lease:
        for ask_for in (lease.triton_inputs, lease.triton_outputs):
            with pytest.raises(InputMissing, match=INPUT):
                ask_for()
        assert state(session) == "leased"


def test_a_lent_slot_belongs_to_its_request_until_the_reply(
    server: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease:
        lease.write(INPUT, frame(3))
        assert lease.infer()[OUTPUT][..., -1] == 3
        with pytest.raises(UsageError, match="no request of tritonclient was begun"):
            lease.triton_result(InferResult(answer()))
        inputs, outputs = lease.triton_inputs(), lease.triton_outputs()
        assert state(session) == "in_flight"
        for use in (lambda: lease[INPUT], lease.infer):
            with pytest.raises(LeaseBusy, match=r"lent to .* triton_result"):
                use()
        result = lease.triton_result(infer(server.url, inputs, outputs))
        assert (result[OUTPUT] == frame(3)).all()
        assert state(session) == "leased"
        lease[INPUT][...] = 4
        assert (lease.infer()[OUTPUT] == 4).all()


def test_a_reply_tells_its_id_version_and_parameters(
    server: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease:
        lease.write(INPUT, frame(3))
        send(server.url, lease.triton_inputs(), lease.triton_outputs())
        told = answer(id="mine", model_version="7", parameters={"gain": 2})
        result = lease.triton_result(InferResult(told))
    assert (result.request_id, result.model_version) == ("mine", "7")
    assert result.parameters == {"gain": 2}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_name": "other"}, ProtocolError, "of model 'other', not 'identity'"),
        ({"outputs": []}, InferFailed, f"without output '{OUTPUT}'"),
        ({"datatype": "FP64"}, InferFailed, "came as FP64"),
        ({"shape": [1, 1, 1, 9]}, InferFailed, "does not fit 32 bytes"),
        ({"shape": [1, 1, 1, -8]}, ProtocolError, "came with shape"),
        ({"shape": [1, 1, 1, "8"]}, ProtocolError, "came with shape"),
    ],
)
def test_a_reply_that_cannot_be_true_leaves_the_slot_with_the_server(
    server: ScriptedServer,
    session: Session,
    changes: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with session.lease() as lease:
        lease.write(INPUT, frame(3))
        right = infer(server.url, lease.triton_inputs(), lease.triton_outputs())
        with pytest.raises(error, match=words):
            lease.triton_result(InferResult(answer(**changes)))
        assert state(session) == "in_flight"
        assert (lease.triton_result(right)[OUTPUT] == frame(3)).all()


# --- leases that end without a reply --------------------------------------------------


@pytest.mark.parametrize("version", ["2.51.0", "2.70.0"])
def test_a_request_that_nobody_hears_of_keeps_its_slot_while_it_runs(
    version: str,
) -> None:
    with (
        serving(version) as server,
        one_slot(server.url) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        with server.hold(), session.lease() as lease:
            lease.write(INPUT, frame(3))
            late = pool.submit(
                send, server.url, lease.triton_inputs(), lease.triton_outputs()
            )
            server.wait_for(1)
            lease.release()
            asked = len(server.requests)
            eventually(lambda: len(server.requests) > asked + 5, "it is asked about")
            assert state(session) == "lost"
            with pytest.raises(LeaseTimeout, match="lost"):
                session.lease(timeout=0.01)
        assert late.result(10.0).status == 200
        assert all_free(session).drains == 1
        # What was registered for it is not known any more.
        assert server.regions == {}


def test_old_servers_never_get_such_a_slot_again() -> None:
    server = ScriptedServer([identity_model()], version="2.49.0")
    with server, one_slot(server.url) as session:
        with session.lease() as lease:
            lease.write(INPUT, frame(3))
            inputs, outputs = lease.triton_inputs(), lease.triton_outputs()
        assert all_free(session).retired == 1
        with session.lease() as lease:
            # Late, and into memory that nobody looks at.
            content = {
                "inputs": [each.tensor for each in inputs],
                "outputs": [each.tensor for each in outputs],
            }
            late = request("POST", "/v2/models/identity/infer", content)
            lease.write(INPUT, frame(4))
            result = lease.infer()
            assert ask(server.url, late).status == 200
            assert (result[OUTPUT] == frame(4)).all()
        assert not server.crashed


def test_a_lent_lease_that_is_dropped_comes_back_too(session: Session) -> None:
    lease = session.lease()
    lease.write(INPUT, frame(3))
    lease.triton_inputs()
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del lease
    assert all_free(session).drains == 1


def test_a_session_may_close_while_a_slot_is_lent(server: ScriptedServer) -> None:
    session = one_slot(server.url, limit=1.0).open()
    lease = session.lease()
    lease.write(INPUT, frame(3))
    inputs, outputs = lease.triton_inputs(), lease.triton_outputs()
    session.close()
    result = lease.triton_result(infer(server.url, inputs, outputs))
    assert (result[OUTPUT] == frame(3)).all()
    lease.release()


def test_a_forked_child_cannot_end_the_request_of_its_parent(
    server: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease:
        lease.write(INPUT, frame(3))
        inputs, outputs = lease.triton_inputs(), lease.triton_outputs()
        reply = infer(server.url, inputs, outputs)
        notes = slots_of(session)[0].notes

        def use() -> None:
            for refused in (
                lambda: lease.triton_result(reply),
                lease.triton_inputs,
                lambda: lease[INPUT],
            ):
                with pytest.raises(ForkedSession):
                    refused()

        assert in_a_child(use) == ""
        assert notes.is_in_flight
        assert (lease.triton_result(reply)[OUTPUT] == frame(3)).all()


def test_a_request_in_flight_elsewhere_is_seen_when_the_reply_comes(
    server: ScriptedServer, session: Session
) -> None:
    with ThreadPoolExecutor(1) as pool, session.lease() as lease:
        lease.write(INPUT, frame(3))
        inputs, outputs = lease.triton_inputs(), lease.triton_outputs()
        reply = infer(server.url, inputs, outputs)
        with server.hold():
            again = pool.submit(send, server.url, inputs, outputs)
            server.wait_for(1)
            assert (lease.triton_result(reply)[OUTPUT] == frame(3)).all()
            lease.release()
            assert state(session) == "lost"
        again.result(10.0)
    assert all_free(session).drains == 1


# --- replies in other words -----------------------------------------------------------


def test_bf16_of_older_versions_is_read_bit_for_bit() -> None:
    values = np.array([1.0, -2.5, np.inf], np.float32)
    output = {
        "name": "Y",
        "datatype": "BF16",
        "shape": [3],
        "parameters": {"binary_data_size": 6},
    }
    response = {"model_name": "m", "outputs": [output]}
    read = migration.read_http(InferResult(response, {"Y": values}), frozenset())
    assert read.outputs[0].data is not None
    bits = np.frombuffer(read.outputs[0].data, np.uint16)
    assert bits.tolist() == [0x3F80, 0xC020, 0x7F80]


class _Choice:
    """A parameter as protobuf has it."""

    def __init__(self, kind: str, value: Any) -> None:
        self.kind = kind
        setattr(self, kind, value)

    def WhichOneof(self, name: str) -> str:
        assert name == "parameter_choice"
        return self.kind


def test_replies_of_grpc_tell_what_came_over_the_wire() -> None:
    output = {"datatype": "INT8", "shape": [2]}
    response = types.SimpleNamespace(
        id="mine",
        model_name="m",
        model_version="1",
        outputs=[
            types.SimpleNamespace(name=name, **output)
            for name in ("here", "empty", "shared")
        ],
        raw_output_contents=[b"\1\2", b"", b""],
        parameters={"gain": _Choice("double_param", 1.5)},
    )
    read = migration.read_grpc(InferResult(response), frozenset({"empty"}))
    data = {
        each.name: None if each.data is None else bytes(each.data)
        for each in read.outputs
    }
    assert data == {"here": b"\1\2", "empty": b"", "shared": None}
    assert (read.request_id, dict(read.parameters)) == ("mine", {"gain": 1.5})
