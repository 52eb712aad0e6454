"""Clients compared: the second half of the demo, measured by the benchmark's core.

Owns which clients are shown, under which names, and what they are compared with.
Measures nothing itself and refuses to show a number whose replies were wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmlane.bench import PAYLOADS, make_plan
from shmlane.demo.look import Check

if TYPE_CHECKING:
    from shmlane.bench import Plan, Report, Result

BASELINE = "cpp-http"
PAYLOAD = PAYLOADS["yolov8"]
ROUNDS = 15

# In the order of the table: from what most people do to what this package does.
_LABELS = {
    "tritonclient-grpc-wire": "tritonclient gRPC, no shared memory",
    "tritonclient-http-wire": "tritonclient HTTP, no shared memory",
    "tritonclient-grpc-register": "tritonclient gRPC, register per call",
    "tritonclient-grpc-set": "tritonclient gRPC, copy per call",
    "cpp-grpc": "C++ perf_analyzer gRPC",
    "cpp-http": "C++ perf_analyzer HTTP",
    "shmlane-http": "shmlane over TCP",
    "shmlane-unix": "shmlane over a Unix socket",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One client. `ratio` is its p50 over the baseline's; None was not measured."""

    label: str
    p50_us: float | None
    p99_us: float | None
    requests_per_s: float | None
    client_cpu_us: float | None
    ratio: float | None


def make_comparison() -> Plan:
    """All clients of the table, one request in flight; about a minute."""
    return make_plan(
        contenders=_LABELS,
        payloads=[PAYLOAD.name],
        concurrency=[1],
        rounds=ROUNDS,
        quick=True,
    )


def rows(report: Report) -> list[Row]:
    """The table of clients, the baseline among them."""
    return [
        Row(
            label,
            found.p50_us,
            found.p99_us,
            found.requests_per_s,
            found.client_cpu_us,
            _ratio(report, found),
        )
        for name, label in _LABELS.items()
        for found in [_result(report, name)]
    ]


def check(report: Report) -> Check:
    """Whether every client was measured and none got a wrong value."""
    missing = [row.contender for row in report.results if row.p50_us is None]
    wrong = [row.contender for row in report.results if row.verified is False]
    problems = [
        f"{word}: {', '.join(names)}"
        for word, names in (("not measured", missing), ("wrong", wrong))
        if names
    ]
    right = f"{len(report.results)} clients, C++ after its run"
    detail = "; ".join(problems) or right
    return Check("every client answered right", report.is_complete, detail)


def _result(report: Report, name: str) -> Result:
    return report.result(name, payload=PAYLOAD.name, concurrency=1)


def _ratio(report: Report, found: Result) -> float | None:
    """Round by round where the report has it, else of the medians."""
    for ratio in report.ratios:
        if (ratio.contender, ratio.baseline) == (found.contender, BASELINE):
            return ratio.p50.median if ratio.p50 else None
    baseline = _result(report, BASELINE).p50_us
    if found.p50_us is None or not baseline:
        return None
    return found.p50_us / baseline
