"""Memory of others beside ours: cleaning touches neither files nor registrations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import control
from shmlane.inventory import ask_server, clean_up, list_regions
from shmlane.regions import PAGE_BYTES
from shmlane.testing import ScriptedServer, sink_model
from shmlane.wire import HttpRequests
from tests.unit.dead_regions import left_behind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

# Of the Python backend, of perf_analyzer, of Python itself, and of our name elsewhere.
OTHERS = [
    "triton_python_backend_shm_region_1",
    "INPUT__0_0_0",
    "psm_2a",
    "my.shmlane.x",
]


@pytest.fixture
def server(folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()], shm_directory=folder) as server:
        yield server


def register(server: ScriptedServer, name: str, file: str) -> None:
    """What another client does."""

    def talk(requests: HttpRequests) -> control.Talk[None]:
        reply = yield from control.ask(requests.register(name, f"/{file}", PAGE_BYTES))
        assert reply.status == 200, reply.body

    ask_server(server.url, talk)


@pytest.mark.parametrize("force", [False, True])
def test_cleaning_leaves_files_and_registrations_of_others(
    folder: Path, server: ScriptedServer, force: bool
) -> None:
    for other in OTHERS:
        (folder / other).write_bytes(bytes(PAGE_BYTES))
        register(server, f"of.{other}", other)
    ours = left_behind(folder, "dead", server.url)
    assert [each.name for each in list_regions()] == [ours.name]
    cleaned = clean_up(force=force)
    assert cleaned.files == [ours.name]
    assert cleaned.registrations == [f"{ours.name}.0.0"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(OTHERS)
    assert sorted(server.regions) == sorted(f"of.{other}" for other in OTHERS)


def test_a_registration_of_our_file_under_another_name_is_not_ours(
    folder: Path, server: ScriptedServer
) -> None:
    ours = left_behind(folder, "dead", server.url)
    # Who made it may still use it; the memory lives on with the registration.
    register(server, "theirs", f"/{ours.name}")
    register(server, f"{ours.name}x.0.0", f"//{ours.name}")
    assert clean_up().registrations == [f"{ours.name}.0.0"]
    assert sorted(server.regions) == [f"{ours.name}x.0.0", "theirs"]


def test_a_registration_in_our_name_of_another_file_is_not_ours(
    folder: Path, server: ScriptedServer
) -> None:
    ours = left_behind(folder, "dead", server.url, registered=False)
    (folder / "theirs").write_bytes(bytes(PAGE_BYTES))
    register(server, f"{ours.name}.0.0", "theirs")
    assert clean_up().registrations == []
    assert list(server.regions) == [f"{ours.name}.0.0"]
