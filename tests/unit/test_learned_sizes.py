"""Outputs whose size the model leaves open: where they come, and what is learned."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmlane import (
    InferFailed,
    OutOfSharedMemory,
    RegionOptions,
    RequestOptions,
    TensorMismatch,
)
from shmlane.regions import PAGE_BYTES
from shmlane.testing import FakeModel, Status
from tests.sessions import Array
from tests.unit.asked import (
    Repeat,
    asked,
    count_of,
    doubling,
    places,
    scores,
    session_on,
    words,
)

# More elements than fit into the smallest block.
MANY = PAGE_BYTES


@pytest.fixture
def repeat() -> Repeat:
    return Repeat()


def test_the_second_output_of_a_size_comes_through_shared_memory() -> None:
    with session_on(doubling(), shapes={"X": (64,)}) as (server, session):
        for length in (8, 8, 8, 64, 64, 8):
            sent = np.arange(length, dtype=np.float32)
            came = session.infer({"X": sent})["Y"]
            assert came.tolist() == (2 * sent).tolist()
        wanted = ["wire", "memory", "memory", "wire", "memory", "memory"]
        assert places(server) == wanted
        assert session.stats().growths == 1


def test_a_block_grows_with_what_was_learned() -> None:
    with session_on(doubling()) as (server, session):
        for length in (MANY, MANY, 2 * MANY, 2 * MANY, MANY):
            sent = np.arange(length, dtype=np.float32)
            assert session.infer({"X": sent})["Y"].tolist() == (2 * sent).tolist()
        assert places(server) == ["wire", "memory", "wire", "memory", "memory"]
        # Of the input too.
        assert session.stats().growths == 4


def test_what_depends_on_more_than_shapes_goes_back_to_the_wire(repeat: Repeat) -> None:
    with session_on(repeat.model) as (server, session):
        for count in (3, 3, 5, 5, MANY, 2):
            assert count_of(session, count) == count
        assert places(server) == ["wire", "memory", "memory", "wire", "wire", "wire"]
        assert repeat.runs == 6


def test_an_output_of_many_sizes_is_not_expected_of_other_shapes_either() -> None:
    def some(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"Y": inputs["X"][inputs["X"] > 0]}

    model = FakeModel(
        "some",
        inputs={"X": ("FP32", (-1,))},
        outputs={"Y": ("FP32", (-1,))},
        run=some,
    )
    with session_on(model, shapes={"X": (8,)}) as (server, session):
        for given in ([1, 1, 1], [1, 0, 1], [1, 1], [1, 1], [1, 0]):
            came = session.infer({"X": np.array(given, np.float32)})["Y"]
            assert came.tolist() == [1] * sum(given)
        assert places(server) == ["wire", "memory", "wire", "wire", "wire"]


def test_only_the_outputs_that_were_asked_for_are_sent() -> None:
    for memory in ("system", "wire"):
        with session_on(words(), memory=memory, outputs=["LENGTHS"]) as (
            server,
            session,
        ):
            for _ in range(2):
                came = session.infer({"W": ["a", "bcd"]})
                assert {name: list(each) for name, each in came.items()} == {
                    "LENGTHS": [1, 3]
                }
            assert all(list(each.outputs) == ["LENGTHS"] for each in asked(server))


def test_no_output_at_all_comes_as_such(repeat: Repeat) -> None:
    with session_on(repeat.model) as (server, session):
        for count in (0, 0, 3, 0):
            assert count_of(session, count) == count
        assert places(server) == ["wire"] * 4


def test_a_call_whose_output_did_not_fit_fails_once(repeat: Repeat) -> None:
    with session_on(repeat.model) as (server, session):
        for _ in range(2):
            count_of(session, 3)
        with pytest.raises(InferFailed, match="the model has run") as caught:
            count_of(session, MANY)
        needed, given = 4 * MANY, PAGE_BYTES
        assert f"output 'Y' needs {needed} bytes, its block has {given}" in str(
            caught.value
        )
        context = caught.value.context
        assert (context["output"], context["needed"], context["given"]) == (
            "Y",
            needed,
            given,
        )
        assert "outputs={'Y': " in caught.value.hint
        assert count_of(session, MANY) == MANY
        assert places(server) == ["wire", "memory", "memory", "wire"]
        assert repeat.runs == 4
        stats = session.stats()
        assert (stats.reruns, stats.retries, stats.free) == (0, 0, 1)


def test_the_model_runs_again_where_that_is_allowed(repeat: Repeat) -> None:
    with session_on(repeat.model, rerun=True) as (server, session):
        for count in (3, 3, MANY, 5, MANY, 2 * MANY):
            assert count_of(session, count) == count
        assert repeat.runs == 8
        assert session.stats().reruns == 2
        # From the second on always: that is what a second run buys.
        assert places(server) == ["wire"] + ["memory"] * 7


def test_a_declared_output_that_is_larger_runs_again_once(repeat: Repeat) -> None:
    with session_on(repeat.model, rerun=True, outputs={"Y": (4,)}) as (_, session):
        assert count_of(session, 4) == 4
        assert count_of(session, 2 * MANY) == 2 * MANY
        assert repeat.runs == 3
        assert count_of(session, 2 * MANY) == 2 * MANY
        assert repeat.runs == 4
        assert session.stats().reruns == 1


def test_an_output_that_is_not_what_the_model_declares_is_no_reason_to_run_again() -> (
    None
):
    told = b"shared memory size specified with the request for output 'Y' (16 bytes)"
    text = told + b" should be at least 32 bytes to hold the results"
    with session_on(scores(), rerun=True) as (server, session):
        server.script(*[Status(500, b'{"error":"%s"}' % text)] * 5)
        with pytest.raises(InferFailed, match="'Y' needs 32 bytes"):
            session.infer({"X": np.ones((1, 4), np.float32)})
        assert len(asked(server)) == 1


def test_outputs_that_grow_with_each_run_are_given_up(repeat: Repeat) -> None:
    repeat.factor = 2
    with session_on(repeat.model, rerun=True) as (_, session):
        count_of(session, MANY)
        runs = repeat.runs
        with pytest.raises(InferFailed, match="gave up after 5 runs") as caught:
            count_of(session, MANY)
        assert "outputs={name: shape}" in caught.value.hint
        assert repeat.runs - runs == 5
        assert session.stats().free == 1
        repeat.factor = 1
        assert count_of(session, MANY) == MANY


def test_what_one_slot_learns_spoils_what_others_have_prepared(repeat: Repeat) -> None:
    with session_on(repeat.model, slots=2) as (server, session):
        with session.lease() as one, session.lease() as other:
            for lease, count in ((one, 3), (other, 3), (one, 5), (other, MANY)):
                lease.write("X", np.array([count], np.float32))
                assert len(lease.infer()["Y"]) == count
        assert places(server) == ["wire", "memory", "memory", "wire"]


def test_blocks_grow_while_other_requests_are_in_flight() -> None:
    sent = np.arange(MANY, dtype=np.float32)
    with (
        session_on(doubling(), slots=2, shapes={"X": (MANY,)}) as (server, session),
        ThreadPoolExecutor(2) as pool,
    ):
        session.infer({"X": sent})
        with server.hold():
            held = pool.submit(session.infer, {"X": sent})
            server.wait_for(1)
            other = pool.submit(session.infer, {"X": sent + 1})
            server.wait_for(2)
        assert held.result(10.0)["Y"].tolist() == (2 * sent).tolist()
        assert other.result(10.0)["Y"].tolist() == (2 * sent + 2).tolist()
        assert places(server) == ["wire", "memory", "memory"]
        # Each slot has a block of its own.
        assert session.stats().growths == 2


def test_an_output_for_which_there_is_no_room_comes_over_the_wire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = np.arange(MANY, dtype=np.float32)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with session_on(doubling(), shapes={"X": (MANY,)}) as (server, session):
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            for _ in range(3):
                assert session.infer({"X": sent})["Y"].tolist() == (2 * sent).tolist()
            # An input cannot go another way.
            with pytest.raises(OutOfSharedMemory):
                session.infer({"X": np.zeros(2 * MANY, np.float32)})
        assert places(server) == ["wire"] * 3
        assert session.stats().free == 1
        # Once there is room, and another request is prepared.
        for length in (3, MANY, MANY):
            session.infer({"X": sent[:length]})
        assert places(server)[-1] == "memory"


def test_growth_beyond_the_limit_is_told_and_the_session_goes_on() -> None:
    limit = RegionOptions(max_bytes=8 * PAGE_BYTES, hugepages="never", prefault=False)
    with session_on(doubling(), shapes={"X": (4,)}, region=limit) as (_, session):
        with pytest.raises(OutOfSharedMemory, match="its limit is 32768") as caught:
            session.infer({"X": np.zeros(16 * MANY, np.float32)})
        assert "max_bytes" in caught.value.hint
        for _ in range(2):
            assert session.infer({"X": np.ones(3, np.float32)})["Y"].tolist() == [2] * 3
        assert session.stats().free == 1


def test_bytes_of_unknown_size_come_over_the_wire_unless_the_model_may_run_again() -> (
    None
):
    for rerun, wanted in ((False, ["wire"] * 3), (True, ["wire", "memory", "memory"])):
        with session_on(words(), rerun=rerun) as (server, session):
            for given in ([b"one", b"two"], [b"six", b"ten"], [b"", b"1\0"]):
                came = session.infer({"W": given})
                assert came["W_OUT"].tolist() == given
                assert came["LENGTHS"].tolist() == [len(each) for each in given]
            assert places(server, "W_OUT") == wanted
            # Its size follows from the shapes alone.
            assert places(server, "LENGTHS") == ["wire", "memory", "memory"]


def test_bytes_that_grow_make_the_model_run_again_where_that_is_allowed() -> None:
    with session_on(words(), rerun=True) as (_, session):
        for length in (1, 1, 3 * PAGE_BYTES, 2):
            given = [b"x" * length, b"\0"]
            assert session.infer({"W": given})["W_OUT"].tolist() == given
        assert session.stats().reruns == 1


def test_steps_of_sequences_take_open_outputs_over_the_wire(repeat: Repeat) -> None:
    step = RequestOptions(sequence_id=7)
    with session_on(repeat.model, rerun=True) as (server, session):
        for _ in range(2):
            count_of(session, 3)
        for count in (3, MANY):
            assert count_of(session, count, options=step) == count
        assert places(server) == ["wire", "memory", "wire", "wire"]
        assert repeat.runs == 4


def test_steps_of_sequences_take_fixed_outputs_through_shared_memory() -> None:
    sent = np.ones((1, 4), np.float32)
    with session_on(scores()) as (server, session):
        session.infer({"X": sent}, options=RequestOptions(sequence_id=7))
        assert places(server) == ["memory"]


def test_classes_come_over_the_wire_and_the_output_itself_does_not() -> None:
    sent = np.array([[0.5, 4, 2, 3], [9, 8, 7, 6.25]], np.float32)
    best = RequestOptions(classification={"Y": 2})
    with session_on(scores(), shapes={"X": (4, 4)}) as (server, session):
        for options in (None, best, best, None):
            came = session.infer({"X": sent}, options=options)["Y"]
            if options is None:
                assert came.tolist() == sent.tolist()
            else:
                assert came.tolist() == [
                    [b"4.000000:1", b"3.000000:3"],
                    [b"9.000000:0", b"8.000000:1"],
                ]
        assert places(server) == ["memory", "wire", "wire", "memory"]


def test_classes_of_what_may_be_empty_are_not_asked_for() -> None:
    best = RequestOptions(classification={"Y": 2})
    with session_on(doubling(), shapes={"X": (8,)}) as (server, session):
        with pytest.raises(TensorMismatch, match="'X' has no elements"):
            session.infer({"X": np.zeros(0, np.float32)}, options=best)
        assert asked(server) == []
        came = session.infer({"X": np.ones(3, np.float32)}, options=best)["Y"]
        assert came.tolist() == [b"2.000000:0", b"2.000000:1"]


def test_sizes_of_classes_are_not_learned() -> None:
    best = RequestOptions(classification={"Y": 2})
    sent = np.ones(3, np.float32)
    with session_on(doubling(), shapes={"X": (8,)}) as (server, session):
        for options in (best, None, best, None):
            session.infer({"X": sent}, options=options)
        assert places(server) == ["wire", "wire", "wire", "memory"]


def test_empty_tensors_lie_nowhere() -> None:
    with session_on(doubling(), shapes={"X": (64,)}) as (server, session):
        for length in (0, 3, 0):
            sent = np.ones(length, np.float32)
            assert session.infer({"X": sent})["Y"].tolist() == [2] * length
        inputs = [each.inputs["X"] for each in asked(server)]
        assert inputs == ["nowhere", "memory", "nowhere"]


def test_nothing_of_a_larger_request_is_seen_behind_a_smaller_one() -> None:
    with session_on(doubling(), shapes={"X": (64,)}, outputs={"Y": (64,)}) as (
        _,
        session,
    ):
        session.infer({"X": np.full(64, 9, np.float32)})
        came = session.infer({"X": np.ones(2, np.float32)})["Y"]
        assert came.tolist() == [2, 2]
        with session.lease() as lease:
            assert lease["X"].shape == (64,)
