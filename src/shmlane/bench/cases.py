"""The cases that `shmlane bench --case` knows, and what each measures by itself.

Owns their names. A case is a comparison of clients with other defaults, or a
measurement of its own. Refuses to know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shmlane.errors import UsageError

from .crews import measure_crews
from .handing import measure_handoff
from .overhead import measure_overhead
from .plan import MANY, WIRE, Defaults, Plan
from .preprocessing import measure_preprocess
from .servers import own_servers
from .writing import measure_write


class Measured(Protocol):
    """What a case found for one payload."""

    @property
    def is_held(self) -> bool:
        """Whether the case's limit, if it has one, is held by right values."""

    def to_json(self) -> dict[str, object]:
        """All of it, ready for JSON."""

    def render(self) -> str:
        """All of it, as text of 80 columns."""


@dataclass(frozen=True)
class Case:
    """What is measured where nothing is named, and how: None compares the clients."""

    defaults: Defaults
    measure: Callable[[Plan], Sequence[Measured]] | None = None


def find_case(name: str) -> Case:
    """Raises `UsageError`, which lists the known ones."""
    if name not in CASES:
        raise UsageError(
            f"there is no case {name!r}.", hint=f"Known are {', '.join(CASES)}."
        )
    return CASES[name]


def _alone(measure: Callable[..., Measured]) -> Callable[[Plan], Sequence[Measured]]:
    """For what needs no server: payload by payload."""

    def measured(plan: Plan) -> Sequence[Measured]:
        return [measure(payload, rounds=plan.rounds) for payload in plan.payloads]

    return measured


def _served(measure: Callable[..., Measured]) -> Callable[[Plan], Sequence[Measured]]:
    """For what talks to a server of ours: payload by payload."""

    def measured(plan: Plan) -> Sequence[Measured]:
        with own_servers(plan) as servers:
            url = servers.url(plan.contenders[0])
            return [
                measure(url, payload, rounds=plan.rounds) for payload in plan.payloads
            ]

    return measured


def _crews(plan: Plan) -> Sequence[Measured]:
    with own_servers(plan) as servers:
        return [measure_crews(payload, plan, servers) for payload in plan.payloads]


_ONE = Defaults(("shmlane-http",), ("yolov8",), (1,))
_FEW = Defaults(("shmlane-http",), ("yolov8",), (1, 2, 4))

CASES: Mapping[str, Case] = {
    "overhead": Case(_ONE, _served(measure_overhead)),
    "write": Case(_ONE, _alone(measure_write)),
    "preprocess": Case(_ONE, _alone(measure_preprocess)),
    "handoff": Case(_ONE, _served(measure_handoff)),
    "gil": Case(_FEW, _crews),
    "wire": Case(WIRE),
    "many": Case(MANY),
}
