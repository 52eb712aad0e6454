"""Locks on slots: one holder at a time, and none that outlives its process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.claims import Hold, SlotLocks, taken
from tests.polling import eventually
from tests.unit.children import started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs OFD locks")

# Takes the lock that it is told and says whether it could.
HOLDER = """
import sys
from shmlane.claims import Hold, SlotLocks
locks = SlotLocks.of(sys.argv[1])
print(locks.take(0, Hold.HOME), flush=True)
sys.stdin.readline()
"""
FORKER = """
import os, sys
from shmlane.claims import Hold, SlotLocks
locks = SlotLocks.of(sys.argv[1])
assert locks.take(0, Hold.HOME)
if os.fork():
    os._exit(0)
print("child", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "region"
    file.write_bytes(bytes(64))
    return str(file)


@pytest.fixture
def locks(path: str) -> Iterator[SlotLocks]:
    locks = SlotLocks.of(path)
    yield locks
    locks.drop()


def test_each_lock_of_each_slot_has_one_holder(path: str, locks: SlotLocks) -> None:
    other = SlotLocks.of(path)
    assert locks.take(3, Hold.HOME)
    assert not other.take(3, Hold.HOME)
    assert other.is_taken(3, Hold.HOME)
    assert not locks.is_taken(3, Hold.HOME)
    assert other.take(3, Hold.BORROWER)
    assert other.take(2, Hold.HOME)
    assert other.take(4, Hold.HOME)
    locks.give_back(3, Hold.HOME)
    assert other.take(3, Hold.HOME)


def test_taking_twice_is_taking_once(path: str, locks: SlotLocks) -> None:
    assert locks.take(0, Hold.HOME)
    assert locks.take(0, Hold.HOME)
    locks.give_back(0, Hold.HOME)
    locks.give_back(0, Hold.HOME)
    assert SlotLocks.of(path).take(0, Hold.HOME)


def test_whoever_drops_the_locks_lets_go_of_all(path: str, locks: SlotLocks) -> None:
    other = SlotLocks.of(path)
    for index in range(3):
        assert other.take(index, Hold.HOME)
    assert not locks.take(1, Hold.HOME)
    other.drop()
    assert all(locks.take(index, Hold.HOME) for index in range(3))


def test_locks_that_nobody_refers_to_are_dropped(path: str, locks: SlotLocks) -> None:
    assert SlotLocks.of(path).take(0, Hold.HOME)
    assert locks.take(0, Hold.HOME)


def test_anybody_who_reads_the_file_can_see_who_is_taken(
    path: str, locks: SlotLocks
) -> None:
    for index in (1, 4):
        assert locks.take(index, Hold.HOME)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert taken(fd, 6, Hold.HOME) == [1, 4]
        assert taken(fd, 6, Hold.BORROWER) == []
    finally:
        os.close(fd)


def test_the_locks_of_a_killed_process_are_free(path: str, locks: SlotLocks) -> None:
    with started(HOLDER, path) as holder:
        assert holder.hear() == "True"
        assert not locks.take(0, Hold.HOME)
        holder.kill()
        assert locks.take(0, Hold.HOME)


def test_a_forked_child_keeps_no_lock_of_its_parent(
    path: str, locks: SlotLocks
) -> None:
    with started(FORKER, path) as forker:
        assert forker.hear() == "child"
        # The parent ends by itself; its child goes on.
        eventually(lambda: locks.take(0, Hold.HOME), "the lock is free")


def test_a_file_that_cannot_be_written_has_no_locks(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        SlotLocks.of(str(tmp_path / "absent"))
