"""What `lease.write` adds to the copy that it has to make: the case `write`.

Owns comparing it with one bare `np.copyto` of the same picture, as a camera gives it
and a network does not take it, into the same memory. Both take turns within a round, so
a machine's mood meets both. Refuses to infer: the server is a scripted one, which is
there for the session's sake.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from shmlane.metadata import Array
from shmlane.session import Lease, Session
from shmlane.testing import ScriptedServer, sink_model

from .plan import Payload

_INPUT = "INPUT__0"
COPIES = 20
_COPYTO = "np.copyto"
_WRITE = "lease.write"
# Of smaller payloads the checks of a call are a part that no limit is set for.
_LIMITS: Mapping[str, float] = {"yolov8": 1.15}


@dataclass(frozen=True)
class Writing:
    """`lease.write` over `np.copyto`; the ratio is of the medians in each round.

    copyto_us, write_us: median over the rounds. ratio_min, ratio_max: over the rounds.
    limit: what the median ratio may be; None where nothing is promised. verified: what
    was written is what was given.
    """

    payload: str
    rounds: int
    copies: int
    copyto_us: float
    write_us: float
    ratio: float
    ratio_min: float
    ratio_max: float
    limit: float | None
    verified: bool

    @property
    def is_held(self) -> bool:
        """Whether the limit, if there is one, is held by a write that is right."""
        return self.verified and (self.limit is None or self.ratio <= self.limit)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "is_held": self.is_held}

    def render(self) -> str:
        """The comparison as text of 80 columns."""
        rows = [
            (_COPYTO, f"{self.copyto_us:.1f}"),
            (_WRITE, f"{self.write_us:.1f}"),
            ("ratio (median over rounds)", f"{self.ratio:.3f}"),
            ("  least and most", f"{self.ratio_min:.2f}..{self.ratio_max:.2f}"),
        ]
        if self.limit is not None:
            verdict = "held" if self.ratio <= self.limit else "NOT held"
            rows.append((f"  limit {self.limit:g}", verdict))
        rows.append(("written right", "yes" if self.verified else "NO"))
        return "\n".join([self._heading(), *(f"  {a:<38}{b:>12}" for a, b in rows), ""])

    def _heading(self) -> str:
        return (
            f"write, {self.payload}: height x width x channels turned to channels"
            f" first\n  {f'{self.rounds} rounds of {self.copies} copies':<38}"
            f"{'p50 µs':>12}"
        )


def measure_write(payload: Payload, *, rounds: int) -> Writing:
    """Measure with a picture of the payload's size. Takes some seconds."""
    with (
        ScriptedServer([sink_model()], allow_client_shm=True) as server,
        Session(server.url, "sink", slots=1) as session,
        session.lease() as lease,
    ):
        return _compare(lease, payload, rounds)


def picture(payload: Payload) -> Array:
    """Rows of pixels, seen with the channels first as the payload has them."""
    batch, channels, height, width = payload.shape
    rows = np.random.default_rng(1).random((batch, height, width, channels), np.float32)
    return rows.transpose(0, 3, 1, 2)


def _compare(lease: Lease, payload: Payload, rounds: int) -> Writing:
    source = picture(payload)
    # Into one and the same memory: no page of it lies better for one of them.
    target = lease.view(_INPUT, payload.shape)
    steps: dict[str, Callable[[], None]] = {
        _COPYTO: lambda: np.copyto(target, source),
        _WRITE: lambda: lease.write(_INPUT, source),
    }
    take_turns(steps)
    turns = [take_turns(steps) for _ in range(rounds)]
    target.fill(np.nan)
    lease.write(_INPUT, source)
    return _summary(payload, turns, verified=np.array_equal(target, source))


def take_turns(steps: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Median times of one round, in microseconds; who comes first changes each time."""
    clock = time.perf_counter_ns
    times: dict[str, list[int]] = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(COPIES):
        for name, step in order:
            begin = clock()
            step()
            times[name].append(clock() - begin)
        order.reverse()
    return {name: statistics.median(each) / 1e3 for name, each in times.items()}


def _summary(
    payload: Payload, turns: list[dict[str, float]], *, verified: bool
) -> Writing:
    ratios = [turn[_WRITE] / turn[_COPYTO] for turn in turns]
    return Writing(
        payload=payload.name,
        rounds=len(turns),
        copies=COPIES,
        copyto_us=round(statistics.median(turn[_COPYTO] for turn in turns), 2),
        write_us=round(statistics.median(turn[_WRITE] for turn in turns), 2),
        ratio=round(statistics.median(ratios), 4),
        ratio_min=round(min(ratios), 4),
        ratio_max=round(max(ratios), 4),
        limit=_LIMITS.get(payload.name),
        verified=verified,
    )
