"""What `image_into` saves of the way from a camera's pixels to a tensor: `preprocess`.

Owns comparing it with what programs usually do before they copy a picture into shared
memory, and with the copy alone, of a tensor that was ready. All take turns within a
round and write into the same slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shmlane.lease_blocking import Lease
from shmlane.metadata import Array
from shmlane.preprocess import image_into
from shmlane.preprocess.opencv import opencv

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
_USUAL = "transpose, astype, / 255, copy"
_COPYTO = "np.copyto of a ready tensor"
_IMAGE_INTO = "image_into"
# What the median ratio may be. Promised for a picture of some size, and with OpenCV.
_LIMITS: Mapping[str, Mapping[str, float]] = {"yolov8": {_USUAL: 0.35, _COPYTO: 3.0}}


@dataclass(frozen=True)
class Preprocessing:
    """A picture of bytes, channels last, as a tensor of 32-bit floats, channels first.

    usual_us, copyto_us, image_into_us: median over the rounds. verified: the values are
    those of the usual way.
    """

    payload: str
    rounds: int
    copies: int
    backend: str
    usual_us: float
    copyto_us: float
    image_into_us: float
    usual: Versus
    copyto: Versus
    verified: bool

    @property
    def is_held(self) -> bool:
        """Whether the limits, if there are any, are held by values that are right."""
        return self.verified and self.usual.is_held and self.copyto.is_held

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "is_held": self.is_held}

    def render(self) -> str:
        """The comparison as text of 80 columns."""
        return table(
            f"preprocess, {self.payload}: a picture of bytes into a slot, as floats,"
            " channels first",
            f"{self.rounds} rounds of {self.copies} copies",
            "p50 µs",
            [
                (_USUAL, f"{self.usual_us:.1f}"),
                (_COPYTO, f"{self.copyto_us:.1f}"),
                (f"{_IMAGE_INTO}, with {self.backend}", f"{self.image_into_us:.1f}"),
                *self.usual.rows("ratio to the usual way"),
                *self.copyto.rows("ratio to the copy alone"),
                check_row(self.verified),
            ],
        )


def measure_preprocess(payload: Payload, *, rounds: int) -> Preprocessing:
    """Measure with a picture of the payload's size. Takes some seconds."""
    with scripted_lease() as lease:
        return _compare(lease, payload, rounds)


def _compare(lease: Lease, payload: Payload, rounds: int) -> Preprocessing:
    _, channels, height, width = payload.shape
    frame = np.random.default_rng(1).integers(
        0, 256, (height, width, channels), np.uint8
    )
    target = lease.view(_INPUT, (1, *payload.shape[1:]))
    ready = _usual(frame)
    measured = take_turns(
        {
            _USUAL: lambda: np.copyto(target, _usual(frame)),
            _COPYTO: lambda: np.copyto(target, ready),
            _IMAGE_INTO: lambda: image_into(target, frame, layout="nchw"),
        },
        rounds,
    )
    target.fill(np.nan)
    image_into(target, frame, layout="nchw")
    verified = bool(np.allclose(target, ready, rtol=1e-6, atol=0))
    return _summary(payload, measured, verified=verified)


def _usual(frame: Array) -> Array:
    """As most programs have it, a new array in every step."""
    numbers = frame.transpose(2, 0, 1).astype(np.float32) / 255
    return np.ascontiguousarray(numbers)[np.newaxis]


def _summary(
    payload: Payload, measured: Sequence[Times], *, verified: bool
) -> Preprocessing:
    limits = {} if opencv() is None else _LIMITS.get(payload.name, {})

    def versus(name: str) -> Versus:
        ours, theirs = column(measured, _IMAGE_INTO), column(measured, name)
        return Versus.of(ours, theirs, limit=limits.get(name))

    return Preprocessing(
        payload=payload.name,
        rounds=len(measured),
        copies=COPIES,
        backend="NumPy" if opencv() is None else "OpenCV",
        usual_us=median_us(measured, _USUAL),
        copyto_us=median_us(measured, _COPYTO),
        image_into_us=median_us(measured, _IMAGE_INTO),
        usual=versus(_USUAL),
        copyto=versus(_COPYTO),
        verified=verified,
    )
