"""What was measured, as numbers: samples, results, and ratios.

Owns the statistics. A result is the median over the rounds of each metric; a ratio is
the median over the rounds of what two contenders had in the same round, because rounds
are close in time and a machine's mood is not a difference between clients. Refuses to
fill gaps: what was not measured is None.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shmlane.bench.plan import Cell, Contender

Rounds = Mapping[str, Sequence["Sample"]]


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
    is_alike = (ours.memory, ours.flow) == (other.memory, other.flow)
    return is_alike and (ours.endpoint, other.endpoint) == ("unix", "http")


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
