"""Clients that end without closing: what they leave, and who removes it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import Session
from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import (
    CLIENT_TIMEOUT,
    all_free,
    kill,
    region_files,
    registered,
    sink,
    start_client,
    stopped,
)

pytestmark = pytest.mark.usefixtures("no_leftovers", "thorough")

# Holds a lease whose input has grown, and infers once for each line that it is sent.
CLIENT = """
import sys, warnings, shmlane
warnings.simplefilter("ignore", ResourceWarning)
session = shmlane.Session(sys.argv[1], "sink", shapes={"INPUT__0": (1, 1, 1, 4)})
lease = session.lease()
lease.view("INPUT__0", (1, 1, 1, 4000))[...] = 5
view = lease.infer()["OUTPUT__0"]
assert view == [5]
print(flush=True)
sys.stdin.readline()
"""
INFER = "lease.infer(); print(flush=True); sys.stdin.readline()"
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with session, lease:
    lease.infer()
"""
IN_A_THREAD = """
import threading
threading.Thread(target=lease.infer, daemon=True).start()
while not session.stats().in_flight:
    pass
"""


@pytest.fixture(scope="module")
def stoppable_server() -> Iterator[TritonServer]:
    """A server that tests stop for a while."""
    with TritonServer() as server:
        yield server


@contextlib.contextmanager
def client(server: TritonServer, rest: str = INFER) -> Iterator[subprocess.Popen[str]]:
    """A client that holds a lease and goes on with `rest` when it is told to."""
    process = start_client(CLIENT + rest, server.http_url)
    try:
        await_line(process)
        yield process
    finally:
        kill(process)


def await_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "\n":
        pytest.fail(f"the client failed: {process.communicate()}")


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it had to say."""
    _, errors = process.communicate("\n", timeout=CLIENT_TIMEOUT)
    return process.returncode, errors


def regions_of(process: subprocess.Popen[str]) -> set[Path]:
    """The region files that a process made."""
    made = set()
    for path in region_files():
        with contextlib.suppress(FileNotFoundError, RegionError):
            header = RegionHeader.parse(path.read_bytes())
            if header.description["pid"] == process.pid:
                made.add(path)
    return made


def known(server: TritonServer, regions: set[Path]) -> set[str]:
    """Registrations of these regions that the server still has."""
    names = {path.name for path in regions}
    return {name for name in registered(server) if name.rsplit(".", 2)[0] in names}


def is_in_flight(path: Path) -> bool:
    """Whether the region says that the server may write to it."""
    data = path.read_bytes()
    header = RegionHeader.parse(data)
    return any(data[header.record_offset(index)] for index in range(header.slots))


# --- killed ---------------------------------------------------------------------------


def test_the_next_session_removes_what_a_killed_client_left(
    server: TritonServer,
) -> None:
    with client(server) as process:
        left = regions_of(process)
    # One for its slots and one for the input that has grown.
    assert len(left) == 2
    assert left <= region_files()
    assert len(known(server, left)) == 5
    with Session(server.http_url, "sink") as session:
        assert not left & region_files()
        assert not known(server, left)
        assert sink(session, 1) == 1


def test_a_living_client_is_left_alone(server: TritonServer) -> None:
    with client(server) as process:
        held = regions_of(process)
        with Session(server.http_url, "sink") as session:
            assert sink(session, 1) == 1
            assert held <= region_files()
            assert len(known(server, held)) == 5
        go_on(process)
        await_line(process)
    Session(server.http_url, "sink").open().close()
    assert not held & region_files()
    assert not known(server, held)


def test_a_client_killed_in_flight_is_cleaned_up_after_its_request(
    stoppable_server: TritonServer,
) -> None:
    with client(stoppable_server) as process:
        left = regions_of(process)
        with stopped(stoppable_server):
            go_on(process)
            eventually(lambda: any(map(is_in_flight, left)), "a request is in flight")
            kill(process)

    eventually(lambda: not left_after_cleaning(stoppable_server, left))
    assert not known(stoppable_server, left)


def test_a_stopped_server_of_the_dead_keeps_no_session_from_opening(
    server: TritonServer, stoppable_server: TritonServer
) -> None:
    with client(stoppable_server) as process:
        left = regions_of(process)
    with stopped(stoppable_server), Session(server.http_url, "sink") as session:
        assert sink(session, 3) == 3
        assert left <= region_files()
    Session(stoppable_server.http_url, "sink").open().close()
    assert not left & region_files()


# --- ended ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "sys.exit()",
        "del lease, view",
        "session.close()",
        "del session; lease.release()",
        "del session, lease, view",
    ],
)
def test_a_program_that_ends_leaves_nothing(server: TritonServer, rest: str) -> None:
    with client(server, rest) as process:
        made = regions_of(process)
        assert end(process) == (0, "")
    assert len(made) == 2
    assert not made & region_files()
    assert not known(server, made)


def test_a_program_that_fails_leaves_nothing(server: TritonServer) -> None:
    with client(server, "1 / 0") as process:
        made = regions_of(process)
        code, errors = end(process)
    assert code == 1
    assert errors.endswith("ZeroDivisionError: division by zero\n")
    assert not made & region_files()
    assert not known(server, made)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 3)]
)
def test_a_program_interrupted_in_flight_leaves_nothing(
    stoppable_server: TritonServer, number: signal.Signals, code: int
) -> None:
    with client(stoppable_server, INTERRUPTIBLE) as process:
        made = regions_of(process)
        with stopped(stoppable_server):
            go_on(process)
            eventually(lambda: any(map(is_in_flight, made)), "a request is in flight")
            process.send_signal(number)
        assert end(process)[0] == code
    assert not made & region_files()
    assert not known(stoppable_server, made)


def test_a_program_ends_though_a_stopped_server_owes_it_a_reply(
    stoppable_server: TritonServer,
) -> None:
    with client(stoppable_server, IN_A_THREAD) as process:
        made = regions_of(process)
        with stopped(stoppable_server):
            assert end(process) == (0, "")
    # Nobody could tell the server: the files are there to say whose its regions are.
    assert made & region_files()
    eventually(lambda: not left_after_cleaning(stoppable_server, made))
    assert not known(stoppable_server, made)


def left_after_cleaning(server: TritonServer, made: set[Path]) -> set[Path]:
    """What is left of these files once a session has opened and closed."""
    with Session(server.http_url, "sink") as session:
        assert sink(session, 2) == 2
        all_free(session)
    return made & region_files()


# --- dropped --------------------------------------------------------------------------


def test_a_dropped_session_warns_and_leaves_nothing(server: TritonServer) -> None:
    before = registered(server)
    with pytest.warns(ResourceWarning, match=r"Session 'sink'.*dropped without close"):
        Session(server.http_url, "sink", slots=3).open()
    assert registered(server) <= before


def test_views_survive_the_session_that_was_dropped(server: TritonServer) -> None:
    def output() -> object:
        session = Session(server.http_url, "sink", shapes={"INPUT__0": (1, 1, 1, 4)})
        with session.lease() as lease:
            lease["INPUT__0"][...] = 7
            return lease.infer()["OUTPUT__0"]

    with pytest.warns(ResourceWarning, match="dropped without close"):
        view = output()
    assert view == [7]
