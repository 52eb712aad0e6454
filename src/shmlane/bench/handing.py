"""What it adds to have another process send a slot that this one filled: `handoff`.

Owns both processes, the pipe between them, and the comparison with a request that this
process sends itself. All take turns within a round: the request, the same by way of the
other process, and a value that the other process sends straight back, which is what a
pipe costs without any slot. Refuses to compare with other clients.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from shmlane.errors import ContenderFailed
from shmlane.handoff import SlotRef
from shmlane.session import Session

from .plan import Payload
from .turns import (
    COPIES,
    Row,
    Times,
    check_row,
    column,
    median_us,
    table,
    take_turns,
    verdict,
)

_MODEL = "sink"
_INPUT = "INPUT__0"
_OUTPUT = "OUTPUT__0"
_SLOTS = 4
_LOCAL = "lease, infer, read, release"
_PIPE = "a value over the pipe and back"
_HANDOFF = "lease, detach; adopt, infer, read there"
# What the median of the rounds' differences may be.
_LIMITS: Mapping[str, float] = {"yolov8": 150.0}
_END_TIMEOUT = 10.0


@dataclass(frozen=True)
class Handoff:
    """A request by way of another process, beside one without; in microseconds.

    local_us, pipe_us, handoff_us: median over the rounds. added_us: what the way adds
    to the request, median of those of the rounds. verified: every value was right.
    """

    payload: str
    rounds: int
    requests: int
    local_us: float
    pipe_us: float
    handoff_us: float
    added_us: float
    added_us_min: float
    added_us_max: float
    limit_us: float | None
    verified: bool

    @property
    def is_held(self) -> bool:
        """Whether the limit, if there is one, is held by right values."""
        return self.verified and self._is_within

    @property
    def _is_within(self) -> bool:
        return self.limit_us is None or self.added_us <= self.limit_us

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "is_held": self.is_held}

    def render(self) -> str:
        """The comparison as text of 80 columns."""
        limit: list[Row] = []
        if self.limit_us is not None:
            limit = [(f"  limit {self.limit_us:g}", verdict(self._is_within))]
        return table(
            f"handoff, {self.payload}: a slot filled here and sent by another process",
            f"{self.rounds} rounds of {self.requests} requests",
            "p50 µs",
            [
                (_LOCAL, f"{self.local_us:.1f}"),
                (_PIPE, f"{self.pipe_us:.1f}"),
                (_HANDOFF, f"{self.handoff_us:.1f}"),
                ("the other process adds", f"{self.added_us:.1f}"),
                (
                    "  least and most",
                    f"{self.added_us_min:.1f}..{self.added_us_max:.1f}",
                ),
                *limit,
                check_row(self.verified),
            ],
        )


def measure_handoff(url: str, payload: Payload, *, rounds: int) -> Handoff:
    """Measure against the server at `url`, which serves `sink`. Takes some seconds."""
    with (
        _session(url, payload) as session,
        other_process(url, payload) as connection,
    ):
        wrong: list[float] = []
        steps = _steps(session, connection, wrong)
        measured = take_turns(steps, rounds)
    return _summary(payload, measured, verified=not wrong)


def _session(url: str, payload: Payload) -> Session:
    return Session(url, _MODEL, slots=_SLOTS, shapes={_INPUT: payload.shape})


def _steps(
    session: Session, connection: Connection, wrong: list[float]
) -> dict[str, Callable[[], None]]:
    """Each sends another value and takes note where another one comes back."""
    markers = iter(range(1, 1 << 24))
    last = (..., -1)

    def check(marker: float, value: float) -> None:
        if value != marker:
            wrong.append(value)

    def local() -> None:
        marker = float(next(markers))
        with session.lease() as lease:
            lease[_INPUT][last] = marker
            value = float(lease.infer()[_OUTPUT][0])
        check(marker, value)

    def pipe() -> None:
        marker = float(next(markers))
        connection.send(marker)
        check(marker, connection.recv())

    def handoff() -> None:
        marker = float(next(markers))
        with session.lease() as lease:
            lease[_INPUT][last] = marker
            connection.send(lease.detach())
        check(marker, connection.recv())

    return {_LOCAL: local, _PIPE: pipe, _HANDOFF: handoff}


@contextlib.contextmanager
def other_process(url: str, payload: Payload) -> Iterator[Connection]:
    """This process's end of the pipe to one that adopts what it is sent."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_adopt_all, args=(there, url, payload))
    process.start()
    there.close()
    try:
        try:
            here.recv()
            yield here
        except EOFError:
            raise ContenderFailed(
                "the process that adopts slots broke off.",
                hint="What it printed says why.",
            ) from None
    finally:
        here.close()
        process.join(_END_TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()


def _adopt_all(connection: Connection, url: str, payload: Payload) -> None:
    """The other process: until the pipe ends, send each slot, and tell the value."""
    with _session(url, payload) as session, contextlib.suppress(EOFError):
        connection.send(None)
        while True:
            given = connection.recv()
            if isinstance(given, SlotRef):
                with session.adopt(given) as lease:
                    given = float(lease.infer()[_OUTPUT][0])
            connection.send(given)


def _summary(payload: Payload, measured: Sequence[Times], *, verified: bool) -> Handoff:
    ways = zip(column(measured, _HANDOFF), column(measured, _LOCAL), strict=True)
    added = [handoff - local for handoff, local in ways]
    return Handoff(
        payload=payload.name,
        rounds=len(measured),
        requests=COPIES,
        local_us=median_us(measured, _LOCAL),
        pipe_us=median_us(measured, _PIPE),
        handoff_us=median_us(measured, _HANDOFF),
        added_us=round(statistics.median(added), 2),
        added_us_min=round(min(added), 2),
        added_us_max=round(max(added), 2),
        limit_us=_LIMITS.get(payload.name),
        verified=verified,
    )
