"""How much shared memory can be had now, and the error where it is too little.

Owns what the file system, the machine and the container say of their limits. Refuses to
take any. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from .errors import OutOfSharedMemory

SHM_DIRECTORY = "/dev/shm"
_CGROUPS = "/sys/fs/cgroup"


def check_room(fd: int, nbytes: int) -> None:
    """Refuse before any page is taken what there is no room for.

    A tmpfs may promise more than there is, and there the answer to reserving all, or
    nearly all, is the out-of-memory killer: the machine's, or the container's.
    """
    room, memory = free_bytes(fd), min(_machine_memory(), _container_memory())
    if nbytes > min(room, memory):
        raise out_of_memory(nbytes, min(room, memory), ram=memory < room)


def free_bytes(fd: int) -> int:
    """What the file system of an open file has left."""
    room = os.fstatvfs(fd)
    # A tmpfs without a limit has no blocks at all.
    return room.f_bavail * room.f_frsize if room.f_blocks else sys.maxsize


def _machine_memory() -> int:
    """What may be taken without anyone being killed for it (proc(5): MemAvailable)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                # An estimate: close to it, the killer came. Others live on the rest.
                return int(line.split()[1]) * 1024 // 16 * 15
    return sys.maxsize


def _container_memory() -> int:
    """What the control groups of this process leave it; pages of a tmpfs count too."""
    left = [_left_in(group) for group in _memory_groups()]
    return min(left, default=sys.maxsize)


def _memory_groups() -> Iterator[str]:
    """Folders of the groups that limit this process, from its own upwards.

    In a container they lie at the root of what is mounted, by whatever path.
    """
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers in ("", "memory"):
                root = os.path.join(_CGROUPS, controllers)
                folder = root + path.rstrip("/")
                while folder.startswith(root):
                    yield folder
                    folder = os.path.dirname(folder)


def _left_in(group: str) -> int:
    """What one group may still take: cgroup v2, else v1, else no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        # "max" is no number, and no limit.
        with contextlib.suppress(OSError, ValueError):
            taken = _number(group, used) - _reclaimable(group)
            return max(0, _number(group, limit) - taken)
    return sys.maxsize


def _number(group: str, name: str) -> int:
    with open(os.path.join(group, name)) as told:
        return int(told.read())


def _reclaimable(group: str) -> int:
    """Cached files count as used, and make room when it is needed."""
    path = os.path.join(group, "memory.stat")
    with contextlib.suppress(OSError, ValueError), open(path) as told:
        for line in told:
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def out_of_memory(nbytes: int, free: int, *, ram: bool = False) -> OutOfSharedMemory:
    """ram: the machine or the container is the limit, and not the file system."""
    lack = f"{SHM_DIRECTORY} has too little room"
    remedy = (
        "remove files nobody uses, or make it larger (docker run --shm-size, mount -o"
        " remount,size=)"
    )
    if ram:
        lack = "this machine, or the container's limit, has too little memory"
        remedy = f"or end what uses memory: a larger {SHM_DIRECTORY} would not help"
    return OutOfSharedMemory(
        f"{lack}: wanted {nbytes} bytes, {free} are free.",
        hint=f"Use fewer slots or smaller shapes, {remedy}.",
        wanted=nbytes,
        free=free,
    )
