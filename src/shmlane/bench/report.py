"""What was measured, as numbers: samples, results, ratios, and their JSON.

Owns the statistics. A result is the median over the rounds of each metric; a ratio is
the median over the rounds of what two contenders had in the same round, because rounds
are close in time and a machine's mood is not a difference between clients. Refuses to
fill gaps: what was not measured is None here and null in JSON.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from shmlane.bench.plan import Cell, Contender, Plan
from shmlane.errors import UsageError

Rounds = Mapping[str, Sequence["Sample"]]
_Row = TypeVar("_Row")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One turn of one contender in one round. `note` says what went wrong, if so."""

    p50_us: float | None = None
    p90_us: float | None = None
    p99_us: float | None = None
    requests_per_s: float | None = None
    client_cpu_us: float | None = None
    server_us: float | None = None
    verified: bool | None = None
    note: str = ""


METRICS = ("p50_us", "p90_us", "p99_us", "requests_per_s", "client_cpu_us", "server_us")
RATIO_METRICS = {
    "p50": "p50_us",
    "p99": "p99_us",
    "requests_per_s": "requests_per_s",
    "client_cpu": "client_cpu_us",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One contender in one cell. `verified`: every reply that can be checked was right;
    None if none could be."""

    contender: str
    memory: str
    payload: str
    concurrency: int
    fill: bool
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    requests_per_s: float | None
    client_cpu_us: float | None
    server_us: float | None
    verified: bool | None


@dataclasses.dataclass(frozen=True)
class Spread:
    """A ratio over the rounds: its median and its extremes."""

    median: float
    min: float
    max: float


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One contender's numbers over another's, round by round.

    `rounds` counts the rounds in which both were measured. Below 1 is better for p50,
    p99 and client_cpu, above 1 for requests_per_s.
    """

    contender: str
    baseline: str
    payload: str
    concurrency: int
    fill: bool
    p50: Spread | None
    p99: Spread | None
    requests_per_s: Spread | None
    client_cpu: Spread | None
    rounds: int

    def to_json(self) -> dict[str, Any]:
        """Flat: `p50`, `p50_min`, `p50_max` and so on."""
        facts: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in RATIO_METRICS:
                facts[field.name] = value
                continue
            facts[field.name] = None if value is None else value.median
            facts[f"{field.name}_min"] = None if value is None else value.min
            facts[f"{field.name}_max"] = None if value is None else value.max
        return facts


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that one run of the benchmark found.

    `notes` are the failures and oddities of this run, each with where it happened;
    they travel in JSON under `machine.run` beside the seed and the caveats.
    """

    plan: Plan
    machine: Mapping[str, Any]
    server: Mapping[str, Any]
    results: tuple[Result, ...]
    ratios: tuple[Ratio, ...]
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether each contender of the plan was measured in each cell, none wrong."""
        measured = [row for row in self.results if row.p50_us is not None]
        expected = len(self.plan.cells()) * len(self.plan.contenders)
        return len(measured) == expected and not any(
            row.verified is False for row in measured
        )

    def result(
        self, contender: str, *, payload: str, concurrency: int, fill: bool = False
    ) -> Result:
        """The row of one contender; raises `UsageError` if it was not measured."""
        return _only(
            self.results,
            {
                "contender": contender,
                "payload": payload,
                "concurrency": concurrency,
                "fill": fill,
            },
        )

    def ratio(
        self,
        contender: str,
        baseline: str,
        *,
        payload: str,
        concurrency: int,
        fill: bool = False,
    ) -> Ratio:
        """`contender` over `baseline`; raises `UsageError` if it was not measured."""
        return _only(
            self.ratios,
            {
                "contender": contender,
                "baseline": baseline,
                "payload": payload,
                "concurrency": concurrency,
                "fill": fill,
            },
        )

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        run = {
            "seed": self.plan.seed,
            "rounds": self.plan.rounds,
            "traffic_s": self.plan.traffic_s,
            "caveats": list(self.caveats),
            "notes": list(self.notes),
        }
        return {
            "machine": {**self.machine, "run": run},
            "server": dict(self.server),
            "results": [dataclasses.asdict(row) for row in self.results],
            "ratios": [row.to_json() for row in self.ratios],
        }


def make_results(
    cell: Cell, contenders: Iterable[Contender], rounds: Rounds
) -> list[Result]:
    """One row a contender, of the medians of its samples in this cell."""
    return [
        Result(
            contender=contender.name,
            memory=contender.memory,
            payload=cell.payload.name,
            concurrency=cell.concurrency,
            fill=cell.fill,
            verified=_verdict(rounds.get(contender.name, ())),
            **_medians(rounds.get(contender.name, ())),
        )
        for contender in contenders
    ]


def make_ratios(
    cell: Cell, contenders: Sequence[Contender], rounds: Rounds
) -> list[Ratio]:
    """Each shmlane client over each that is not, and its Unix over its TCP socket."""
    return [
        _ratio(cell, ours.name, other.name, rounds)
        for ours in contenders
        for other in contenders
        if _is_pair(ours, other)
    ]


def _is_pair(ours: Contender, other: Contender) -> bool:
    if ours.program != "shmlane":
        return False
    if other.program != "shmlane":
        return True
    endpoints = (ours.endpoint, other.endpoint)
    return ours.memory == other.memory and endpoints == ("unix", "http")


def _ratio(cell: Cell, contender: str, baseline: str, rounds: Rounds) -> Ratio:
    # A contender that failed has fewer samples, of the first rounds.
    pairs = list(zip(rounds.get(contender, ()), rounds.get(baseline, ()), strict=False))
    return Ratio(
        contender=contender,
        baseline=baseline,
        payload=cell.payload.name,
        concurrency=cell.concurrency,
        fill=cell.fill,
        p50=_spread(pairs, "p50_us"),
        p99=_spread(pairs, "p99_us"),
        requests_per_s=_spread(pairs, "requests_per_s"),
        client_cpu=_spread(pairs, "client_cpu_us"),
        rounds=len(_quotients(pairs, "p50_us")),
    )


def _quotients(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> list[float]:
    values = ((getattr(a, metric), getattr(b, metric)) for a, b in pairs)
    return [ours / theirs for ours, theirs in values if ours is not None and theirs]


def _spread(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> Spread | None:
    quotients = _quotients(pairs, metric)
    if not quotients:
        return None
    return Spread(statistics.median(quotients), min(quotients), max(quotients))


def _medians(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {metric: _median(samples, metric) for metric in METRICS}


def _median(samples: Sequence[Sample], metric: str) -> float | None:
    values = [v for sample in samples if (v := getattr(sample, metric)) is not None]
    return statistics.median(values) if values else None


def _verdict(samples: Sequence[Sample]) -> bool | None:
    verdicts = {sample.verified for sample in samples if sample.verified is not None}
    return None if not verdicts else verdicts == {True}


def _only(rows: Iterable[_Row], wanted: Mapping[str, object]) -> _Row:
    for row in rows:
        if all(getattr(row, name) == value for name, value in wanted.items()):
            return row
    facts = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    raise UsageError(
        f"nothing was measured for {facts}.",
        hint="Name what the plan has; ratios have a shmlane client on top.",
        wanted=dict(wanted),
    )
