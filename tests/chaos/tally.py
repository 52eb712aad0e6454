"""Counts of what happened in a client, which many threads add to.

Owns which of a session's own counters are told as well. Refuses to judge them.
"""

from __future__ import annotations

import collections
import threading

from shmlane import SessionStats

COUNTERS = (
    "registrations",
    "reregistrations",
    "connections",
    "retries",
    "growths",
    "waits",
    "spare_slots",
    "late_replies",
    "drains",
    "retired",
)


class Tally:
    """Counts that many threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def add_stats(self, stats: SessionStats) -> None:
        for name in COUNTERS:
            self.add(name, getattr(stats, name))

    def copy(self) -> collections.Counter[str]:
        with self._lock:
            return self._counts.copy()
