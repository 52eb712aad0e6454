"""A client killed at every step of its life: whoever comes next removes all of it.

In a folder in place of /dev/shm: whoever lists the regions of a machine holds each
for a moment, and who cleans just then takes it for one in use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmlane import Session
from shmlane.inventory import clean_up
from shmlane.testing import ScriptedServer, sink_model
from tests.polling import eventually
from tests.unit.children import Child, started

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm"),
    pytest.mark.usefixtures("thorough"),
]

# For each number that it is told, a child of it lives until its step of that number.
CLIENTS = """
import os, signal, sys
import numpy as np
import shmlane
from shmlane import regions

regions.SHM_DIRECTORY = sys.argv[2]
STEPS = {"send", "recv", "link", "unlink", "posix_fallocate", "flock"}

def live():
    session = shmlane.Session(
        sys.argv[1], "sink", slots=2, shapes={"INPUT__0": (1, 1, 1, 4)}
    )
    for size in (4, 2000, 4, 8000):
        array = np.full((1, 1, 1, size), size, np.float32)
        assert session.infer({"INPUT__0": array})["OUTPUT__0"] == [size]
    session.close()

def live_until(step):
    left = step

    def look(_frame, event, function):
        nonlocal left
        if event != "call" and getattr(function, "__name__", "") in STEPS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)
    live()
    os._exit(0)

print(flush=True)
for line in sys.stdin:
    client = os.fork()
    if not client:
        live_until(int(line))
    print(os.waitstatus_to_exitcode(os.waitpid(client, 0)[1]), flush=True)
"""


@pytest.fixture
def server(folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()], shm_directory=folder) as server:
        yield server


@pytest.fixture
def clients(folder: Path, server: ScriptedServer) -> Iterator[Child]:
    with started(CLIENTS, server.url, str(folder)) as clients:
        assert clients.hear() == ""
        yield clients


def by_cleaning(server: ScriptedServer) -> None:
    assert clean_up(only=server.url).kept == {}


def by_the_next_session(server: ScriptedServer) -> None:
    Session(server.url, "sink", slots=1).open().close()


@pytest.mark.parametrize("removed", [by_cleaning, by_the_next_session])
def test_nothing_is_left_of_a_client_wherever_it_was_killed(
    folder: Path,
    server: ScriptedServer,
    clients: Child,
    removed: Callable[[ScriptedServer], None],
) -> None:
    before = threading.active_count()
    left_something = 0
    for step in range(400):
        clients.tell(str(step))
        code = clients.hear()
        if code == "0":
            break
        assert code == "-9"
        # What it had sent is done: nothing may be registered behind the cleaning.
        eventually(lambda: threading.active_count() <= before)
        left_something += any(folder.iterdir())
        removed(server)
        assert not list(folder.iterdir()), step
        assert not server.regions, step
    assert code == "0"
    assert step > left_something > 20
