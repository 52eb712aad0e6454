"""perf_analyzer's keys: who has them, and what is in the way."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.bench import keys
from shmlane.errors import ContenderFailed
from tests.polling import eventually
from tests.unit.children import run_python, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

HOLD = """
import sys
from pathlib import Path
from shmlane.bench import keys
with keys.held(folder=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""
# As a user to whom the folder is not.
AS_NOBODY = """
import os, sys
from pathlib import Path
from shmlane.bench import keys
from shmlane.errors import ContenderFailed
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.umask(0o077)
folder = Path(sys.argv[1])
try:
    with keys.held(folder=folder, limit_s=0):
        keys.remove(folder=folder)
        print("removed")
except ContenderFailed as error:
    print(error)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder like /dev/shm, open to every user."""
    path = Path(tempfile.mkdtemp(prefix="shmlane-keys-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def is_held(folder: Path) -> bool:
    try:
        with keys.held(folder=folder, limit_s=0):
            return False
    except ContenderFailed:
        return True


def test_one_process_at_a_time_has_the_keys(folder: Path) -> None:
    with started(HOLD, str(folder)) as holder:
        assert holder.hear() == "held"
        with (
            pytest.raises(ContenderFailed, match="has held perf_analyzer's keys"),
            keys.held(folder=folder, limit_s=0.2),
        ):
            pytest.fail("two have them")
        holder.kill()
        eventually(lambda: not is_held(folder), "the dead let go")


def test_holding_twice_in_one_process_is_waited_for_too(folder: Path) -> None:
    with keys.held(folder=folder):
        assert is_held(folder)
    assert not is_held(folder)


def test_the_lock_leaves_nothing(folder: Path) -> None:
    with keys.held(folder=folder):
        assert list(folder.iterdir()) == []


def test_what_a_run_left_is_removed_and_nothing_else(folder: Path) -> None:
    other = folder / "INPUT__1"
    for path in (folder / keys.INPUT, folder / keys.OUTPUT, other):
        path.touch()
    keys.remove(folder=folder)
    assert list(folder.iterdir()) == [other]
    keys.remove(folder=folder)


@needs_root
def test_users_keep_each_other_out(folder: Path) -> None:
    with keys.held(folder=folder):
        assert "has held" in run_python(AS_NOBODY, str(folder))
    assert run_python(AS_NOBODY, str(folder)) == "removed\n"
    assert not is_held(folder)


@needs_root
def test_a_key_of_another_user_is_told_with_its_owner(folder: Path) -> None:
    key = folder / keys.OUTPUT
    key.touch()
    told = run_python(AS_NOBODY, str(folder))
    assert told.startswith(f"{key} is in perf_analyzer's way")
    assert f"belongs to user {os.getuid()}" in told
    assert key.exists()
