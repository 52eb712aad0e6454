"""What `lease.write` adds to the copy that it has to make: the case `write`.

Owns comparing it with one bare `np.copyto` of the same picture, as a camera gives it
and a network does not take it, into the same memory. Both take turns within a round, so
a machine's mood meets both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shmlane.lease_blocking import Lease
from shmlane.metadata import Array

from .plan import Payload
from .turns import (
    COPIES,
    Times,
    Versus,
    check_row,
    column,
    median_us,
    scripted_lease,
    table,
    take_turns,
)

_INPUT = "INPUT__0"
_COPYTO = "np.copyto"
_WRITE = "lease.write"
# Of smaller payloads the checks of a call are a part that no limit is set for.
_LIMITS: Mapping[str, float] = {"yolov8": 1.15}


@dataclass(frozen=True)
class Writing:
    """`lease.write` beside `np.copyto`.

    copyto_us, write_us: median over the rounds. verified: what was written is what was
    given.
    """

    payload: str
    rounds: int
    copies: int
    copyto_us: float
    write_us: float
    copyto: Versus
    verified: bool

    @property
    def is_held(self) -> bool:
        """Whether the limit, if there is one, is held by a write that is right."""
        return self.verified and self.copyto.is_held

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "is_held": self.is_held}

    def render(self) -> str:
        """The comparison as text of 80 columns."""
        return table(
            f"write, {self.payload}: height x width x channels turned to channels"
            " first",
            f"{self.rounds} rounds of {self.copies} copies",
            "p50 µs",
            [
                (_COPYTO, f"{self.copyto_us:.1f}"),
                (_WRITE, f"{self.write_us:.1f}"),
                *self.copyto.rows("ratio (median over rounds)"),
                check_row(self.verified),
            ],
        )


def measure_write(payload: Payload, *, rounds: int) -> Writing:
    """Measure with a picture of the payload's size. Takes some seconds."""
    with scripted_lease() as lease:
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
    measured = take_turns(
        {
            _COPYTO: lambda: np.copyto(target, source),
            _WRITE: lambda: lease.write(_INPUT, source),
        },
        rounds,
    )
    target.fill(np.nan)
    lease.write(_INPUT, source)
    return _summary(payload, measured, verified=np.array_equal(target, source))


def _summary(payload: Payload, measured: Sequence[Times], *, verified: bool) -> Writing:
    return Writing(
        payload=payload.name,
        rounds=len(measured),
        copies=COPIES,
        copyto_us=median_us(measured, _COPYTO),
        write_us=median_us(measured, _WRITE),
        copyto=Versus.of(
            column(measured, _WRITE),
            column(measured, _COPYTO),
            limit=_LIMITS.get(payload.name),
        ),
        verified=verified,
    )
