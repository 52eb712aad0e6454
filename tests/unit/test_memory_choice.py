"""`memory=`: shared where the server sees it, else the wire, with one warning."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmlane import (
    AccessRestricted,
    Connection,
    ModelNotReady,
    OutOfSharedMemory,
    RegionNotVisible,
    ServerUnreachable,
    Session,
    SharedMemoryDisabled,
    ShmlaneError,
    UsageError,
    WireFallback,
)
from shmlane.testing import ScriptedServer
from tests.unit.asked import QUICK, places, scores
from tests.unit.one_slot import files_of
from tests.unit.scripted import SMALL

ROW = np.arange(4, dtype=np.float32)[None]
MEMORY = ["system", "wire", "auto"]


class Case(NamedTuple):
    """Why shared memory cannot be used, and what the error and the warning say."""

    error: type[ShmlaneError]
    words: str
    server: Mapping[str, Any] = MappingProxyType({})
    has_room: bool = True


CASES = {
    "disabled": Case(
        SharedMemoryDisabled, "--allow-client-shm=true", {"version": "2.70.0"}
    ),
    "restricted": Case(
        AccessRestricted,
        "restricted",
        {
            "restricted_header": ("x-key", "secret"),
            "restricted_apis": ("shared-memory",),
        },
    ),
    "not visible": Case(
        RegionNotVisible, "--ipc=host", {"shm_directory": Path("/nowhere")}
    ),
    "no room": Case(OutOfSharedMemory, "too little room", has_room=False),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Case:
    case: Case = request.param
    if "shm_directory" in case.server:
        case = case._replace(server={"shm_directory": tmp_path})
    if not case.has_room:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    return case


@pytest.fixture
def server(case: Case) -> Iterator[ScriptedServer]:
    with ScriptedServer([scores()], **case.server) as server:
        yield server
        assert (server.regions, files_of(server)) == ({}, [])


def session_of(server: ScriptedServer, **options: Any) -> Session:
    told = {"memory": "auto", "slots": 2, "timeouts": QUICK, "region": SMALL}
    arguments: dict[str, Any] = told | options
    return Session(server.url, "scores", **arguments)


def serves_over_the_wire(server: ScriptedServer, session: Session) -> None:
    for value in range(3):
        came = session.infer({"X": ROW + value})["Y"]
        assert came.tolist() == (ROW + value).tolist()
    assert set(places(server)) == {"wire"}
    stats = session.stats()
    assert (stats.free, stats.shared_bytes, stats.registrations) == (2, 0, 0)


def open_and_use(server: ScriptedServer, session: Session) -> None:
    with session:
        serves_over_the_wire(server, session)
        session.open()


def test_shared_memory_that_cannot_be_used_is_an_error_where_it_was_asked_for(
    server: ScriptedServer, case: Case
) -> None:
    with pytest.raises(case.error, match=case.words):
        session_of(server, memory="system").open()


def test_the_wire_is_taken_with_one_warning_that_says_why(
    server: ScriptedServer, case: Case
) -> None:
    session = session_of(server)
    with pytest.warns(WireFallback, match=case.words) as caught:
        open_and_use(server, session)
    (warning,) = caught
    assert "session for 'scores': tensors go over the wire" in str(warning.message)
    assert warning.filename == __file__


def test_the_wire_that_was_asked_for_is_no_reason_to_warn(
    server: ScriptedServer, case: Case
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with session_of(server, memory="wire") as session:
            serves_over_the_wire(server, session)


def test_a_warning_that_is_an_error_leaves_nothing_open(
    server: ScriptedServer, case: Case
) -> None:
    session = session_of(server)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WireFallback, match=case.words):
            session.open()
    session.close()
    assert session.stats().slots == 0


# --- who is told ----------------------------------------------------------------------


def enter(session: Session) -> None:
    with session:
        pass


def lease(session: Session) -> None:
    with session.lease():
        pass


def open_at_once(session: Session) -> None:
    session.open()


WAYS: list[Callable[[Session], object]] = [
    open_at_once,
    enter,
    lease,
    lambda session: session.infer({"X": ROW}),
    lambda session: session.metadata,
    lambda session: session.warmup(),
]


@pytest.mark.parametrize(
    "use", WAYS, ids=["open", "with", "lease", "infer", "metadata", "warmup"]
)
def test_the_warning_points_at_whoever_opens_the_session(
    use: Callable[[Session], object],
) -> None:
    with ScriptedServer([scores()], version="2.70.0") as server:
        session = session_of(server)
        with pytest.warns(WireFallback) as caught:
            use(session)
        session.close()
    (warning,) = caught
    assert warning.filename == __file__
    assert warning.lineno in _lines_of(use)


def _lines_of(use: Callable[[Session], object]) -> set[int]:
    code = use.__code__
    return {line for _, _, line in code.co_lines() if line is not None}


# --- where all is well ----------------------------------------------------------------


def test_memory_that_the_server_sees_is_shared_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ScriptedServer([scores()]) as server, session_of(server) as session:
            assert session.infer({"X": ROW})["Y"].tolist() == ROW.tolist()
            assert places(server) == ["memory"]
            assert session.stats().registrations == 2
            assert session.stats().shared_bytes > 0


def test_other_errors_are_no_reason_to_take_the_wire() -> None:
    with ScriptedServer([scores()]) as server:
        with pytest.raises(ModelNotReady):
            Session(server.url, "other", memory="auto").open()
        with pytest.raises(UsageError, match="there is no input 'Z'"):
            session_of(server, shapes={"Z": (1,)}).open()
    with pytest.raises(ServerUnreachable):
        session_of(server).open()


def test_a_header_that_opens_the_restricted_api_opens_shared_memory() -> None:
    told = CASES["restricted"].server
    connection = Connection(headers={"x-key": "secret"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            ScriptedServer([scores()], **told) as server,
            session_of(server, connection=connection) as session,
        ):
            session.infer({"X": ROW})
            assert places(server) == ["memory"]


@pytest.mark.parametrize(
    "memory", ["", "System", "shm", "gpu", None, True, 0, b"wire", ["wire"], "cuda:0"]
)
def test_a_kind_of_memory_that_is_none_is_refused(memory: Any) -> None:
    with pytest.raises(UsageError, match=r"^memory=") as caught:
        Session("localhost:8000", "m", memory=memory)
    assert repr(memory) in str(caught.value)
    assert "'system', 'wire', 'auto'" in str(caught.value)
    is_cuda = str(memory).startswith("cuda")
    assert ("CUDA memory" in caught.value.hint) is is_cuda


@pytest.mark.parametrize("memory", MEMORY)
def test_kinds_of_memory_are_taken_without_a_server(memory: str) -> None:
    assert "not open" in repr(Session("localhost:8000", "m", memory=memory))


@pytest.mark.parametrize("rerun", [0, 1, "yes", []])
def test_whether_a_model_may_run_again_is_true_or_false(rerun: Any) -> None:
    with pytest.raises(UsageError, match=r"rerun=.* must be a bool"):
        Session("localhost:8000", "m", rerun=rerun)
