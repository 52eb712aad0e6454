"""What is measured: contenders, payloads, and the cells in which they meet.

Owns the names that the command line, the JSON and the table use, and the choice of how
many rounds fit. Refuses to know how anything is measured: a new contender or payload is
one more entry here, and a program that `contenders` can start.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from shmlane.errors import UsageError

FULL_ROUNDS = 15
FULL_TRAFFIC_S = 0.5
QUICK_TRAFFIC_S = 0.25
_QUICK_BUDGET_S = 120.0
_FEWEST_ROUNDS = 3
# What a turn takes beside its traffic. perf_analyzer never ends in less than a second.
_TURN_COST_S = {"shmlane": 0.08, "tritonclient": 0.08, "perf_analyzer": 0.95}

_T = TypeVar("_T")
Program = Literal["shmlane", "tritonclient", "perf_analyzer"]
Endpoint = Literal["http", "grpc", "unix"]
Memory = Literal["system", "wire"]
Way = Literal[
    "in place",
    "in the request",
    "set per call",
    "register per call",
    "from a picture",
]
Flow = Literal["threads", "tasks", "stream"]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One client, as it is commonly used: its program, address and way with tensors.

    flow: what keeps several requests in flight.
    """

    name: str
    program: Program
    endpoint: Endpoint
    memory: Memory = "system"
    way: Way = "in place"
    flow: Flow = "threads"


@dataclasses.dataclass(frozen=True)
class Payload:
    """One input tensor; the reply is its last element."""

    name: str
    shape: tuple[int, ...]
    datatype: str = "FP32"

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * 4

    @property
    def text(self) -> str:
        """The shape as people write it: `1x3x224x224`."""
        return "x".join(map(str, self.shape))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of conditions that contenders are compared under.

    `fill`: each client is asked to write its whole input in every call. perf_analyzer
    never does; `set per call` and `register per call` do either way. `in the request`
    sends one ready array in every call, its last element changed, either way.
    """

    payload: Payload
    concurrency: int
    fill: bool

    def __str__(self) -> str:
        filling = ", filled" if self.fill else ""
        return f"{self.payload.name} x{self.concurrency}{filling}"


def _by_name(*contenders: Contender) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


CONTENDERS: Mapping[str, Contender] = _by_name(
    Contender("shmlane-http", "shmlane", "http"),
    Contender("shmlane-unix", "shmlane", "unix"),
    Contender("cpp-http", "perf_analyzer", "http"),
    Contender("cpp-grpc", "perf_analyzer", "grpc"),
    Contender("tritonclient-http", "tritonclient", "http"),
    Contender("tritonclient-grpc", "tritonclient", "grpc"),
    Contender("shmlane-wire", "shmlane", "http", "wire", "in the request"),
    Contender(
        "tritonclient-http-wire", "tritonclient", "http", "wire", "in the request"
    ),
    Contender(
        "tritonclient-grpc-wire", "tritonclient", "grpc", "wire", "in the request"
    ),
    Contender(
        "tritonclient-grpc-set", "tritonclient", "grpc", "system", "set per call"
    ),
    Contender(
        "tritonclient-grpc-register",
        "tritonclient",
        "grpc",
        "system",
        "register per call",
    ),
    Contender("shmlane-async", "shmlane", "http", flow="tasks"),
    Contender("shmlane-stream", "shmlane", "http", flow="stream"),
)
PAYLOADS: Mapping[str, Payload] = {
    payload.name: payload
    for payload in (
        Payload("tiny", (1, 1, 1, 16)),
        Payload("resnet50", (1, 3, 224, 224)),
        Payload("yolov8", (1, 3, 640, 640)),
    )
}
DEFAULT_CONTENDERS = tuple(CONTENDERS)[:6]
DEFAULT_CONCURRENCY = (1, 4, 16)
MOST_CONCURRENCY = 64


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What is measured where nothing is named."""

    contenders: tuple[str, ...]
    payloads: tuple[str, ...]
    concurrency: tuple[int, ...]


MATRIX = Defaults(DEFAULT_CONTENDERS, tuple(PAYLOADS), DEFAULT_CONCURRENCY)
WIRE = Defaults(
    tuple(name for name, each in CONTENDERS.items() if each.memory == "wire"),
    ("yolov8",),
    (1,),
)
MANY = Defaults(
    ("shmlane-stream", "shmlane-async", "shmlane-http", "cpp-http", "cpp-grpc"),
    ("yolov8",),
    (16, 64),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure. Every round of a cell has one turn of each contender.

    `pilots`: how often perf_analyzer tries each of its modes before the rounds.
    """

    contenders: tuple[Contender, ...]
    payloads: tuple[Payload, ...]
    concurrency: tuple[int, ...]
    rounds: int
    fill: bool = False
    traffic_s: float = FULL_TRAFFIC_S
    pilots: int = 2
    seed: int = 0

    def cells(self) -> list[Cell]:
        """All cells, small payloads first."""
        return [
            Cell(payload, concurrency, self.fill)
            for payload, concurrency in itertools.product(
                self.payloads, self.concurrency
            )
        ]

    @property
    def expected_s(self) -> float:
        """About how long all rounds take, less what starting contenders takes."""
        turns = sum(self.traffic_s + _TURN_COST_S[c.program] for c in self.contenders)
        return turns * len(self.cells()) * self.rounds

    def programs(self) -> set[Program]:
        """Which programs the contenders need."""
        return {contender.program for contender in self.contenders}


def make_plan(
    *,
    contenders: Iterable[str] | None = None,
    payloads: Iterable[str] | None = None,
    concurrency: Iterable[int] | None = None,
    rounds: int | None = None,
    fill: bool = False,
    quick: bool = False,
    seed: int | None = None,
    defaults: Defaults = MATRIX,
) -> Plan:
    """A plan from names; what is not given is as in `defaults`.

    `quick` means shorter rounds, and only as many as end in about two minutes: at most
    15, and fewer for a large matrix. Without it there are 15. Raises `UsageError` for
    unknown names, which lists the known ones.
    """
    plan = Plan(
        contenders=_chosen("contender", contenders, CONTENDERS, defaults.contenders),
        payloads=_chosen("payload", payloads, PAYLOADS, defaults.payloads),
        concurrency=_checked_concurrency(concurrency, defaults.concurrency),
        rounds=_checked_rounds(rounds),
        fill=fill,
        traffic_s=QUICK_TRAFFIC_S if quick else FULL_TRAFFIC_S,
        pilots=1 if quick else 2,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
    )
    if quick and rounds is None:
        return dataclasses.replace(plan, rounds=_rounds_that_fit(plan))
    return plan


def _rounds_that_fit(plan: Plan) -> int:
    fitting = int(_QUICK_BUDGET_S / dataclasses.replace(plan, rounds=1).expected_s)
    return min(FULL_ROUNDS, max(_FEWEST_ROUNDS, fitting))


def _chosen(
    kind: str,
    names: Iterable[str] | None,
    known: Mapping[str, _T],
    default: tuple[str, ...],
) -> tuple[_T, ...]:
    wanted = tuple(dict.fromkeys(default if names is None else names))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"no {kind} {unknown[0]!r}" if unknown else f"no {kind} named"
        raise UsageError(
            f"there is {what}.",
            hint=f"Known are {', '.join(known)}.",
            unknown=unknown,
        )
    return tuple(known[name] for name in wanted)


def _checked_concurrency(
    values: Iterable[int] | None, default: tuple[int, ...]
) -> tuple[int, ...]:
    wanted = tuple(sorted(set(default if values is None else values)))
    if not wanted or wanted[0] < 1 or wanted[-1] > MOST_CONCURRENCY:
        raise UsageError(
            f"concurrency {', '.join(map(str, wanted)) or 'of nothing'} cannot be "
            f"measured; allowed are 1 to {MOST_CONCURRENCY}.",
            limit=MOST_CONCURRENCY,
        )
    return wanted


def _checked_rounds(rounds: int | None) -> int:
    if rounds is None:
        return FULL_ROUNDS
    if rounds < 1:
        raise UsageError(f"{rounds} rounds measure nothing; at least 1 is needed.")
    return rounds
