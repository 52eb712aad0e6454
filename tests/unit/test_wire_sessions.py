"""Sessions without shared memory: nothing is left anywhere, and nothing is copied."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmlane import (
    Connection,
    InferFailed,
    InferTimeout,
    InputMissing,
    RequestLost,
    Session,
    TensorMismatch,
)
from shmlane.testing import Close, ScriptedServer, Status
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import Array
from tests.unit.asked import asked, doubling, scores, session_on, slots_of
from tests.unit.children import run_python
from tests.unit.one_slot import files_of

ROW = np.arange(4, dtype=np.float32)[None]


@pytest.fixture
def pair() -> Iterator[tuple[ScriptedServer, Session]]:
    with session_on(doubling(), memory="wire", slots=2) as (server, session):
        yield server, session
        assert files_of(server) == []
        assert server.regions == {}
    assert not any("shared" in request.path for request in server.requests)


def ask(session: Session, sent: Array, **told: Any) -> None:
    assert session.infer({"X": sent}, **told)["Y"].tolist() == (2 * sent).tolist()


def test_everything_goes_with_requests_and_replies(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    for length in (3, 3, 5000, 1, 0, 3):
        ask(session, np.arange(length, dtype=np.float32))
    for each in asked(server):
        assert each.inputs["X"] in ("wire", "nowhere")
        assert each.outputs == {"Y": "wire"}
    stats = session.stats()
    assert (stats.slots, stats.free) == (2, 2)
    assert (stats.shared_bytes, stats.registrations, stats.connections) == (0, 0, 1)
    assert (stats.retries, stats.late, stats.lost, stats.drains) == (0, 0, 0, 0)


def test_leases_are_used_as_ever(pair: tuple[ScriptedServer, Session]) -> None:
    _, session = pair
    with session.lease() as lease:
        with pytest.raises(InputMissing):
            lease.infer()
        lease.view("X", (3,))[...] = (1, 2, 3)
        result = lease.infer()
        assert result["Y"].tolist() == [2, 4, 6]
        kept = result["Y"]
        kept += 1
        lease["X"][0] = 5
        assert lease.infer()["Y"].tolist() == [10, 4, 6]
        lease.write("X", np.arange(5000, dtype=np.float32)[::-1])
        assert lease.infer()["Y"][:2].tolist() == [9998, 9996]
        assert kept.tolist() == [3, 5, 7]


def test_an_array_is_sent_from_where_it_lies_and_let_go_of(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    sent = np.arange(1 << 18, dtype=np.float32)
    with ThreadPoolExecutor(1) as pool, server.hold():
        answer = pool.submit(session.infer, {"X": sent})
        server.wait_for(1)
        lent = [slot.inputs["X"].lent for slot in slots_of(session)]
        assert [each is sent for each in lent if each is not None] == [True]
        del lent
        server.release()
        assert answer.result(10.0)["Y"].tolist() == (2 * sent).tolist()
    del answer
    gone = weakref.ref(sent)
    del sent
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("ending", ["refused", "late", "lost", "mistaken"])
def test_an_array_is_let_go_of_however_the_call_ends(
    pair: tuple[ScriptedServer, Session], ending: str
) -> None:
    server, session = pair
    sent = np.arange(1 << 10, dtype=np.float32)
    inputs: dict[str, Any] = {"X": sent}
    error: type[Exception] = InferFailed
    limit = 10.0
    if ending == "refused":
        server.script(Status(400, '{"error":"no"}', model_runs=False))
    elif ending == "lost":
        error = RequestLost
        server.script(Close())
    elif ending == "mistaken":
        error = KeyError
        inputs["other"] = sent
    else:
        error, limit = InferTimeout, 0.1
        server.hold()
    with pytest.raises(error):
        session.infer(inputs, timeout=limit)
    # Nothing is waited for.
    assert session.stats().free == 2
    server.release()
    gone = weakref.ref(sent)
    del sent, inputs
    gc.collect()
    assert gone() is None
    ask(session, np.ones(3, np.float32))


def test_what_was_lent_is_not_sent_by_the_next_lease() -> None:
    with session_on(scores(), memory="wire") as (server, session):
        three = np.full((3, 4), 3, np.float32)
        for _ in range(2):
            assert session.infer({"X": three})["Y"].tolist() == three.tolist()
            with session.lease() as lease:
                with pytest.raises(InputMissing):
                    lease.infer()
                assert lease["X"].shape == (1, 4)
                lease["X"][...] = ROW
                assert lease.infer()["Y"].tolist() == ROW.tolist()
        sizes = [len(each.body) for each in server.requests if each.is_inference]
        assert sizes[0] - sizes[1] == sizes[2] - sizes[3] == 2 * 4 * 4


SOURCES: dict[str, Any] = {
    "as it is": ROW,
    "every other": np.repeat(ROW, 2, axis=1)[:, ::2],
    "backwards": ROW[:, ::-1],
    "big-endian": ROW.astype(">f4"),
    "list": ROW.tolist(),
    "read-only": np.frombuffer(ROW.tobytes(), np.float32).reshape(1, 4),
    "Fortran": np.asfortranarray(np.repeat(ROW, 3, axis=0)),
    "view": memoryview(ROW.data),
    "subclass": ROW.view(np.matrix),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("memory", ["wire", "system"])
def test_an_array_of_any_kind_is_sent_right(memory: str, source: Any) -> None:
    wanted = np.asarray(source, np.float32).tolist()
    with session_on(scores(), memory=memory, shapes={"X": (4, 4)}) as (_, session):
        for _ in range(2):
            assert session.infer({"X": source})["Y"].tolist() == wanted


@pytest.mark.parametrize("shape", [(5, 4), (1, 3), (4,), (1, 4, 1), ()])
def test_a_shape_that_the_model_forbids_is_not_sent(shape: tuple[int, ...]) -> None:
    with session_on(scores(), memory="wire") as (server, session):
        with pytest.raises(TensorMismatch, match="'X' cannot have shape"):
            session.infer({"X": np.zeros(shape, np.float32)})
        with pytest.raises(TensorMismatch, match="float64"):
            session.infer({"X": ROW.astype(float)})
        assert asked(server) == []
        assert session.infer({"X": ROW})["Y"].tolist() == ROW.tolist()


def test_outputs_are_the_callers_own(pair: tuple[ScriptedServer, Session]) -> None:
    _, session = pair
    first = session.infer({"X": np.ones(1 << 16, np.float32)})["Y"]
    second = session.infer({"X": np.zeros(1 << 16, np.float32)})["Y"]
    assert set(first.tolist()) == {2}
    assert set(second.tolist()) == {0}
    assert first.flags.writeable
    assert second.flags.writeable
    assert not np.shares_memory(first, second)


def test_a_slot_is_free_at_once_when_its_caller_gives_up(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    with server.hold():
        for number in range(5):
            given_up(lambda limit: ask(session, np.ones(3, np.float32), timeout=limit))
            stats = session.stats()
            assert (stats.free, stats.late, stats.lost) == (2, 0, 0)
            # It runs on, for nobody.
            server.wait_for(number + 1)
    for value in range(4):
        ask(session, np.full(3, value, np.float32))
    eventually(lambda: server.in_model == 0)
    assert session.stats().late_replies == 0


def test_a_lost_request_is_sent_again_where_that_is_allowed() -> None:
    replay = Connection(replay=True)
    with session_on(doubling(), memory="wire", connection=replay) as (server, session):
        server.script(Close())
        ask(session, np.ones(3, np.float32))
        assert len(asked(server)) == 2
        assert session.stats().drains == 0


def test_a_session_closes_with_requests_in_flight(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    sent = np.ones(3, np.float32)
    with ThreadPoolExecutor(1) as pool, server.hold():
        answer = pool.submit(session.infer, {"X": sent})
        server.wait_for(1)
        closing = pool.submit(session.close)
        server.release()
        assert answer.result(10.0)["Y"].tolist() == [2, 2, 2]
        closing.result(10.0)
    assert session.stats().free == 2


def test_views_outlive_the_session(pair: tuple[ScriptedServer, Session]) -> None:
    _, session = pair
    with session.lease() as lease:
        view = lease.view("X", (3,))
        view[...] = 7
        result = lease.infer()["Y"]
    assert session.stats().pinned == 1
    session.close()
    del lease
    gc.collect()
    assert view.tolist() == [7, 7, 7]
    assert result.tolist() == [14, 14, 14]


def test_slots_are_warmed_up_over_the_wire() -> None:
    with session_on(scores(), memory="wire", slots=3) as (server, session):
        session.warmup()
        assert len(asked(server)) == 3
        assert session.stats().connections == 3


def test_a_server_without_shared_memory_is_not_asked_about_any(tmp_path: Path) -> None:
    told = {
        "version": "2.70.0",
        "shm_directory": tmp_path,
        "restricted_header": ("k", "v"),
        "restricted_apis": ("shared-memory",),
    }
    with session_on(scores(), server=told, memory="wire") as (server, session):
        assert session.infer({"X": ROW})["Y"].tolist() == ROW.tolist()
        session.close()
        assert not any("shared" in request.path for request in server.requests)


FORKS = """
import os, sys
import numpy as np
from shmlane import ForkedSession, Session

row = np.ones((1, 4), np.float32)
with Session(sys.argv[1], "scores", memory="wire", slots=1) as session:
    session.infer({"X": row})
    child = os.fork()
    if child == 0:
        try:
            session.infer({"X": row})
        except ForkedSession:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert session.infer({"X": row})["Y"].tolist() == row.tolist()
    print(session.stats().connections)
"""


def test_an_open_session_refuses_in_a_forked_child() -> None:
    with ScriptedServer([scores()]) as server:
        assert run_python(FORKS, server.url) == "1\n"
