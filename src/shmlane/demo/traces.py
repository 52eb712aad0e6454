"""What a run leaves behind: files of shared memory and child processes.

Owns one comparison, before and after. Refuses to clean up: a demo that hid what it
leaves would show nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from shmlane.inventory import list_regions

_SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")
# A line of /proc/PID/maps ends in the inode and the path.
_MAPPED = re.compile(rf" (\d+) +{_SHARED_MEMORY}/")
_PATIENCE = 3.0
_POLL = 0.05


class Traces:
    """Remembers what there was, to name later what was left behind since."""

    def __init__(self) -> None:
        self._files = set(_own_files())
        self._children = _children()

    def __repr__(self) -> str:
        known = f"{len(self._files)} files and {len(self._children)} processes"
        return f"<Traces beyond {known}>"

    def left(self, servers: Collection[str] = ()) -> list[str]:
        """Files and processes left behind, in words; empty is what should be.

        What ends by itself gets a moment to do so. Files that some process still has
        open or maps belong to another program that started meanwhile, and so do regions
        for other servers than `servers`.
        """
        deadline = time.monotonic() + _PATIENCE
        while (found := self._found(servers)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return found

    def _found(self, servers: Collection[str]) -> list[str]:
        fresh = set(_own_files()) - self._files
        if fresh:
            fresh -= _used_inodes()
        foreign = {
            info.name
            for info in list_regions()
            if info.server is not None and info.server not in servers
        }
        names = sorted(
            name
            for inode, name in _own_files().items()
            if inode in fresh and name not in foreign
        )
        children = sorted(_children() - self._children)
        return [f"file {_SHARED_MEMORY / name}" for name in names] + [
            f"process {pid}" for pid in children
        ]


def _own_files() -> dict[int, str]:
    """Files in /dev/shm that belong to this user, by inode."""
    files = {}
    with os.scandir(_SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    files[entry.inode()] = entry.name
    return files


def _used_inodes() -> set[int]:
    """Files in /dev/shm that any process of this user has open or maps.

    By inode: a file that got its name after it was opened is known to /proc as deleted.
    """
    used = set()
    for process in _PROC.glob("[0-9]*"):
        # It may have ended meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            used |= {
                int(line[1])
                for line in _MAPPED.finditer((process / "maps").read_text())
            }
            for link in (process / "fd").iterdir():
                if os.readlink(link).startswith(f"{_SHARED_MEMORY}/"):
                    used.add(link.stat().st_ino)
    return used


def _children() -> set[int]:
    """Processes that this one started and that have not ended."""
    children = set()
    for file in _PROC.glob("self/task/*/children"):
        children |= set(map(int, file.read_text().split()))
    return children
