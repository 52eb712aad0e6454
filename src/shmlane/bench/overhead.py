"""What the public path adds to the bare bytes: the case `overhead`.

Owns comparing lease, view, infer, result and release with a bare send and receive of
the same bytes on the same connection, in turns, on one thread. Refuses to compare with
other clients. It reaches into one slot to find the connection and the bytes.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from shmlane.errors import UsageError
from shmlane.session import Session

from .plan import Payload

_MODEL = "sink"
_INPUT = "INPUT__0"
_OUTPUT = "OUTPUT__0"
_REQUESTS = 400


@dataclass(frozen=True)
class Part:
    """One step of the path, alone; microseconds per request, median over rounds."""

    name: str
    cpu_us: float
    p50_us: float


@dataclass(frozen=True)
class Overhead:
    """What shmlane adds to a bare send and receive. Differences are per round.

    cpu_us: thread CPU per request beyond the bare one. p50_us: the same of the median
    latency. `*_min` and `*_max` are over the rounds.
    """

    payload: str
    rounds: int
    requests: int
    bare: Part
    path: Part
    parts: tuple[Part, ...]
    cpu_us: float
    cpu_us_min: float
    cpu_us_max: float
    p50_us: float
    p50_us_min: float
    p50_us_max: float

    @property
    def is_held(self) -> bool:
        """Whether the limit is held: there is none, so always."""
        return True

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def render(self) -> str:
        """The path and its beginnings as text of 80 columns."""
        lines = [
            f"overhead, {self.payload}: one thread, one connection;"
            f" {self.rounds} rounds of {self.requests}",
            f"  {'':<38}{'CPU µs':>9}{'p50 µs':>9}",
        ]
        lines += [
            f"  {part.name:<38}{part.cpu_us:>9.2f}{part.p50_us:>9.2f}"
            for part in (self.bare, *self.parts, self.path)
        ]
        lines += [
            f"  {'shmlane adds (median over rounds)':<38}{self.cpu_us:>9.2f}"
            f"{self.p50_us:>9.2f}",
            f"  {'  least and most':<38}"
            f"{f'{self.cpu_us_min:.1f}..{self.cpu_us_max:.1f}':>9}"
            f"  {self.p50_us_min:.1f}..{self.p50_us_max:.1f}",
        ]
        return "\n".join(lines) + "\n"


def measure_overhead(url: str, payload: Payload, *, rounds: int) -> Overhead:
    """Measure against the server at `url`, which serves `sink`. Takes some seconds."""
    with Session(url, _MODEL, slots=1, shapes={_INPUT: payload.shape}) as session:
        steps = _steps(session)
        for step in steps.values():
            _turn(step)
        gc.collect()
        gc.freeze()
        try:
            turns = [
                {name: _turn(step) for name, step in steps.items()}
                for _ in range(rounds)
            ]
        finally:
            gc.unfreeze()
    return _summary(payload, turns)


def _steps(session: Session) -> dict[str, Callable[[], object]]:
    """The bare exchange, the whole path, and the path's growing beginnings."""

    def lease_only() -> None:
        with session.lease():
            pass

    def lease_and_view() -> None:
        with session.lease() as lease:
            lease[_INPUT]

    def without_reading() -> None:
        with session.lease() as lease:
            lease[_INPUT]
            lease.infer()

    def path() -> None:
        with session.lease() as lease:
            view = lease[_INPUT]
            result = lease.infer()
            value = result[_OUTPUT][0]
        del view, value

    path()
    return {
        "bare send and receive": _bare(session),
        "lease, release": lease_only,
        "lease, view, release": lease_and_view,
        "lease, view, infer, release": without_reading,
        "lease, view, infer, result, release": path,
    }


def _bare(session: Session) -> Callable[[], object]:
    slot = session._ensure_open().pool.slots[0]
    prepared, channel = slot.prepared, slot.channel
    connected = getattr(channel, "_socket", None)
    if prepared is None or connected is None:
        raise UsageError(
            "the session has not sent anything yet.", hint="Let it infer once before."
        )
    send, receive = connected.send, connected.recv
    request = prepared.request

    def bare() -> None:
        send(request)
        receive(65536)

    return bare


def _turn(step: Callable[[], object]) -> tuple[float, float]:
    """Thread CPU and median latency of one step, microseconds per request."""
    clock = time.perf_counter_ns
    latencies = [0] * _REQUESTS
    cpu = time.thread_time_ns()
    for index in range(_REQUESTS):
        begin = clock()
        step()
        latencies[index] = clock() - begin
    cpu = time.thread_time_ns() - cpu
    return cpu / _REQUESTS / 1e3, statistics.median(latencies) / 1e3


def _summary(payload: Payload, turns: list[dict[str, tuple[float, float]]]) -> Overhead:
    parts = tuple(
        Part(name, *(_median([turn[name][i] for turn in turns]) for i in (0, 1)))
        for name in turns[0]
    )
    bare, path = parts[0], parts[-1]
    added = [
        [turn[path.name][i] - turn[bare.name][i] for turn in turns] for i in (0, 1)
    ]
    (cpu, p50) = added
    return Overhead(
        payload=payload.name,
        rounds=len(turns),
        requests=_REQUESTS,
        bare=bare,
        path=path,
        parts=parts[1:-1],
        cpu_us=_median(cpu),
        cpu_us_min=round(min(cpu), 2),
        cpu_us_max=round(max(cpu), 2),
        p50_us=_median(p50),
        p50_us_min=round(min(p50), 2),
        p50_us_max=round(max(p50), 2),
    )


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)
