"""perf_analyzer's shared memory keys: the same for every run, so one at a time.

Owns their names, the lock on them, and removing what a run left under them. Refuses to
share them, and to touch what another user left.

The lock is on the folder of shared memory itself, which is one and the same for all who
could collide: users with caches of their own, and containers that share it. So there is
no lock file to leave, to be denied to the next user, or to plant a link in place of.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shmlane.errors import ContenderFailed
from shmlane.server.cache import say

if sys.platform == "linux":
    import fcntl

FOLDER = Path("/dev/shm")
INPUT = "INPUT__0_0_0"
OUTPUT = "OUTPUT__0"
_LIMIT_S = 900.0
_POLL_S = 0.1
_QUIET_S = 1.0


@contextlib.contextmanager
def held(*, folder: Path = FOLDER, limit_s: float = _LIMIT_S) -> Iterator[None]:
    """Have the keys to oneself; `ContenderFailed` if others do for `limit_s`.

    The kernel lets go of them for a process that dies.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _wait_for(descriptor, folder, limit_s)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, folder: Path, limit_s: float) -> None:
    started, announced = time.monotonic(), False
    while not _try_lock(descriptor):
        waited = time.monotonic() - started
        if waited >= limit_s:
            raise ContenderFailed(
                f"another process has held perf_analyzer's keys in {folder} for"
                f" {limit_s:g} s.",
                hint=f"See what it does (fuser {folder} names it) and try again.",
            )
        if waited > _QUIET_S and not announced:
            say("waiting for another perf_analyzer on this machine")
            announced = True
        time.sleep(_POLL_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(*, folder: Path = FOLDER) -> None:
    """Remove what lies under the keys; to be called while they are `held`."""
    for path in (folder / INPUT, folder / OUTPUT):
        try:
            path.unlink(missing_ok=True)
        except PermissionError as error:
            raise ContenderFailed(
                f"{path} is in perf_analyzer's way and cannot be removed: it belongs to"
                f" user {path.lstat().st_uid}.",
                hint="They or root can remove it, when they run no perf_analyzer.",
                path=str(path),
            ) from error
