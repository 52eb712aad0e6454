"""What a run leaves behind: files of shared memory and child processes.

Owns one comparison, before and after. Refuses to clean up: a demo that hid what it
leaves would show nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")
_PATIENCE = 3.0
_POLL = 0.05


class Traces:
    """Remembers what there was, to name later what was left behind since."""

    def __init__(self) -> None:
        self._files = _own_files()
        self._children = _children()

    def __repr__(self) -> str:
        known = f"{len(self._files)} files and {len(self._children)} processes"
        return f"<Traces beyond {known}>"

    def left(self) -> list[str]:
        """Files and processes left behind, in words; empty is what should be.

        What ends by itself gets a moment to do so. Files that some process still maps
        belong to another program that started meanwhile.
        """
        deadline = time.monotonic() + _PATIENCE
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return found

    def _found(self) -> list[str]:
        fresh = _own_files() - self._files
        if fresh:
            mapped = _mapped_files()
            fresh = {
                name for name in fresh - mapped if (_SHARED_MEMORY / name).exists()
            }
        files = [f"file {_SHARED_MEMORY / name}" for name in sorted(fresh)]
        return files + [
            f"process {pid}" for pid in sorted(_children() - self._children)
        ]


def _own_files() -> set[str]:
    """Names in /dev/shm that belong to this user."""
    names = set()
    with os.scandir(_SHARED_MEMORY) as entries:
        for entry in entries:
            try:
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    names.add(entry.name)
            except FileNotFoundError:
                continue
    return names


def _mapped_files() -> set[str]:
    """Names in /dev/shm that any process of this user maps."""
    prefix = f"{_SHARED_MEMORY}/"
    names = set()
    for maps in _PROC.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # ended meanwhile, or another user's
            continue
        for line in lines:
            _, found, name = line.partition(prefix)
            if found:
                names.add(name)
    return names


def _children() -> set[int]:
    """Processes that this one started and that have not ended."""
    children = set()
    for file in _PROC.glob("self/task/*/children"):
        children |= set(map(int, file.read_text().split()))
    return children
