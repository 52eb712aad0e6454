"""Ways to fill a slot that take turns, and how one of them does beside another.

Owns what the cases of one process share: the slot that is filled, the turns, ratios
with their limit, and rows of text. Refuses to infer: the server is a scripted one,
which is there for the session's sake.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shmlane.lease_blocking import Lease
from shmlane.session import Session
from shmlane.testing import ScriptedServer, sink_model

COPIES = 20
Row = tuple[str, str]
Times = Mapping[str, float]


@dataclass(frozen=True)
class Versus:
    """One way over another; `ratio` is the median of those of the rounds.

    least, most: over the rounds. limit: what the ratio may be, None where nothing is
    promised.
    """

    ratio: float
    least: float
    most: float
    limit: float | None = None

    @classmethod
    def of(
        cls,
        ours: Sequence[float],
        theirs: Sequence[float],
        *,
        limit: float | None = None,
    ) -> Versus:
        """From what both took, or did, in each round."""
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        return cls(
            ratio=round(statistics.median(ratios), 4),
            least=round(min(ratios), 4),
            most=round(max(ratios), 4),
            limit=limit,
        )

    @property
    def is_held(self) -> bool:
        """Whether the limit, if there is one, is held."""
        return self.limit is None or self.ratio <= self.limit

    def rows(self, name: str) -> list[Row]:
        """The ratio, its range, and the verdict where there is a limit."""
        rows = [
            (name, f"{self.ratio:.3f}"),
            ("  least and most", f"{self.least:.2f}..{self.most:.2f}"),
        ]
        if self.limit is not None:
            rows.append((f"  limit {self.limit:g}", verdict(self.is_held)))
        return rows


def verdict(is_held: bool) -> str:
    """As every table has it."""
    return "held" if is_held else "NOT held"


def table(heading: str, note: str, unit: str, rows: Sequence[Row]) -> str:
    """Text of 80 columns: names to the left, numbers to the right."""
    lines = [heading, *(f"  {a:<38}{b:>12}" for a, b in ((note, unit), *rows))]
    return "\n".join(lines) + "\n"


def check_row(is_right: bool) -> Row:
    """The last row: whether the values that arrived are those that were meant."""
    return ("values right", "yes" if is_right else "NO")


@contextlib.contextmanager
def scripted_lease() -> Iterator[Lease]:
    """A lease on shared memory that grows to what is written."""
    with (
        ScriptedServer([sink_model()], allow_client_shm=True) as server,
        Session(server.url, "sink", slots=1) as session,
        session.lease() as lease,
    ):
        yield lease


def take_turns(steps: Mapping[str, Callable[[], None]], rounds: int) -> list[Times]:
    """The median time of each step in each round, in microseconds.

    Before them is a round that does not count.
    """
    return [_round(steps) for _ in range(1 + rounds)][1:]


def _round(steps: Mapping[str, Callable[[], None]]) -> Times:
    """Who comes first changes each time."""
    clock = time.perf_counter_ns
    times: dict[str, list[int]] = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(COPIES):
        for name, step in order:
            begin = clock()
            step()
            times[name].append(clock() - begin)
        order.reverse()
    return {name: statistics.median(each) / 1e3 for name, each in times.items()}


def column(rounds: Sequence[Times], name: str) -> list[float]:
    """What one step took in each round."""
    return [each[name] for each in rounds]


def median_us(rounds: Sequence[Times], name: str) -> float:
    """The median over the rounds."""
    return round(statistics.median(column(rounds, name)), 2)
