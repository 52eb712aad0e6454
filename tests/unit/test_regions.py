"""Region files: complete before they are seen, gone without a trace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import secrets
import stat
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane import regions
from shmlane.errors import RegionError, UnsupportedPlatform
from shmlane.regions import PAGE_BYTES, Region, RegionOptions, owner_is_dead, round_up
from tests.unit.children import run_python
from tests.unit.interleaving import CtrlC, every

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

HEADER = b"header of a test" * 10


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region(3 * PAGE_BYTES, header=HEADER)
    yield region
    region.close()


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the next region of this test will be."""
    token = secrets.token_hex(8)
    monkeypatch.setattr(secrets, "token_hex", lambda _nbytes: token)
    return Path("/dev/shm", f"shmlane.{token}")


def mappings() -> set[str]:
    """What of shared memory this process has mapped: lines that name the inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/dev/shm/" in line}


def descriptors() -> set[str]:
    """Open descriptors that lead to shared memory."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/shm/"):
                found.add(name)
    return found


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """The block leaves no descriptor and no mapping of shared memory behind."""
    gc.collect()
    before = descriptors() | mappings()
    yield
    gc.collect()
    assert (descriptors() | mappings()) - before == set()


def is_alive(path: str | Path) -> bool:
    with owner_is_dead(str(path)) as dead:
        return not dead


# --- making ---------------------------------------------------------------------------


def test_a_region_is_whole_pages_that_start_with_the_header(region: Region) -> None:
    data = Path(region.path).read_bytes()
    assert len(data) == region.nbytes == 3 * PAGE_BYTES
    assert data == HEADER.ljust(len(data), b"\0")


@pytest.mark.parametrize(
    ("nbytes", "header", "pages"),
    [
        (0, b"", 1),
        (1, b"", 1),
        (PAGE_BYTES, b"h", 1),
        (PAGE_BYTES + 1, b"h", 2),
        (1, b"h" * (PAGE_BYTES + 1), 2),
    ],
)
def test_a_region_holds_what_was_asked_for_and_its_header(
    nbytes: int, header: bytes, pages: int
) -> None:
    region = Region(nbytes, header=header)
    assert region.nbytes == os.stat(region.path).st_size == pages * PAGE_BYTES
    region.close()


@given(st.integers(0, 2**70), st.integers(1, 2**40))
def test_rounding_up_gives_the_smallest_multiple_that_holds(
    nbytes: int, multiple: int
) -> None:
    rounded = round_up(nbytes, multiple)
    assert rounded % multiple == 0
    assert nbytes <= rounded < nbytes + multiple


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o640])
def test_a_file_has_the_mode_asked_for_whatever_the_umask(mode: int) -> None:
    old = os.umask(0o077)
    try:
        region = Region(1, header=HEADER, options=RegionOptions(mode=mode))
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(region.path).st_mode) == mode
    region.close()


def test_a_file_is_readable_by_nobody_else_unless_told(region: Region) -> None:
    assert stat.S_IMODE(os.stat(region.path).st_mode) == 0o600


def test_names_differ_and_cannot_be_guessed() -> None:
    made = [Region(1, header=HEADER) for _ in range(20)]
    names = {region.name for region in made}
    assert len(names) == 20
    assert all(re.fullmatch(r"shmlane\.[0-9a-f]{16}", name) for name in names)
    assert [region.path for region in made] == [f"/dev/shm/{r.name}" for r in made]
    for region in made:
        region.close()


@pytest.mark.parametrize("prefault", [True, False])
def test_every_page_is_taken_at_once(path: Path, prefault: bool) -> None:
    options = RegionOptions(prefault=prefault)
    region = Region(64 * PAGE_BYTES, header=HEADER, options=options)
    assert os.stat(path).st_blocks * 512 >= region.nbytes
    touched = resident(path)
    assert touched == region.nbytes if prefault else touched < region.nbytes
    region.close()


def resident(path: Path) -> int:
    """Bytes of a file that are mapped into this process and present."""
    # Mapped before it was named, a file is known here by its number only.
    entry = re.search(
        rf" {path.stat().st_ino} +/dev/shm/.*\n(?:.*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
    )
    assert entry is not None
    return int(entry[1]) * 1024


def test_a_file_is_seen_complete_or_not_at_all(path: Path) -> None:
    seen: list[bool] = []

    def look(frame: FrameType, _event: str, _arg: object) -> None:
        if frame.f_code.co_filename != regions.__file__:
            return
        seen.append(path.exists())
        if seen[-1]:
            facts = path.stat()
            assert path.read_bytes() == HEADER.ljust(2 * PAGE_BYTES, b"\0")
            assert facts.st_blocks * 512 >= 2 * PAGE_BYTES
            assert stat.S_IMODE(facts.st_mode) == 0o640
            assert is_alive(path)

    sys.setprofile(look)
    try:
        options = RegionOptions(mode=0o640)
        region = Region(2 * PAGE_BYTES, header=HEADER, options=options)
    finally:
        sys.setprofile(None)
    assert seen == sorted(seen)
    assert True in seen
    assert False in seen
    region.close()


# --- what stops it --------------------------------------------------------------------


# Pressed when open() has just returned, Ctrl-C leaves its file to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_making_leaves_nothing(path: Path) -> None:
    gc.collect()
    descriptors_before, mappings_before = descriptors(), mappings()
    made: list[Region] = []

    def make() -> None:
        made.append(Region(1, header=HEADER))

    for _ in every(lambda at: CtrlC(make, at)):
        gc.collect()
        assert mappings() <= mappings_before
        assert not path.exists()
        # A number that os.open() has just returned is lost, and is no lock yet.
        for number in descriptors() - descriptors_before:
            os.close(int(number))
    assert path.exists()
    made.pop().close()


def test_a_failure_leaves_nothing_even_while_its_exception_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _nbytes: "no/folder")
    with leaving_nothing(), pytest.raises(RegionError, match="No such file") as caught:
        Region(PAGE_BYTES, header=HEADER)
    assert caught.value.__traceback__ is not None
    assert caught.value.context == {"nbytes": PAGE_BYTES, "errno": errno.ENOENT}


def test_a_machine_without_shared_memory_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "SHM_DIRECTORY", str(tmp_path / "shm"))
    with pytest.raises(RegionError) as caught:
        Region(PAGE_BYTES, header=HEADER)
    assert str(caught.value) == (
        f"could not make a shared memory region of {PAGE_BYTES} bytes in"
        f" {tmp_path}/shm: No such file or directory. {tmp_path}/shm must be a tmpfs"
        " that this user may write to, and /proc must be mounted."
    )


def test_another_operating_system_is_told_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedPlatform, match=r"darwin\. Run this on Linux"):
        Region(1, header=HEADER)


# --- arrays ---------------------------------------------------------------------------


def test_arrays_share_their_bytes_with_the_file_and_each_other(region: Region) -> None:
    one, other = region.array(PAGE_BYTES, 8), region.array(PAGE_BYTES + 4, 8)
    assert (one.dtype, one.shape) == (np.dtype(np.uint8), (8,))
    assert one.flags.writeable
    one[:] = range(8)
    other[4:] = 9
    data = Path(region.path).read_bytes()
    assert data[PAGE_BYTES : PAGE_BYTES + 12] == bytes([*range(8), 9, 9, 9, 9])


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(-1, 1), (0, -1), (0, 3 * PAGE_BYTES + 1), (3 * PAGE_BYTES, 1), (2**63, 1)],
)
def test_an_array_outside_the_region_is_refused(
    region: Region, offset: int, nbytes: int
) -> None:
    with pytest.raises(RegionError) as caught:
        region.array(offset, nbytes)
    assert str(caught.value) == (
        f"bytes {offset} to {offset + nbytes} lie outside region {region.name} of"
        f" {3 * PAGE_BYTES} bytes."
    )


def test_an_array_may_be_all_of_the_region_or_nothing_at_its_end(
    region: Region,
) -> None:
    assert region.array(0, region.nbytes).nbytes == region.nbytes
    assert region.array(region.nbytes, 0).nbytes == 0


def test_an_array_keeps_its_memory_when_the_region_is_closed() -> None:
    region = Region(PAGE_BYTES, header=HEADER)
    array = region.array(0, region.nbytes)
    region.close()
    assert not os.path.exists(region.path)
    assert bytes(array[: len(HEADER)]) == HEADER
    array[:] = 7
    assert array.sum(dtype=int) == 7 * PAGE_BYTES


def test_the_last_array_of_a_closed_region_gives_the_memory_back() -> None:
    region = Region(PAGE_BYTES, header=HEADER)
    inode = os.stat(region.path).st_ino
    one, other = region.array(0, 8), region.array(8, 8)[2:]
    region.close()
    assert is_mapped(inode)
    del one
    assert is_mapped(inode)
    del other
    assert not is_mapped(inode)
    assert repr(region).endswith("closed>")


def is_mapped(inode: int) -> bool:
    return any(line.split()[4] == str(inode) for line in mappings())


def test_a_closed_region_gives_no_more_arrays(region: Region) -> None:
    region.close()
    with pytest.raises(RegionError, match=f"region {region.name} is closed"):
        region.array(0, 1)


# --- the end --------------------------------------------------------------------------


def test_closing_takes_name_lock_and_memory_away() -> None:
    with leaving_nothing():
        region = Region(PAGE_BYTES, header=HEADER)
        assert is_alive(region.path)
        assert repr(region) == f"<Region {region.name} {PAGE_BYTES} bytes open>"
        region.close()
        assert not os.path.exists(region.path)
        assert repr(region) == f"<Region {region.name} {PAGE_BYTES} bytes closed>"


def test_closing_twice_does_nothing_to_what_came_meanwhile(path: Path) -> None:
    region = Region(PAGE_BYTES, header=HEADER)
    region.close()
    # With a lock from its first moment: sessions that start anywhere remove the rest.
    other = Region(PAGE_BYTES, header=HEADER)
    assert other.path == str(path)
    region.close()
    assert path.exists()
    other.close()


def test_ctrl_c_at_any_moment_of_closing_only_delays_it(path: Path) -> None:
    def close(at: int) -> CtrlC:
        return CtrlC(Region(1, header=HEADER).close, at)

    with leaving_nothing():
        for _ in every(close):
            gc.collect()
            assert not path.exists()


def test_closing_is_no_error_when_the_file_is_gone_already(region: Region) -> None:
    os.unlink(region.path)
    region.close()


def test_a_region_that_is_left_keeps_its_name_and_nothing_else(path: Path) -> None:
    with leaving_nothing():
        region = Region(PAGE_BYTES, header=HEADER)
        with path.open("rb") as file:
            # In use, lest any other program here cleans up what nobody holds.
            fcntl.flock(file, fcntl.LOCK_SH)
            inode = path.stat().st_ino
            region.leave()
            assert not is_mapped(inode)
            assert repr(region).endswith("closed>")
            with pytest.raises(RegionError, match="is closed"):
                region.array(0, 1)
            region.close()
            del region
            gc.collect()
            assert path.read_bytes().startswith(HEADER)
            path.unlink()


def test_a_region_nobody_refers_to_takes_everything_with_it() -> None:
    with leaving_nothing():
        region = Region(PAGE_BYTES, header=HEADER)
        path, watch = region.path, weakref.ref(region)
        del region
        gc.collect()
        assert watch() is None
        assert not os.path.exists(path)


def test_an_array_outlives_a_region_nobody_refers_to() -> None:
    array = Region(PAGE_BYTES, header=HEADER).array(0, len(HEADER))
    gc.collect()
    assert bytes(array) == HEADER


MAKE = """
import os, sys
from shmlane.regions import Region
region = Region(1, header=b"x")
array = region.array(0, 1)
"""


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit()", "del region", "raise SystemExit"]
)
def test_a_program_that_just_ends_leaves_no_file(end: str) -> None:
    path = run_python(f"{MAKE}\nprint(region.path)\n{end}").strip()
    assert path.startswith("/dev/shm/shmlane.")
    assert not os.path.exists(path)
