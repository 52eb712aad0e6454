"""Forks: the parent's session stays the parent's, and the child is told what to do.

Each scenario runs in a process of its own, which forks: no test forks the test run.
"""

from __future__ import annotations

import pytest

from shmlane.server import TritonServer
from tests.sessions import registered, run_client

pytestmark = pytest.mark.usefixtures("no_leftovers")

# `in_child(work)` forks, runs `work` in the child, which then ends as programs do, and
# returns its exit code. What the child prints is seen by the test.
PRELUDE = """
import gc, os, sys, threading, warnings
from pathlib import Path
import numpy as np
import shmlane
from shmlane import engine
from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.regions import region_files

# As the fixture `thorough` has it.
engine._CLEAN_LIMIT = 10.0
URL = sys.argv[1]
SHAPES = {"INPUT__0": (1, 1, 1, 4)}

def new_session(**more):
    return shmlane.Session(URL, "sink", slots=2, shapes=SHAPES, **more)

def ask(session, value):
    with session.lease() as lease:
        lease["INPUT__0"][...] = value
        assert float(lease.infer()["OUTPUT__0"][0]) == value

class Done(Exception): pass

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    work()
    raise Done

def excepthook(kind, error, trace):
    # The child ends through the interpreter's own way out, with all its finalisers.
    if kind is not Done:
        sys.__excepthook__(kind, error, trace)

sys.excepthook = excepthook

def made_by(pid):
    made = set()
    for path in region_files():
        try:
            told = RegionHeader.parse(Path(path).read_bytes()).description
        except (FileNotFoundError, RegionError):
            continue
        if told["pid"] == pid:
            made.add(path)
    return made

def mine():
    return made_by(os.getpid())
"""


def run(server: TritonServer, scenario: str) -> str:
    """What a scenario printed; the test fails if it or its child failed."""
    ended = run_client(PRELUDE + scenario, server.http_url)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_a_child_is_told_what_to_do(server: TritonServer) -> None:
    told = run(
        server,
        """
def work():
    for use in (session.lease, session.open, session.warmup, lease.infer,
                lambda: session.metadata, lambda: session.infer({})):
        try:
            use()
        except shmlane.ForkedSession as error:
            print(error)
    print(session, session.stats().slots)

with new_session() as session:
    ask(session, 1)
    with session.lease() as lease:
        lease["INPUT__0"][...] = 2
        assert in_child(work) == 1
        assert lease.infer()["OUTPUT__0"] == [2]
""",
    )
    *errors, state = told.splitlines()
    assert len(errors) == 6
    for error in errors:
        assert "opened before a fork" in error
        assert "Open a session of its own in each process" in error
    assert "open in another process" in state
    assert state.endswith(" 0")


@pytest.mark.parametrize(
    "work",
    [
        "pass",
        "session.close()",
        "session.__exit__(None, None, None)",
        "lease.release()",
        "globals().pop('session'); gc.collect()",
        "os._exit(1)",
        "os.abort()",
    ],
)
def test_a_child_that_ends_harms_nothing_in_the_parent(
    server: TritonServer, work: str
) -> None:
    run(
        server,
        f"""
def work():
    {work}

session = new_session().open()
for value in range(3):
    ask(session, value)
lease = session.lease()
lease["INPUT__0"][...] = 5
view = lease.infer()["OUTPUT__0"]
files, before = mine(), session.stats()
assert len(files) == 1
assert in_child(work) != 0
assert mine() == files
assert view == [5]
assert lease.infer()["OUTPUT__0"] == [5]
lease.release()
del view
for value in range(3):
    ask(session, value)
after = session.stats()
assert after.registrations == before.registrations
assert after.connections <= 2
assert after.free == 2
session.close()
assert not mine()
""",
    )


def test_an_unopened_session_works_on_both_sides(server: TritonServer) -> None:
    run(
        server,
        """
def work():
    with session:
        ask(session, 1)
        assert len(mine()) == 1
    assert not mine()

session = new_session()
assert in_child(work) == 1
with session:
    ask(session, 2)
    assert len(mine()) == 1
""",
    )


def test_a_child_may_open_a_session_of_its_own(server: TritonServer) -> None:
    run(
        server,
        """
def work():
    with new_session() as own:
        for value in range(20):
            ask(own, value)

with new_session() as session:
    ask(session, 1)
    files = mine()
    assert in_child(work) == 1
    assert mine() == files
    ask(session, 2)
""",
    )


def test_a_child_holds_no_connection_of_the_parent(server: TritonServer) -> None:
    run(
        server,
        """
def sockets():
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:")
               for link in links if os.path.lexists(link))

def work():
    assert sockets() == before, sockets()

before = sockets()
with new_session() as session:
    session.warmup()
    assert sockets() == before + 2
    assert in_child(work) == 1
    ask(session, 2)
""",
    )


def test_a_child_keeps_no_region_of_a_killed_parent_alive(
    server: TritonServer,
) -> None:
    # The lock on a region must be the parent's alone.
    run(
        server,
        """
import fcntl, signal
ready, release = os.pipe(), os.pipe()
parent = os.fork()
if not parent:
    session = new_session().open()
    if os.fork() == 0:
        os.write(ready[1], b"x")
        os.read(release[0], 1)
        os._exit(0)
    os.wait()
assert os.read(ready[0], 1) == b"x"
(left,) = made_by(parent)
os.kill(parent, signal.SIGKILL)
os.waitpid(parent, 0)
with new_session() as session:
    ask(session, 3)
    assert not os.path.exists(left)
os.write(release[1], b"x")
""",
    )


def test_forks_between_requests_of_many_threads_disturb_none(
    server: TritonServer,
) -> None:
    run(
        server,
        """
warnings.simplefilter("ignore", DeprecationWarning)
failures = []
stop = threading.Event()

def hammer(number):
    value = number * 10_000
    try:
        while not stop.is_set():
            value += 1
            ask(session, value)
    except BaseException as error:
        failures.append(error)

with new_session() as session:
    threads = [threading.Thread(target=hammer, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert in_child(lambda: os._exit(7)) == 7
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert session.stats().free == 2
    assert session.stats().connections == 2
""",
    )


def test_workers_of_a_pool_are_told_too(server: TritonServer) -> None:
    run(
        server,
        """
import multiprocessing

def work(value):
    return session.infer({"INPUT__0": np.ones((1, 1, 1, 4), np.float32)})

with new_session() as session:
    ask(session, 1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        try:
            pool.map(work, range(2))
        except shmlane.ForkedSession as error:
            assert "after the fork" in error.hint
        else:
            raise SystemExit("no error")
        pool.close()
        pool.join()
    ask(session, 2)
""",
    )


def test_nothing_stays_registered(server: TritonServer) -> None:
    before = registered(server)
    run(
        server,
        """
session = new_session().open()
assert in_child(lambda: None) == 1
session.close()
""",
    )
    assert registered(server) <= before
