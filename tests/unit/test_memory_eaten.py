"""A /dev/shm that somebody else fills while a session is open."""

from __future__ import annotations

import sys

import pytest

from tests.unit.children import run_in_private_shm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

MIB = 1 << 20
COMMON = """
import contextlib, os, time
import numpy as np
import shmlane
from shmlane.testing import Close, ScriptedServer, identity_model

def free():
    room = os.statvfs("/dev/shm")
    return room.f_bfree * room.f_frsize

@contextlib.contextmanager
def eaten():
    with open("/dev/shm/other", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free())
        assert free() == 0
        yield
    os.unlink("/dev/shm/other")

def shape(size):
    return (1, 1, 1, size)

def session(server, **options):
    return shmlane.Session(
        server.url,
        "identity",
        slots=1,
        shapes={"INPUT__0": shape(8)},
        outputs={"OUTPUT__0": shape(8)},
        timeouts=shmlane.Timeouts(connect=2.0, infer=5.0, lease=5.0),
        **options,
    )

def ask(lease, value):
    lease["INPUT__0"][...] = value
    assert (lease.infer()["OUTPUT__0"] == value).all()

def becomes(session, **wanted):
    deadline = time.monotonic() + 10
    while any(getattr(session.stats(), name) != n for name, n in wanted.items()):
        assert time.monotonic() < deadline, session.stats()
        time.sleep(0.01)

def serves_right(session):
    becomes(session, free=session.stats().slots)
    for value in (3, 4, 5):
        with session.lease() as lease:
            ask(lease, value)
"""


def run(code: str) -> None:
    """Run `code` in a small /dev/shm of its own, on which nothing may be left."""
    end = "assert os.listdir('/dev/shm') == [], os.listdir('/dev/shm')"
    run_in_private_shm(f"{COMMON}\n{code}\n{end}", options=f"size={MIB}")


def test_what_was_reserved_is_there_when_the_rest_is_gone() -> None:
    run(
        """
with ScriptedServer([identity_model()]) as server, session(server) as one:
    with eaten():
        serves_right(one)
"""
    )


def test_growth_without_room_leaves_lease_and_session_usable() -> None:
    run(
        """
with ScriptedServer([identity_model()]) as server, session(server) as one:
    with one.lease() as lease:
        ask(lease, 1)
        with eaten():
            try:
                lease.view("INPUT__0", shape(4000))
            except shmlane.OutOfSharedMemory as error:
                assert (error.context["wanted"], error.context["free"]) == (20480, 0)
            else:
                raise AssertionError("there was room")
            ask(lease, 2)
        lease.view("INPUT__0", shape(4000))
        assert one.stats().growths == 1
    serves_right(one)
"""
    )


def test_a_lost_slot_waits_for_room_to_move_its_outputs() -> None:
    run(
        """
with ScriptedServer([identity_model()]) as server, session(server) as one:
    with server.hold(), eaten():
        with one.lease() as lease:
            lease["INPUT__0"][...] = 1
            server.script(Close())
            try:
                lease.infer()
            except shmlane.RequestLost:
                pass
            # It does not know the slot: another process may still write the outputs.
            server.restart()
        asked = len(server.requests)
        while len(server.requests) < asked + 4:
            time.sleep(0.01)
        assert one.stats().lost == 1
    serves_right(one)
    assert one.stats().drains == 1
"""
    )


def test_a_session_without_room_leaves_nothing_and_opens_later() -> None:
    run(
        """
with ScriptedServer([identity_model()]) as server:
    one = session(server)
    with eaten():
        for _ in range(2):
            try:
                one.open()
            except shmlane.OutOfSharedMemory as error:
                assert error.context["free"] == 0
            else:
                raise AssertionError("there was room")
        assert os.listdir("/dev/shm") == ["other"]
        assert not server.regions
    with one:
        serves_right(one)
"""
    )


def test_a_slot_given_up_is_replaced_once_there_is_room() -> None:
    run(
        """
server = ScriptedServer([identity_model()], version="2.49.0")
with server, session(server) as one:
    with server.hold(), eaten():
        with one.lease() as lease:
            lease["INPUT__0"][...] = 1
            server.script(Close())
            try:
                lease.infer()
            except shmlane.RequestLost:
                pass
        becomes(one, lost=1)
    becomes(one, retired=1)
    serves_right(one)
"""
    )
