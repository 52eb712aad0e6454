"""What a run must show: everything happened, and nothing grew.

Owns the lists of what must occur, the bounds, and the table of counts. Refuses to
measure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.faults import FAULTS
from tests.chaos.machine import Usage

# In shorter runs a kind of fault or its effect may be missing by chance.
NORMAL_LENGTH = 40.0
OUTCOMES = (
    "requests",
    "successes",
    "tasks cancelled",
    "timeouts of asyncio",
    "leases found busy",
    "submitted tasks cancelled",
    "tasks forgotten",
    "tasks closed",
    "futures cancelled",
    "futures forgotten",
    "futures closed",
    "streams ended",
    "streams left early",
    "results of streams",
    "errors in the place of results",
    "Clumsy",
    "slots handed over",
    "slots adopted",
    "hand-offs expired",
    "visits to shared slots",
    "leases dropped",
    "visits",
    "visits of tasks",
    "looks at kept views",
    "InferTimeout",
    "RequestLost",
    "ServerUnreachable",
    "LeaseTimeout",
    "ProtocolError",
    "calls at rest",
    "sessions left",
    "connections",
    "registrations",
    "reregistrations",
    "retries",
    "growths",
    "waits",
    "spare_slots",
    "late_replies",
    "drains",
)

_MIB = 1 << 20

# What a client may still gain: descriptors of slots that were not used or grown before
# the early point (a connection, and two for the memory of each tensor that moved; at
# most 6 slots in each of 13 sessions), and of other processes' regions that sessions
# keep open after they had slots of them: 32 and the last one each, of two descriptors.
# Threads that event loops keep for what has to wait (at most 4 in each of 5 sessions,
# and a few for closing), and pages that threads' arenas keep. What a server may: a
# connection for each such slot, and buffers for the largest request that each of its
# threads has met. A leak shows far above in a long run, which makes tens of thousands
# of connections, registrations and requests in between; most show in a short one.
MEMORY_GROWTH = 24 * _MIB
DESCRIPTOR_GROWTH = 800
THREAD_GROWTH = 24


@dataclass(frozen=True)
class Calm:
    """What was in use when everything had come free."""

    requests: int
    client: Usage
    server: Usage


@dataclass(frozen=True)
class Run:
    """One run that came to its end."""

    seconds: float
    faults: Counter[str]
    outcomes: Counter[str]
    calms: Sequence[Calm]

    def complaints(self) -> list[str]:
        """What was not as it must be; empty after a good run."""
        return [*self._absent(), *self._grown()]

    def _absent(self) -> Iterator[str]:
        if self.seconds < NORMAL_LENGTH:
            return
        for name in FAULTS:
            if not self.faults[name]:
                yield f"fault never caused: {name}"
        for name in OUTCOMES:
            if not self.outcomes[name]:
                yield f"outcome never seen: {name}"

    def _grown(self) -> Iterator[str]:
        """The first client is never killed, the server not after the middle point."""
        early, middle, late = self.calms
        yield from _grown("the client in the first seat", early.client, late.client)
        yield from _grown("the server", middle.server, late.server)

    def __str__(self) -> str:
        lines = [f"{self.seconds:g} s of chaos", "  faults"]
        lines += _table(self.faults)
        lines += ["  outcomes", *_table(self.outcomes), "  calm points"]
        for calm in self.calms:
            lines.append(
                f"    after {calm.requests} requests: client {_tell(calm.client)};"
                f" server {_tell(calm.server)}"
            )
        return "\n".join(lines)


def _grown(who: str, early: Usage, late: Usage) -> Iterator[str]:
    if early.pid != late.pid:
        yield f"{who} cannot be compared: process {early.pid} is {late.pid} later"
    if late.memory - early.memory > MEMORY_GROWTH:
        yield f"memory of {who} grew from {_tell(early)} to {_tell(late)}"
    if late.descriptors - early.descriptors > DESCRIPTOR_GROWTH:
        yield f"descriptors of {who} grew from {_tell(early)} to {_tell(late)}"
    if late.threads - early.threads > THREAD_GROWTH:
        yield f"threads of {who} grew from {_tell(early)} to {_tell(late)}"


def _tell(usage: Usage) -> str:
    return (
        f"{usage.memory / _MIB:.1f} MiB, {usage.descriptors} descriptors,"
        f" {usage.threads} threads"
    )


def _table(counts: Counter[str]) -> list[str]:
    return [f"    {count:9} {name}" for name, count in counts.most_common()]
