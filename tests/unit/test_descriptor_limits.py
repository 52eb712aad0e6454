"""A client without descriptors: a typed error, nothing lost, and it works again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from shmlane.inventory import clean_up
from shmlane.testing import ScriptedServer, sink_model
from tests.unit.children import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

COMMON = """
import contextlib, os, resource, sys
import numpy as np
import shmlane

LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)

@contextlib.contextmanager
def descriptors(count):
    # Numbers below the limit are taken, all but so many.
    free = [os.dup(0) for _ in range(count)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 1, LIMITS[1]))
    for each in free:
        os.close(each)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)

@contextlib.contextmanager
def refused(kind):
    try:
        yield
    except kind as error:
        assert "no descriptor left" in str(error), error
    else:
        raise AssertionError("it was not refused")

def session(slots=2):
    return shmlane.Session(
        sys.argv[1],
        "sink",
        slots=slots,
        shapes={"INPUT__0": (1, 1, 1, 4)},
        timeouts=shmlane.Timeouts(connect=0.05, infer=5.0, lease=1.0),
    )

def ask(session, value, size=4):
    array = np.full((1, 1, 1, size), value, np.float32)
    assert session.infer({"INPUT__0": array})["OUTPUT__0"] == [value]

def all_free(session):
    stats = session.stats()
    assert stats.free == stats.slots, stats
    leases = [session.lease() for _ in range(stats.slots)]
    for lease in leases:
        lease.release()
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()]) as server:
        yield server
        clean_up(only=server.url)
        assert not server.regions


def test_a_session_cannot_open_and_opens_later(server: ScriptedServer) -> None:
    run_python(
        f"""{COMMON}
made = session()
# None to look for what is left, one for that and none to connect, and so on.
for count in range(9):
    try:
        with descriptors(count):
            made.open()
        break
    except shmlane.ShmlaneError as error:
        assert "no descriptor left" in str(error), error
        assert "not open" in repr(made)
else:
    raise AssertionError("it never opened")
assert count > 2
ask(made, 1)
all_free(made)
made.close()
""",
        server.url,
    )
    assert not server.regions


def test_a_slot_without_a_connection_is_not_lost(server: ScriptedServer) -> None:
    run_python(
        f"""{COMMON}
with session() as made, made.lease():
    with descriptors(0), refused(shmlane.ServerUnreachable):
        ask(made, 1)
    assert made.stats().free == 1
    ask(made, 2)
""",
        server.url,
    )
    assert not server.regions


def test_a_stream_cannot_begin_and_begins_later(server: ScriptedServer) -> None:
    run_python(
        COMMON
        + """
items = [{"INPUT__0": np.full((1, 1, 1, 4), value, np.float32)} for value in range(5)]
with session() as s:
    s.warmup()
    with descriptors(2), refused(shmlane.TransportError):
        next(s.stream(items))
    all_free(s)
    assert [each["OUTPUT__0"] for each in s.stream(items)] == [0, 1, 2, 3, 4]
    all_free(s)
""",
        server.url,
    )


def test_a_session_of_an_event_loop_cannot_enter_it_and_leaves_nothing(
    server: ScriptedServer,
) -> None:
    run_python(
        COMMON
        + """
import asyncio

async def main():
    made = shmlane.AsyncSession(sys.argv[1], "sink")
    made._open_once()
    with descriptors(2), refused(shmlane.TransportError):
        await made.open()

asyncio.run(main())
""",
        server.url,
    )
    assert server.regions == {}


def test_a_lease_that_cannot_grow_goes_on(server: ScriptedServer) -> None:
    run_python(
        f"""{COMMON}
with session(slots=1) as made:
    ask(made, 1)
    with made.lease() as lease:
        view = lease["INPUT__0"]
        view[...] = 2
        with descriptors(0), refused(shmlane.RegionError):
            lease.view("INPUT__0", (1, 1, 1, 4000))
        assert lease.infer()["OUTPUT__0"] == [2]
        lease.view("INPUT__0", (1, 1, 1, 4000))[...] = 3
        assert lease.infer()["OUTPUT__0"] == [3]
        del view
    all_free(made)
""",
        server.url,
    )
    assert not server.regions


def test_a_session_that_cannot_ask_leaves_its_files_to_the_next(
    server: ScriptedServer,
) -> None:
    run_python(
        f"""{COMMON}
made = session()
ask(made, 1)
with descriptors(0):
    made.close()
with session() as other:
    ask(other, 2)
""",
        server.url,
    )
    assert not server.regions
