"""The logs of servers: how long they are kept.

Owns removing old ones. Refuses to remove the log of a server that runs, however long
ago it wrote its last line, and any that somebody may still be about to read.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_KEPT = 50
_KEPT_S = 24 * 3600.0


def drop_old_logs(folder: Path) -> None:
    """Remove logs that are not among the newest, not of the last day, and not in use.

    Whoever uses one holds a shared `flock` on it, as keepers and their servers do.
    """
    found = []
    for log in folder.glob("*.log"):
        with contextlib.suppress(FileNotFoundError):
            found.append((log.stat().st_mtime, log))
    for changed, log in sorted(found)[:-_KEPT]:
        if changed < time.time() - _KEPT_S:
            # Gone meanwhile, or another user's.
            with contextlib.suppress(OSError):
                _remove_unused(log)


def _remove_unused(log: Path) -> None:
    import fcntl

    descriptor = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.unlink()
    finally:
        os.close(descriptor)
