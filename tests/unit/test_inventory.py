"""What the dead left: asked about, taken back, and kept where nobody can tell."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.inventory import ANY_SERVER, clean_up, list_regions
from shmlane.testing import Answer, Close, Delay, ScriptedServer, Status, sink_model
from tests.polling import eventually
from tests.unit.dead_regions import left_behind, register

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

KEY = {"X-Key": "secret"}
IN_USE = Status(400, '{"error": "it is in use"}', model_runs=False)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files away"
)


@pytest.fixture
def server(folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()], shm_directory=folder) as server:
        yield server


@pytest.fixture
def restricted(folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(
        [sink_model()], shm_directory=folder, restricted_header=("X-Key", "secret")
    ) as server:
        yield server


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """What a silent server waits for."""
    go = threading.Event()
    yield go
    go.set()


def listings(server: ScriptedServer) -> int:
    return sum(
        request.path.endswith("systemsharedmemory/status")
        for request in server.requests
    )


# --- servers --------------------------------------------------------------------------


def test_a_server_is_asked_for_all_that_is_dead_at_once(
    folder: Path, server: ScriptedServer
) -> None:
    paths = [left_behind(folder, str(number), server.url) for number in range(6)]
    cleaned = clean_up()
    assert sorted(cleaned.files) == [path.name for path in paths]
    assert sorted(cleaned.registrations) == [f"{path.name}.0.0" for path in paths]
    assert cleaned.kept == {}
    # Before the files go, and after.
    assert (dict(server.regions), listings(server)) == ({}, 2)
    assert not any(path.exists() for path in paths)


def test_a_registration_of_the_dead_that_comes_late_is_taken_back(
    folder: Path, server: ScriptedServer
) -> None:
    dead = left_behind(folder, "a", server.url, registered=False)

    def register_late(reply: bytes) -> bytes:
        # It lay in a socket of the server until now, and its name is not in the reply.
        register(dead, server.url)
        return reply

    server.script(Answer(register_late), path="systemsharedmemory/status")
    cleaned = clean_up()
    assert cleaned.files == [dead.name]
    assert cleaned.registrations == [f"{dead.name}.0.0"]
    assert not server.regions


def test_a_server_that_failed_once_is_not_asked_again(
    folder: Path, server: ScriptedServer, go: threading.Event
) -> None:
    names = [
        left_behind(folder, str(number), server.url, registered=False).name
        for number in range(300)
    ]
    # It would answer a second time.
    server.script(Delay(go), path="/v2")
    cleaned = clean_up(limit=0.1)
    assert cleaned.files == []
    assert sorted(cleaned.kept) == sorted(names)
    assert set(cleaned.kept.values()) == {f"its server {server.url} does not answer"}
    eventually(lambda: server.requests, "the first request is read")
    assert len(server.requests) == 1
    go.set()
    assert sorted(clean_up().files) == sorted(names)


def test_a_silent_server_does_not_keep_what_others_know(
    folder: Path, server: ScriptedServer, go: threading.Event
) -> None:
    with ScriptedServer([sink_model()], shm_directory=folder) as other:
        silent = left_behind(folder, "silent", server.url)
        left_behind(folder, "other", other.url)
        server.script(Delay(go), path="/v2")
        cleaned = clean_up(limit=0.1)
        assert (cleaned.files, list(cleaned.kept)) == (["shmlane.other"], [silent.name])
        assert not other.regions
    assert list(server.regions) == [f"{silent.name}.0.0"]


def test_a_region_in_use_by_a_request_of_the_dead_keeps_no_other(
    folder: Path, server: ScriptedServer
) -> None:
    for name in "abc":
        left_behind(folder, name, server.url)
    server.script(IN_USE, IN_USE, path="shmlane.a.0.0/unregister")
    cleaned = clean_up()
    assert sorted(cleaned.files) == ["shmlane.b", "shmlane.c"]
    assert list(cleaned.kept) == ["shmlane.a"]
    assert "it is in use" in cleaned.kept["shmlane.a"]
    assert list(server.regions) == ["shmlane.a.0.0"]
    assert clean_up().files == ["shmlane.a"]


def test_a_restricted_server_keeps_its_regions_until_it_is_told_the_header(
    folder: Path, restricted: ScriptedServer
) -> None:
    left_behind(folder, "a", restricted.url, headers=KEY)
    cleaned = clean_up()
    assert (cleaned.files, list(cleaned.kept)) == ([], ["shmlane.a"])
    assert "restricted" in cleaned.kept["shmlane.a"]
    # Its refusal holds for all: it is not asked for one after the other.
    assert listings(restricted) == 1
    assert clean_up(headers={"elsewhere:8000": KEY}).files == []
    assert clean_up(headers={restricted.url: KEY}).files == ["shmlane.a"]
    assert not restricted.regions


def test_headers_for_any_server_are_sent_where_there_are_no_others(
    folder: Path, restricted: ScriptedServer
) -> None:
    left_behind(folder, "a", restricted.url, headers=KEY)
    wrong = {ANY_SERVER: KEY, restricted.url: {"X-Key": "wrong"}}
    assert clean_up(headers=wrong).files == []
    assert clean_up(headers={ANY_SERVER: KEY}).files == ["shmlane.a"]
    assert not restricted.regions


def test_a_server_without_client_shared_memory_knows_of_nothing(folder: Path) -> None:
    with ScriptedServer([sink_model()], version="2.70.0") as server:
        left_behind(folder, "a", server.url, registered=False)
        assert clean_up().files == ["shmlane.a"]


def test_a_server_that_ended_knows_of_nothing(
    folder: Path, server: ScriptedServer
) -> None:
    left_behind(folder, "a", server.url)
    server.stop()
    assert clean_up().files == ["shmlane.a"]


def test_only_one_server_is_asked_if_told_so(
    folder: Path, server: ScriptedServer
) -> None:
    left_behind(folder, "a", server.url)
    cleaned = clean_up(only="elsewhere:8000")
    assert (cleaned.files, cleaned.kept) == ([], {})
    assert listings(server) == 0
    assert clean_up(only=server.url).files == ["shmlane.a"]


def test_by_force_files_go_that_a_silent_server_may_know(
    folder: Path, server: ScriptedServer, go: threading.Event
) -> None:
    path = left_behind(folder, "a", server.url)
    server.script(Delay(go), path="/v2")
    cleaned = clean_up(limit=0.1, force=True)
    assert (cleaned.files, cleaned.kept) == (["shmlane.a"], {})
    assert not path.exists()


# --- headers --------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 99])
def test_a_region_of_another_version_is_kept_and_told(
    folder: Path, server: ScriptedServer, version: int
) -> None:
    path = left_behind(folder, "new", server.url, version=version)
    cleaned = clean_up()
    assert cleaned.files == []
    assert f"version {version}; this shmlane reads" in cleaned.kept[path.name]
    assert path.exists()
    assert server.regions
    assert clean_up(force=True).files == [path.name]


def test_a_region_whose_header_is_cut_short_is_kept(
    folder: Path, server: ScriptedServer
) -> None:
    path = left_behind(folder, "cut", server.url)
    os.truncate(path, 100)
    assert list(clean_up().kept) == [path.name]


def test_a_header_of_megabytes_is_read(folder: Path, server: ScriptedServer) -> None:
    path = left_behind(folder, "long", server.url, model="m" * (3 << 20))
    (info,) = list_regions()
    assert (info.server, info.registered) == (server.url, 1)
    assert clean_up().files == [path.name]
    assert not server.regions


def test_a_file_that_does_not_begin_as_a_region_was_never_registered(
    folder: Path,
) -> None:
    for name, data in [("a", b""), ("b", b"shmlane"), ("c", b"SHMLANE\0" * 9)]:
        (folder / f"shmlane.{name}").write_bytes(data)
    assert sorted(clean_up().files) == ["shmlane.a", "shmlane.b", "shmlane.c"]


def test_files_are_whose_rights_this_process_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are made with those of the effective user."""
    left_behind(folder, "a", "", registered=False)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (info,) = list_regions()
    assert info.is_own
    assert clean_up().files == ["shmlane.a"]


# --- files of others ------------------------------------------------------------------


def test_regions_are_listed_with_what_their_server_knows(
    folder: Path, server: ScriptedServer
) -> None:
    left_behind(folder, "a", server.url)
    (info,) = list_regions()
    assert (info.alive, info.pid, info.model, info.slots) == (False, 7, "m", 1)
    assert (info.is_own, info.server, info.registered) == (True, server.url, 1)


def test_a_server_that_does_not_tell_is_said_to_be_gone_silent_or_refusing(
    folder: Path, server: ScriptedServer, restricted: ScriptedServer
) -> None:
    left_behind(folder, "a", restricted.url, headers=KEY)
    with ScriptedServer([sink_model()], shm_directory=folder) as gone:
        left_behind(folder, "b", gone.url)
    left_behind(folder, "c", server.url)
    left_behind(folder, "d", f"unix://{folder}/none.sock", registered=False)
    server.script(Close(), path="/v2")
    told = [(info.server_trouble, info.registered) for info in list_regions()]
    assert told == [("refuses", None), ("gone", None), ("silent", None), ("gone", None)]
    # Nobody knows of what a server that is gone knew.
    assert sorted(clean_up().files) == ["shmlane.b", "shmlane.c", "shmlane.d"]


def test_where_clients_may_not_register_nothing_is_registered(folder: Path) -> None:
    with ScriptedServer([sink_model()], version="2.70.0") as server:
        left_behind(folder, "a", server.url, registered=False)
        (info,) = list_regions()
        assert (info.server_trouble, info.registered) == (None, 0)


@needs_root
def test_no_server_is_asked_that_only_another_users_file_names(
    folder: Path, server: ScriptedServer
) -> None:
    path = left_behind(folder, "theirs", server.url, registered=False)
    os.chown(path, 65534, 65534)
    (info,) = list_regions()
    assert (info.is_own, info.server, info.registered) == (False, server.url, None)
    assert clean_up().files == []
    assert server.requests == ()


def test_a_header_may_say_anything(folder: Path) -> None:
    path = left_behind(folder, "a", "h:1", registered=False)
    data = path.read_bytes()
    lies = data.replace(b'"pid": 7', b'"pid":[]').replace(b'"m"', b"[1]")
    path.write_bytes(lies.replace(b'"h:1"', b"{   }"))
    (info,) = list_regions()
    assert (info.pid, info.server, info.model, info.slots) == (None, None, None, 1)
