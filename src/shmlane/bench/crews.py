"""Threads of one process against processes of one thread each: the case `gil`.

Owns who takes part, the rounds, and what they say of this machine and this Python. All
take turns in random order, each in processes of its own, and are compared with one
thread in the same round. Refuses to compare with other clients, and to promise
anything: how far threads carry depends on the cores.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from .plan import Cell, Contender, Payload, Plan, Way
from .results import Sample
from .server_stats import ServerStats
from .servers import Servers
from .turns import Versus
from .worker import Worker, one_round, shmlane_program

_WIDTH = 80


@dataclass(frozen=True)
class Filling:
    """What is done with the input before each request."""

    name: str
    way: Way
    is_copied: bool = False


FILLINGS = (
    Filling("no fill", "in place"),
    Filling("np.copyto", "in place", is_copied=True),
    Filling("image_into", "from a picture"),
)


@dataclass(frozen=True)
class Crew:
    """So many workers: threads that share a session, or processes that do not."""

    kind: str
    workers: int

    def __str__(self) -> str:
        kind = self.kind if self.workers > 1 else self.kind.removesuffix("s")
        return f"{self.workers} {kind}"


ALONE = Crew("threads", 1)
Round = Mapping[Crew, Sample]


@dataclass(frozen=True)
class Beside:
    """One crew over another: requests per second, and client CPU per request."""

    rate: Versus
    cpu: Versus

    @classmethod
    def of(cls, ours: Crew, theirs: Crew, measured: Sequence[Round]) -> Beside:
        """In each round."""
        rate, cpu = (
            Versus.of(_numbers(measured, ours, each), _numbers(measured, theirs, each))
            for each in ("requests_per_s", "client_cpu_us")
        )
        return cls(rate, cpu)


@dataclass(frozen=True)
class CrewResult:
    """How one crew did with one filling; the numbers are medians over the rounds.

    to_one: over one thread. to_threads: over as many threads.
    """

    filling: str
    crew: Crew
    requests_per_s: float
    client_cpu_us: float
    to_one: Beside
    to_threads: Beside


@dataclass(frozen=True)
class CrewReport:
    """What the case found.

    cores: what crew and server had to share. verified: every reply was right. notes:
    what went wrong, if anything.
    """

    payload: str
    rounds: int
    cores: int
    python: str
    has_gil: bool
    results: tuple[CrewResult, ...]
    verified: bool
    notes: tuple[str, ...]

    @property
    def is_held(self) -> bool:
        """Nothing is promised but right replies."""
        return self.verified

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def render(self) -> str:
        """Text of 80 columns: what it means first, then the numbers."""
        gil = "with the GIL" if self.has_gil else "without the GIL"
        lines = [
            f"gil, {self.payload}: Python {self.python} {gil}, {self.cores} cores,"
            f" {self.rounds} rounds",
            *_item(f"Replies are {'right' if self.verified else 'WRONG'}."),
            *_item(
                f"The server works on the same {self.cores} cores. With more workers"
                " than the server leaves cores for, a ratio above 1 is waiting that"
                " was made use of, not a core that was added."
            ),
            *_item(self._in_words()),
        ]
        for filling in dict.fromkeys(row.filling for row in self.results):
            lines += ["", _heading(filling)]
            lines += [_line(row) for row in self.results if row.filling == filling]
        for note in self.notes:
            lines += _item(note)
        return "\n".join(lines) + "\n"

    def _in_words(self) -> str:
        """Processes beside threads where most are at it; nothing for one worker."""
        most = max(row.crew.workers for row in self.results)
        said = [
            f"{row.to_threads.rate.ratio:.2f} x the requests for"
            f" {row.to_threads.cpu.ratio:.2f} x the CPU ({row.filling})"
            for row in self.results
            if row.crew == Crew("processes", most)
        ]
        if not said:
            return ""
        return f"{most} processes over {most} threads: {', '.join(said)}."


def _item(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _heading(filling: str) -> str:
    return (
        f"  {filling:<14}{'req/s':>8}{'over 1 thread':>20}{'CPU µs':>10}"
        f"{'over 1 thread':>20}"
    )


def _line(row: CrewResult) -> str:
    return (
        f"  {row.crew!s:<14}{row.requests_per_s:>8.0f}{_spread(row.to_one.rate):>20}"
        f"{row.client_cpu_us:>10.1f}{_spread(row.to_one.cpu):>20}"
    )


def _spread(versus: Versus) -> str:
    return f"{versus.ratio:.2f} ({versus.least:.2f}-{versus.most:.2f})"


def measure_crews(payload: Payload, plan: Plan, servers: Servers) -> CrewReport:
    """Measure against `servers.http`; `plan.concurrency` says how many workers."""
    order = random.Random(plan.seed)
    results: list[CrewResult] = []
    samples: list[Sample] = []
    for filling in FILLINGS:
        with _open_crews(payload, filling, plan, servers) as crews:
            measured = [_one_round(crews, order) for _ in range(plan.rounds)]
        results += [_result(filling, crew, measured) for crew in crews]
        samples += [sample for each in measured for sample in each.values()]
    return CrewReport(
        payload=payload.name,
        rounds=plan.rounds,
        cores=len(os.sched_getaffinity(0)),
        python=sys.version.split()[0],
        has_gil=getattr(sys, "_is_gil_enabled", lambda: True)(),
        results=tuple(results),
        verified=all(sample.verified for sample in samples),
        notes=tuple(dict.fromkeys(sample.note for sample in samples if sample.note)),
    )


_Crews = Mapping[Crew, Callable[[], Sample]]


@contextlib.contextmanager
def _open_crews(
    payload: Payload, filling: Filling, plan: Plan, servers: Servers
) -> Iterator[_Crews]:
    """All crews, ready and idle; threads first. Each gives its turn when called."""
    contender = Contender("shmlane-http", "shmlane", "http", way=filling.way)
    program, stats = shmlane_program(), servers.stats(contender)
    with contextlib.ExitStack() as opened:

        def start(threads: int) -> Worker:
            worker = Worker(
                program,
                contender,
                Cell(payload, threads, filling.is_copied),
                stats,
                url=servers.url(contender),
                traffic_s=plan.traffic_s,
            )
            opened.callback(worker.close)
            return worker

        counts = sorted({ALONE.workers, *plan.concurrency})
        crews = {Crew("threads", count): start(count).round for count in counts}
        for count in counts[1:]:
            several = [start(1) for _ in range(count)]
            crews[Crew("processes", count)] = _round_of(several, stats)
        yield crews


def _round_of(workers: Sequence[Worker], stats: ServerStats) -> Callable[[], Sample]:
    return lambda: one_round(workers, stats)


def _one_round(crews: _Crews, order: random.Random) -> Round:
    return {crew: crews[crew]() for crew in order.sample(list(crews), len(crews))}


def _result(filling: Filling, crew: Crew, measured: Sequence[Round]) -> CrewResult:
    def median(metric: str) -> float:
        return round(statistics.median(_numbers(measured, crew, metric)), 2)

    return CrewResult(
        filling=filling.name,
        crew=crew,
        requests_per_s=median("requests_per_s"),
        client_cpu_us=median("client_cpu_us"),
        to_one=Beside.of(crew, ALONE, measured),
        to_threads=Beside.of(crew, Crew("threads", crew.workers), measured),
    )


def _numbers(measured: Sequence[Round], crew: Crew, metric: str) -> list[float]:
    return [float(getattr(each[crew], metric)) for each in measured]
