"""Whose a region is, and whether they live: processes that end in every way."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmlane.inventory import clean_up
from shmlane.regions import Region, owner_is_dead, region_files
from tests.polling import eventually
from tests.unit.children import started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

# Makes a region, says where, and goes on as it is told.
OWNER = """
import os, signal, sys
from shmlane import regions
from shmlane.regions import Region
regions.SHM_DIRECTORY = sys.argv[1]
region = Region(1, header=b"no header that anybody could read")
print(region.path, flush=True)
"""
WAIT = "sys.stdin.readline()\n"
FORKED = """
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
"""


def is_alive(path: str | Path) -> bool:
    with owner_is_dead(str(path)) as dead:
        return not dead


def is_dead(path: str) -> bool:
    return not is_alive(path)


@pytest.fixture
def stale(folder: Path) -> Path:
    """A file that looks like a region and that nobody holds."""
    path = folder / "shmlane.stale"
    path.write_bytes(b"no header that anybody could read")
    return path


# --- who lives ------------------------------------------------------------------------


def test_a_region_of_this_process_is_in_use() -> None:
    region = Region(1, header=b"")
    assert is_alive(region.path)
    region.close()


def test_a_region_is_in_use_until_its_owner_is_killed(folder: Path) -> None:
    with started(OWNER + WAIT, str(folder)) as owner:
        path = owner.hear()
        assert is_alive(path)
        owner.kill()
        assert is_dead(path)


def test_asking_does_not_make_a_region_look_used(stale: Path) -> None:
    assert [is_alive(stale) for _ in range(3)] == [False] * 3


def test_nobody_can_begin_to_use_what_is_proved_dead(stale: Path) -> None:
    with owner_is_dead(str(stale)) as dead, stale.open() as file:
        assert dead
        assert is_alive(stale)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with stale.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert is_alive(stale)


def test_asking_about_a_file_that_is_gone_or_a_link_is_an_os_error(
    stale: Path, folder: Path
) -> None:
    (folder / "link").symlink_to(stale)
    with pytest.raises(OSError, match="symbolic links"):
        is_alive(folder / "link")
    with pytest.raises(FileNotFoundError):
        is_alive(folder / "none")


# --- forks ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["pass", "region.close()", "del region", "os._exit(0)"])
def test_a_forked_child_takes_neither_file_nor_lock_with_it(
    folder: Path, end: str
) -> None:
    code = f"""{OWNER}
if os.fork() == 0:
    {end}
    raise SystemExit
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print("child ended", flush=True)
{WAIT}"""
    with started(code, str(folder)) as owner:
        path = owner.hear()
        assert owner.hear() == "child ended"
        assert is_alive(path)
        assert Path(path).read_bytes().startswith(b"no header")
        owner.tell("end")
        assert owner.hear() == ""
    assert not os.path.exists(path)


@contextmanager
def killed_with_a_child_left(code: str, folder: Path) -> Iterator[str]:
    """The region of a killed process whose forked child lives."""
    with started(code, str(folder)) as owner:
        path, child = owner.hear(), int(owner.hear())
        try:
            owner.kill()
            yield path
            os.kill(child, 0)
        finally:
            os.kill(child, 9)


def test_a_forked_child_does_not_keep_a_dead_owner_alive(folder: Path) -> None:
    with killed_with_a_child_left(OWNER + FORKED + WAIT, folder) as path:
        eventually(lambda: is_dead(path), "the child lets go of the lock")


def test_a_fork_in_the_middle_of_making_does_not_keep_it_alive_either(
    folder: Path,
) -> None:
    code = f"""
import fcntl, sys

def fork_after_locking(frame, event, function):
    if event == "c_return" and function is fcntl.flock:
        sys.setprofile(None)
        fork()

def fork():
    import os, signal
    {FORKED.replace(chr(10), chr(10) + "    ")}

sys.setprofile(fork_after_locking)
{OWNER}{WAIT}"""
    with started(code, str(folder)) as owner:
        child, path = int(owner.hear()), owner.hear()
        try:
            assert is_alive(path)
            owner.kill()
            eventually(lambda: is_dead(path), "the child lets go of the lock")
        finally:
            os.kill(child, 9)


def test_a_program_started_by_the_owner_does_not_keep_it_alive(folder: Path) -> None:
    code = f"""{OWNER}
import subprocess
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
{WAIT}"""
    with killed_with_a_child_left(code, folder) as path:
        assert is_dead(path)


# --- what is found and cleaned --------------------------------------------------------


def strangers(folder: Path, target: Path) -> list[Path]:
    """What is no region file: by its name, or by what it is."""
    others = [folder / name for name in ("shmlane-a", "shmlanes.b", "x.shmlane.c")]
    for path in others:
        path.touch()
    directory, link, pipe = (folder / f"shmlane.{name}" for name in "dlp")
    directory.mkdir()
    link.symlink_to(target)
    os.mkfifo(pipe)
    return [*others, directory, link, pipe]


def test_region_files_are_regular_files_of_our_prefix(
    folder: Path, stale: Path
) -> None:
    strangers(folder, stale)
    assert region_files() == [str(stale)]


def test_regions_are_found_where_they_are_made() -> None:
    region = Region(1, header=b"")
    assert region.path in region_files()
    region.close()
    assert region.path not in region_files()


def test_without_shared_memory_there_are_no_region_files(folder: Path) -> None:
    folder.rmdir()
    assert region_files() == []
    assert clean_up().files == []


def test_cleaning_removes_what_nobody_holds(stale: Path) -> None:
    assert clean_up().files == [stale.name]
    assert not stale.exists()
    assert clean_up().files == []


def test_cleaning_leaves_what_is_no_region_file(folder: Path, stale: Path) -> None:
    kept = strangers(folder, stale)
    assert clean_up().files == [stale.name]
    assert all(path.is_symlink() or path.exists() for path in kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_cleaning_leaves_what_another_user_left(stale: Path) -> None:
    os.chown(stale, 65534, 65534)
    assert clean_up().files == []
    assert stale.exists()


def test_cleaning_leaves_what_the_living_use_and_takes_what_the_dead_left(
    folder: Path,
) -> None:
    mine = Region(1, header=b"")
    with started(OWNER + WAIT, str(folder)) as owner:
        theirs = owner.hear()
        clean_up()
        assert os.path.exists(mine.path)
        assert os.path.exists(theirs)
        owner.kill()
        clean_up()
        assert os.path.exists(mine.path)
        assert not os.path.exists(theirs)
    mine.close()


def test_many_can_clean_at_once_and_each_file_goes_once(folder: Path) -> None:
    clean = """
import sys
from shmlane import inventory, regions
regions.SHM_DIRECTORY = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
print(*inventory.clean_up().files, flush=True)
"""
    names = [f"shmlane.{number}" for number in range(200)]
    for name in names:
        (folder / name).touch()
    with started(clean, str(folder)) as one, started(clean, str(folder)) as other:
        for child in (one, other):
            assert child.hear() == "ready"
        for child in (one, other):
            child.tell("go")
        cleaned = one.hear().split() + other.hear().split()
    assert sorted(cleaned) == sorted(names)
    assert list(folder.iterdir()) == []
