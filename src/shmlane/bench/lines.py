"""What contenders are to reach, and whether they did.

Owns the lines, each for one cell in which others are measured too. A line holds on the
median of the rounds' ratios. Refuses to judge where the other side is not in the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from shmlane.bench.plan import Cell, Contender
from shmlane.bench.results import Ratio, Result, Spread

CPP = ("cpp-http", "cpp-grpc")


@dataclasses.dataclass(frozen=True)
class Line:
    """`contender` over whichever of `baselines` answers the most requests.

    Requests per second are to be at least `bound`, client CPU at most. Nothing is
    promised of a filled input.
    """

    contender: str
    metric: Literal["requests_per_s", "client_cpu"]
    baselines: tuple[str, ...]
    bound: float
    payload: str
    concurrency: int

    @property
    def is_least(self) -> bool:
        """Whether the bound is the least, and not the most, that is right."""
        return self.metric == "requests_per_s"

    def is_for(self, cell: Cell, contenders: Sequence[Contender]) -> bool:
        """Whether this cell and these contenders are what the line is about."""
        where = (cell.payload.name, cell.concurrency, cell.fill)
        names = {contender.name for contender in contenders}
        return where == (self.payload, self.concurrency, False) and names.issuperset(
            (self.contender, *self.baselines)
        )


LINES = (
    Line("shmlane-stream", "requests_per_s", CPP, 1.25, "yolov8", 16),
    Line("shmlane-stream", "client_cpu", ("cpp-http",), 0.40, "yolov8", 16),
    Line("shmlane-async", "requests_per_s", CPP, 1.05, "yolov8", 16),
    Line("shmlane-stream", "requests_per_s", CPP, 1.05, "yolov8", 64),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A line and what was measured; without a ratio it is not held.

    baseline: the one of the line's baselines that it was put over.
    """

    line: Line
    baseline: str
    ratio: Spread | None

    @property
    def is_held(self) -> bool:
        """Whether the median keeps to the bound."""
        if self.ratio is None:
            return False
        median, bound = self.ratio.median, self.line.bound
        return median >= bound if self.line.is_least else median <= bound

    def to_json(self) -> dict[str, Any]:
        """Flat, as ratios are."""
        ratio = {} if self.ratio is None else dataclasses.asdict(self.ratio)
        return {
            **dataclasses.asdict(self.line),
            "baseline": self.baseline,
            "ratio": ratio.get("median"),
            "ratio_min": ratio.get("min"),
            "ratio_max": ratio.get("max"),
            "is_held": self.is_held,
        }


def judge(
    cell: Cell,
    contenders: Sequence[Contender],
    results: Sequence[Result],
    ratios: Sequence[Ratio],
) -> list[Verdict]:
    """The lines that this cell is about; `results` and `ratios` are those of it."""
    rates = {row.contender: row.requests_per_s or 0.0 for row in results}
    by_names = {(row.contender, row.baseline): row for row in ratios}
    verdicts = []
    for line in LINES:
        if line.is_for(cell, contenders):
            best = max(line.baselines, key=rates.__getitem__)
            ratio = getattr(by_names[line.contender, best], line.metric)
            verdicts.append(Verdict(line, best, ratio))
    return verdicts
