"""A process killed at every step of sharing: its slots come back, with right values.

In a folder in place of /dev/shm, as in `test_killed_anywhere`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import HandoffExpired, Session, SlotRef, Timeouts
from shmlane.inventory import clean_up
from shmlane.testing import ScriptedServer, sink_model
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.children import Child, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

# For each line that it is told, "number of a step, and what to do", a child of it lives
# until that step. Steps are calls to the kernel and what is written into records.
PROCESSES = """
import os, signal, sys
import numpy as np
import shmlane
from shmlane import Session, SessionHandle, SlotRef, regions

regions.SHM_DIRECTORY = sys.argv[2]
STEPS = {
    "send", "recv", "link", "unlink", "posix_fallocate", "flock", "fcntl", "pack_into",
    "state", "handoff", "naming", "begin", "withdraw",
}
SHAPES = {"INPUT__0": (1, 1, 1, 4)}

def borrow(url, ref):
    with Session(url, "sink", slots=1, shapes=SHAPES) as session:
        with session.adopt(SlotRef.parse(ref)) as lease:
            size = 4 if int(ref.split(":")[1]) else 2000
            lease.view("INPUT__0", (1, 1, 1, size)).fill(3)
            assert lease.infer()["OUTPUT__0"] == [3]

def lend(url):
    session = Session(url, "sink", slots=1, shapes=SHAPES).open()
    with session.lease() as lease:
        lease["INPUT__0"].fill(7)
        ref = str(lease.detach())
    print(ref, flush=True)
    sys.stdin.readline()
    with session.lease(timeout=20) as lease:
        lease["INPUT__0"].fill(8)
        assert lease.infer()["OUTPUT__0"] == [8]
    session.close()

def claim(url, handle):
    with Session.attach(SessionHandle.parse(handle), slots=2) as session:
        for size in (4, 2000):
            with session.lease() as lease:
                lease.view("INPUT__0", (1, 1, 1, size)).fill(size)
                assert lease.infer()["OUTPUT__0"] == [size]

def share(url):
    with Session(url, "sink", slots=1, shapes=SHAPES) as session:
        handle = session.share(slots=2)
        with Session.attach(handle, slots=1) as attached:
            with attached.lease() as lease:
                lease["INPUT__0"].fill(5)
                assert lease.infer()["OUTPUT__0"] == [5]

def live_until(step, what, arguments):
    left = step

    def look(frame, event, function):
        nonlocal left
        name = getattr(function, "__name__", "") if event[:2] == "c_" else (
            frame.f_code.co_name if "shmlane" in frame.f_code.co_filename else ""
        )
        if event != "c_call" and name in STEPS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)
    globals()[what](sys.argv[1], *arguments)
    sys.setprofile(None)
    os._exit(0)

print(flush=True)
while line := sys.stdin.readline():
    step, what, *arguments = line.split()
    child = os.fork()
    if not child:
        live_until(int(step), what, arguments)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
MOST_STEPS = 1000


@pytest.fixture
def server(folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()], shm_directory=folder) as server:
        yield server


@pytest.fixture
def processes(folder: Path, server: ScriptedServer) -> Iterator[Child]:
    with started(PROCESSES, server.url, str(folder)) as processes:
        assert processes.hear() == ""
        yield processes


def ask(session: Session, value: float) -> float:
    with session.lease(timeout=10.0) as lease:
        lease.view("INPUT__0", (1, 1, 1, 4)).fill(value)
        return float(lease.infer()["OUTPUT__0"][0])


def is_quiet(before: int) -> bool:
    """Whether all that the dead had sent is done."""
    return threading.active_count() <= before


def test_a_borrower_killed_anywhere_leaves_its_home_whole(
    folder: Path, server: ScriptedServer, processes: Child
) -> None:
    shapes = {"INPUT__0": (1, 1, 1, 4)}
    with Session(server.url, "sink", slots=2, shapes=shapes) as home:
        assert [ask(home, value) for value in (1, 2)] == [1, 2]
        for step in range(MOST_STEPS):
            with home.lease() as lease:
                lease["INPUT__0"].fill(9)
                ref = lease.detach()
            processes.tell(f"{step} borrow {ref}")
            code = processes.hear()
            # Not adopted, it can still be; what is in it is what was filled.
            with contextlib.suppress(HandoffExpired), home.adopt(ref) as lease:
                assert lease["INPUT__0"].ravel()[0] == 9
            assert all_free(home).lent == 0
            assert [ask(home, step + n) for n in range(2)] == [step, step + 1]
            assert clean_up(only=server.url).kept == {}
            if code == "0":
                break
            assert code == "-9"
        assert code == "0"
        assert step > 60
        # One for each slot, as the next one to use them counts them.
        names = {name for name in server.regions if ref.region in name}
        assert len(names) == 2
    assert clean_up(only=server.url).kept == {}
    assert not list(folder.iterdir())
    assert not server.regions


def test_a_home_killed_anywhere_leaves_its_borrower_what_it_has(
    folder: Path, server: ScriptedServer, processes: Child
) -> None:
    before = threading.active_count()
    timeouts = Timeouts(infer=10.0)
    adopted = 0
    with Session(server.url, "sink", slots=1, timeouts=timeouts) as borrower:
        own = borrower.stats().registrations
        ended = 0
        for step in range(MOST_STEPS):
            processes.tell(f"{step} lend")
            said = processes.hear()
            if ":" in said:
                with borrower.adopt(SlotRef.parse(said)) as lease:
                    adopted += 1
                    processes.tell("")
                    assert lease["INPUT__0"].ravel()[0] == 7
                    assert lease.infer()["OUTPUT__0"] == [7]
                said = processes.hear()
            assert borrower.stats().adopted == 0
            assert ask(borrower, step) == step
            assert clean_up(only=server.url).kept == {}
            # What it finds to be cleaned up makes some lives longer than others.
            ended += said == "0"
            if ended == 3:
                break
            assert said in ("0", "-9")
        assert ended == 3
        assert step > 60
        assert adopted > 20
        assert borrower.stats().registrations == own + 1
    eventually(lambda: is_quiet(before))
    assert clean_up(only=server.url).kept == {}
    assert not list(folder.iterdir())
    assert not server.regions


def test_a_claimant_killed_anywhere_leaves_its_slots_to_others(
    folder: Path, server: ScriptedServer, processes: Child
) -> None:
    shapes = {"INPUT__0": (1, 1, 1, 4)}
    with Session(server.url, "sink", slots=1, shapes=shapes) as sharer:
        handle = sharer.share(slots=2)
        for step in range(MOST_STEPS):
            # So that the dead have begun to register anew.
            server.unregister_all()
            processes.tell(f"{step} claim {handle}")
            code = processes.hear()
            with Session.attach(handle, slots=2) as session:
                all_free(session)
                assert [ask(session, step + n) for n in range(3)] == [
                    step,
                    step + 1,
                    step + 2,
                ]
            assert clean_up(only=server.url).kept == {}
            if code == "0":
                break
            assert code == "-9"
        assert code == "0"
        assert step > 60
    assert clean_up(only=server.url).kept == {}
    assert not list(folder.iterdir())
    assert not server.regions


def test_nothing_is_left_of_a_sharer_killed_anywhere(
    folder: Path, server: ScriptedServer, processes: Child
) -> None:
    before = threading.active_count()
    for step in range(MOST_STEPS):
        processes.tell(f"{step} share")
        code = processes.hear()
        if code == "0":
            break
        assert code == "-9"
        eventually(lambda: is_quiet(before))
        assert clean_up(only=server.url).kept == {}
        assert not list(folder.iterdir()), step
        assert not server.regions, step
    assert code == "0"
    assert step > 60
