"""What a process uses of the machine, and whether it stands still.

Owns reading it from /proc. Refuses to judge it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Memory of a process that is no shared memory, in bytes; descriptors; threads."""

    pid: int
    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return cls(
            pid=pid,
            memory=int(fields["RssAnon"].split()[0]) * 1024,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(fields["Threads"]),
        )


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    try:
        states = {
            path.read_text().rpartition(")")[2].split()[0]
            for path in Path(f"/proc/{pid}/task").glob("*/stat")
        }
    except (FileNotFoundError, ProcessLookupError):
        # A thread that has just ended did not stand still.
        return False
    return states == {"T"}
