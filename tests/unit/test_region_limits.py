"""Regions on machines that lack room, memory, rights or pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.children import run_in_private_shm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

MIB = 1 << 20
COMMON = """
import contextlib, errno, json, os, resource, sys
from shmlane.errors import OutOfSharedMemory, RegionError
from shmlane.regions import PAGE_BYTES, Region, RegionOptions

def free():
    room = os.statvfs("/dev/shm")
    return room.f_bfree * room.f_frsize

def facts(file, name):
    with open(f"/proc/self/{file}") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(name))

def attempt(nbytes, **options):
    before = free()
    try:
        Region(nbytes, header=b"x", options=RegionOptions(**options))
    except RegionError as error:
        # Asked while the exception, and all it refers to, still lives.
        return {
            "message": str(error),
            "kind": type(error).__name__,
            "is_memory_error": isinstance(error, MemoryError),
            "context": error.context,
            "left": os.listdir("/dev/shm"),
            "used": before - free(),
        }
"""


def report(code: str, options: str) -> Any:
    """What the code leaves in `result`, in a /dev/shm of its own."""
    code = f"{COMMON}\n{code}\nprint(json.dumps(result))"
    return json.loads(run_in_private_shm(code, options=options))


def test_a_region_without_room_is_refused_in_exact_numbers() -> None:
    refused = report(f"result = attempt({2 * MIB})", "size=1m")
    assert refused["message"] == (
        "/dev/shm has too little room: wanted 2097152 bytes, 1048576 are free. Use"
        " fewer slots or smaller shapes, remove files nobody uses, or make it larger"
        " (docker run --shm-size, mount -o remount,size=)."
    )
    assert (refused["kind"], refused["is_memory_error"]) == ("OutOfSharedMemory", True)
    assert refused["context"] == {"wanted": 2 * MIB, "free": MIB}
    assert (refused["left"], refused["used"]) == ([], 0)


def test_one_page_too_many_is_refused_and_the_last_page_is_not() -> None:
    result = report(
        f"""
refused = attempt({MIB} + 1)
region = Region({MIB}, header=b"x")
region.array(0, {MIB})[:] = 1
full = free()
again = attempt(1)
region.close()
result = [refused, full, again, free()]
""",
        "size=1m",
    )
    refused, full, again, after = result
    assert refused["context"] == {"wanted": MIB + 4096, "free": MIB}
    assert full == 0
    assert again["context"] == {"wanted": 4096, "free": 0}
    assert after == MIB


def test_room_that_others_took_in_the_meantime_is_told_as_it_is_now() -> None:
    refused = report(
        f"""
def take_most_of_it(frame, event, function):
    if event == "c_return" and function is os.ftruncate:
        sys.setprofile(None)
        with open("/dev/shm/other", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, {60 * MIB})

sys.setprofile(take_most_of_it)
before = free()
result = attempt({130 * MIB})
result["used"] = before - free()
""",
        f"size={140 * MIB}",
    )
    assert refused["kind"] == "OutOfSharedMemory"
    assert refused["context"] == {"wanted": 130 * MIB, "free": 80 * MIB}
    assert (refused["left"], refused["used"]) == (["other"], 60 * MIB)


def test_more_than_the_machine_has_is_refused_before_a_page_is_taken() -> None:
    # The first page would be taken by this call. It must not come to that even if the
    # check is broken: the machine would end processes that have no part in this.
    refused = report(
        """
def stop_before_memory_is_taken(frame, event, function):
    if event == "c_call" and function in (os.posix_fallocate, os.link):
        os._exit(3)

with open("/proc/meminfo") as meminfo:
    total = int(meminfo.readline().split()[1]) * 1024
sys.setprofile(stop_before_memory_is_taken)
result = attempt(total + PAGE_BYTES)
result["total"] = total
""",
        "size=1000g",
    )
    assert refused["kind"] == "OutOfSharedMemory"
    assert 0 < refused["context"]["free"] < refused["total"]
    # To enlarge /dev/shm would not help.
    assert "/dev/shm has too little room" not in refused["message"]
    assert "shm-size" not in refused["message"]
    assert (refused["left"], refused["used"]) == ([], 0)


@pytest.mark.parametrize(("wanted", "fits"), [(15 * MIB, True), (15 * MIB + 1, False)])
def test_a_sixteenth_of_the_memory_left_is_not_taken(wanted: int, fits: bool) -> None:
    refused = report(
        f"""
import subprocess, tempfile
with tempfile.NamedTemporaryFile("w", suffix="-meminfo") as told:
    told.write("MemTotal: 99999999 kB\\nMemAvailable: {16 * 1024} kB\\n")
    told.flush()
    subprocess.run(["mount", "--bind", told.name, "/proc/meminfo"], check=True)
    try:
        result = attempt({wanted}, prefault=False)
    finally:
        subprocess.run(["umount", "/proc/meminfo"], check=True)
""",
        "size=1000g",
    )
    if fits:
        assert refused is None
    else:
        assert refused["kind"] == "OutOfSharedMemory"
        assert refused["message"] == (
            "this machine, or the container's limit, has too little memory: wanted"
            f" {15 * MIB + 4096} bytes, {15 * MIB} are free. Use fewer slots or smaller"
            " shapes, or end what uses memory: a larger /dev/shm would not help."
        )


def test_a_mount_without_a_limit_has_room() -> None:
    code = f"""
region = Region({MIB}, header=b"x")
result = os.stat(region.path).st_size
region.close()
"""
    assert report(code, "size=0") == MIB


def test_a_mount_that_can_name_no_more_files_is_told() -> None:
    refused = report("result = attempt(1)", "size=1m,nr_inodes=1")
    assert refused["kind"] == "RegionError"
    assert "No space left on device" in refused["message"]
    assert (refused["left"], refused["used"]) == ([], 0)


def test_a_mount_that_may_not_be_written_to_is_told() -> None:
    refused = report("result = attempt(1)", "size=1m,ro")
    assert refused["kind"] == "RegionError"
    assert "Read-only file system" in refused["message"]
    assert "/dev/shm must be a tmpfs that this user may write to" in refused["message"]


def test_a_process_without_descriptors_is_told_which_limit_it_met() -> None:
    refused = report(
        """
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), limits[1]))
before = free()
try:
    Region(1, header=b"x")
except RegionError as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    result = {"message": str(error), "used": before - free()}
""",
        "size=1m",
    )
    assert refused["message"].endswith(
        "Too many open files. This process has no descriptor left: see ulimit -n."
    )
    assert refused["used"] == 0


# --- locked and huge pages ------------------------------------------------------------

UNPRIVILEGED = """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
with contextlib.suppress(OSError):  # not root, or root of this mount only
    os.setuid(65534)
"""


def test_pages_that_may_not_be_locked_are_refused_with_the_limit_to_raise() -> None:
    refused = report(f"{UNPRIVILEGED}\nresult = attempt(4096, lock=True)", "size=1m")
    assert refused["kind"] == "RegionError"
    assert refused["message"].startswith(
        "could not lock 4096 bytes of shared memory in RAM: "
    )
    assert "Raise the limit (ulimit -l)" in refused["message"]
    assert refused["context"]["nbytes"] == 4096
    assert (refused["left"], refused["used"]) == ([], 0)


def test_locked_pages_are_locked() -> None:
    code = """
region = Region(4096, header=b"x", options=RegionOptions(lock=True))
result = facts("status", "VmLck")
"""
    assert report(code, "size=1m") == 4


def has_huge_pages() -> bool:
    choice = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return choice.exists() and "[deny]" not in choice.read_text()


@pytest.mark.skipif(not has_huge_pages(), reason="no huge pages for shared memory here")
@pytest.mark.parametrize(("hugepages", "kilobytes"), [("auto", 8192), ("never", 0)])
def test_huge_pages_are_used_where_they_are_offered(
    hugepages: str, kilobytes: int
) -> None:
    code = f"""
options = RegionOptions(hugepages={hugepages!r})
region = Region(8 << 20, header=b"x", options=options)
result = facts("smaps", "ShmemPmdMapped")
"""
    assert report(code, "size=64m,huge=advise") == kilobytes
