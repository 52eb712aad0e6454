"""What a request asks for beside its tensors, as the server and its models see it."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmlane import (
    Connection,
    InferFailed,
    RequestOptions,
    Session,
    TensorMismatch,
)
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import Array, all_free
from tests.tensor_models import LABELS

pytestmark = pytest.mark.usefixtures("no_leftovers")

MEMORY = pytest.mark.parametrize("memory", ["system", "wire"])
NOW = {"DELAY_MS": np.zeros(1, np.int32)}
# Until others wait behind it, also where a busy machine stands still meanwhile.
LATER = {"DELAY_MS": np.array([1500], np.int32)}
FEATURES = np.array([[0.125, 0.75, 0.5, 0], [0, 0.25, 0.5, 1]], np.float32)


def report(session: Session, *, inputs: Any = NOW, **options: Any) -> dict[str, Any]:
    """What the model saw of a request with these options."""
    chosen = RequestOptions(**options)
    (text,) = session.infer(inputs, options=chosen)["REPORT"]
    told: dict[str, Any] = json.loads(text)
    return told


# --- what the model sees --------------------------------------------------------------


@MEMORY
def test_a_request_id_reaches_the_model_and_comes_back(
    tensors_server: TritonServer, memory: str
) -> None:
    with Session(tensors_server.http_url, "reported", memory=memory) as session:
        for name in ("a", "Größe 7", 'with "quotes" and \\', "x" * 256, "0", "1"):
            with session.lease() as lease:
                lease.write("DELAY_MS", NOW["DELAY_MS"])
                result = lease.infer(options=RequestOptions(id=name))
                assert json.loads(result["REPORT"][0])["id"] == name
                assert result.request_id == name
                assert lease.infer().request_id == ""
        all_free(session)


@MEMORY
@pytest.mark.parametrize(
    "value",
    [
        "text",
        "Umlaut ü, 日本 and 🦜",
        "",
        'quote " and \\ and \n',
        0,
        -3,
        2**63 - 1,
        -(2**63),
        True,
        False,
        1.5,
        -1e-300,
    ],
)
def test_a_parameter_reaches_the_model_with_its_type(
    tensors_server: TritonServer, memory: str, value: str | float
) -> None:
    with Session(tensors_server.http_url, "reported", memory=memory) as session:
        seen = report(session, parameters={"mine": value})["parameters"]
        assert seen == {"mine": value}
        assert type(seen["mine"]) is type(value)
        # A request without any must not repeat those of the one before.
        assert report(session)["parameters"] == {}


def test_many_parameters_travel_together(tensors_server: TritonServer) -> None:
    sent: dict[str, Any] = {f"name {i}": i for i in range(50)}
    with Session(tensors_server.http_url, "reported") as session:
        assert report(session, parameters=sent)["parameters"] == sent


def test_headers_travel_with_their_own_request_only(
    tensors_server: TritonServer,
) -> None:
    always = Connection(headers={"x-seen-always": "1"})
    with Session(tensors_server.http_url, "reported", connection=always) as session:
        seen = report(session, headers={"x-seen-once": "two", "x-other": "3"})
        assert seen["parameters"] == {"x-seen-always": "1", "x-seen-once": "two"}
        assert report(session)["parameters"] == {"x-seen-always": "1"}


def test_the_version_asked_for_answers(tensors_server: TritonServer) -> None:
    url = tensors_server.http_url
    for asked, answers in (("", "3"), ("1", "1"), ("3", "3")):
        with Session(url, "reported", version=asked) as session:
            assert report(session)["version"] == answers
            with session.lease() as lease:
                lease.write("DELAY_MS", NOW["DELAY_MS"])
                assert lease.infer().model_version == answers


@MEMORY
def test_parameters_of_a_reply_are_told(
    tensors_server: TritonServer, memory: str
) -> None:
    # Triton gives every reply of an ensemble the sequence that it was asked for.
    url = tensors_server.http_url
    with Session(url, "ensemble", memory=memory) as session, session.lease() as lease:
        lease.write("VALUES", np.ones(2, np.float32))
        lease.write("COUNTS", np.ones(2, np.int32))
        told = lease.infer().parameters
        assert told["sequence_id"] == 0
        assert told["sequence_start"] is False
        step = RequestOptions(sequence_id="abc", sequence_start=True)
        told = lease.infer(options=step).parameters
        assert told["sequence_id"] == "abc"
        assert told["sequence_start"] is True


# --- the server's queue ---------------------------------------------------------------


def test_a_request_of_higher_priority_is_served_first(
    tensors_server: TritonServer,
) -> None:
    with (
        Session(tensors_server.http_url, "queued", slots=5) as session,
        ThreadPoolExecutor(5) as pool,
    ):

        def send(**options: Any) -> Future[dict[str, Any]]:
            before = session.stats().in_flight
            sent = pool.submit(report, session, **options)
            eventually(lambda: session.stats().in_flight > before, "it is in flight")
            return sent

        report(session)
        send(inputs=LATER)
        last = [send(priority=3) for _ in range(3)]
        first = send(priority=1)
        assert first.result()["turn"] < min(each.result()["turn"] for each in last)
        all_free(session)


def test_a_request_that_waits_too_long_in_the_queue_is_refused(
    tensors_server: TritonServer,
) -> None:
    with (
        Session(tensors_server.http_url, "queued", slots=2) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        assert report(session, queue_timeout=5)["queue_timeout"] == 5_000_000
        held = pool.submit(report, session, inputs=LATER)
        eventually(lambda: session.stats().in_flight == 1, "the model is busy")
        with pytest.raises(InferFailed, match="Request timeout expired"):
            report(session, queue_timeout=0.02)
        held.result()
        assert report(session)["queue_timeout"] == 0
        all_free(session)


# --- sequences ------------------------------------------------------------------------


def add(session: Session, value: int, **options: Any) -> int:
    """One step of a sequence of `running`: the sum so far."""
    inputs = {"VALUE": np.array([[value]], np.int32)}
    return int(session.infer(inputs, options=RequestOptions(**options))["SUM"][0, 0])


@MEMORY
@pytest.mark.parametrize("name", [7, 2**64 - 1])
def test_steps_of_a_sequence_add_up(
    tensors_server: TritonServer, memory: str, name: int
) -> None:
    with Session(tensors_server.http_url, "running", memory=memory) as session:
        assert add(session, 1, sequence_id=name, sequence_start=True) == 1
        assert add(session, 20, sequence_id=name) == 21
        assert add(session, 300, sequence_id=name, sequence_end=True) == 321
        # It is over: another step needs another start.
        with pytest.raises(InferFailed, match="must specify the START flag"):
            add(session, 1, sequence_id=name)
        whole = {"sequence_start": True, "sequence_end": True}
        assert add(session, 5, sequence_id=name, **whole) == 5
        all_free(session)


def test_sequences_at_once_do_not_mix(tensors_server: TritonServer) -> None:
    def count(number: int) -> None:
        total = 0
        for step in range(20):
            total += number + step
            ends = {"sequence_start": step == 0, "sequence_end": step == 19}
            seen = add(session, number + step, sequence_id=number, **ends)
            assert seen == total

    with (
        Session(tensors_server.http_url, "running", slots=4) as session,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(count, (101, 102, 103, 104)))
        all_free(session)


def test_a_sequence_model_refuses_a_request_without_one(
    tensors_server: TritonServer,
) -> None:
    with Session(tensors_server.http_url, "running") as session:
        with pytest.raises(InferFailed, match="correlation ID"):
            add(session, 1)
        assert add(session, 1, sequence_id=9, sequence_start=True) == 1
        assert add(session, 1, sequence_id=9, sequence_end=True) == 2


# --- classification -------------------------------------------------------------------


def classes(result: Array) -> list[list[bytes]]:
    listed: list[list[bytes]] = result.tolist()
    return listed


@MEMORY
def test_classes_come_with_their_labels_largest_first(
    tensors_server: TritonServer, memory: str
) -> None:
    two = RequestOptions(classification={"SCORES": 2})
    url = tensors_server.http_url
    with Session(url, "classified", memory=memory, slots=1) as session:
        for _ in range(2):
            outputs = session.infer({"FEATURES": FEATURES}, options=two)
            assert classes(outputs["SCORES"]) == [
                [b"0.750000:1:dog", "0.500000:2:größer".encode()],
                [b"1.000000:3:two words", "0.500000:2:größer".encode()],
            ]
            # The other output comes as ever, and the next request gets numbers.
            assert outputs["SIZES"].tolist() == [[1.375], [1.75]]
            plain = session.infer({"FEATURES": FEATURES})["SCORES"]
            assert plain.tolist() == FEATURES.tolist()
        all_free(session)


def test_more_classes_than_there_are_give_all(tensors_server: TritonServer) -> None:
    many = RequestOptions(classification={"SCORES": 100})
    with Session(tensors_server.http_url, "classified") as session:
        outputs = session.infer({"FEATURES": FEATURES[:1]}, options=many)
        (found,) = classes(outputs["SCORES"])
    assert [each.decode().split(":")[2] for each in found] == [
        LABELS[i] for i in (1, 2, 0, 3)
    ]


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_what_triton_cannot_rank_is_never_sent(
    tensors_server: TritonServer, datatype: str
) -> None:
    # Ranking BYTES would end this server.
    options = RequestOptions(classification={"OUTPUT__0": 1})
    model = f"echo_{datatype.lower()}"
    with Session(tensors_server.http_url, model) as session:
        with session.lease() as lease:
            array: Any = ["a"] if datatype == "BYTES" else np.zeros(1, bool)
            cast = datatype != "BYTES"
            lease.write("INPUT__0", np.reshape(array, (1, 1, 1)), cast=cast)
            with pytest.raises(TensorMismatch, match=f"is {datatype}.* cannot rank"):
                lease.infer(options=options)
            assert lease.infer()["OUTPUT__0"].shape == (1, 1, 1)
        all_free(session)
    assert tensors_server.is_alive
