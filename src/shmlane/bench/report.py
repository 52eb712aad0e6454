"""Everything that one run of the benchmark found, and its JSON.

Owns looking it up. Refuses to fill gaps: what was not measured is null in JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from shmlane.bench.lines import Verdict
from shmlane.bench.plan import Plan
from shmlane.bench.results import Ratio, Result
from shmlane.errors import UsageError

_Row = TypeVar("_Row")


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
    lines: tuple[Verdict, ...] = ()
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

    @property
    def is_held(self) -> bool:
        """Whether all was measured, all was right, and each line is held."""
        return self.is_complete and all(line.is_held for line in self.lines)

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
            "lines": [line.to_json() for line in self.lines],
        }


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
