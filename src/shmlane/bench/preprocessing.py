"""What `image_into` saves of the way from a camera's pixels to a tensor: `preprocess`.

Owns comparing it with what programs usually do before they copy a picture into shared
memory, and with the copy alone, of a tensor that was ready. All take turns within a
round and write into the same slot. Refuses to infer: the server is a scripted one,
which is there for the session's sake.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from shmlane.metadata import Array
from shmlane.preprocess import image_into
from shmlane.preprocess.opencv import opencv
from shmlane.session import Lease, Session
from shmlane.testing import ScriptedServer, sink_model

from .plan import Payload
from .writing import COPIES, take_turns

_INPUT = "INPUT__0"
_USUAL = "transpose, astype, / 255, copy"
_COPYTO = "np.copyto of a ready tensor"
_IMAGE_INTO = "image_into"
# What the median ratio may be. Promised for a picture of some size, and with OpenCV.
_LIMITS: Mapping[str, Mapping[str, float]] = {"yolov8": {_USUAL: 0.35, _COPYTO: 3.0}}


@dataclass(frozen=True)
class Versus:
    """`image_into` over another way; `ratio` is the median of those of the rounds.

    least, most: over the rounds. limit: None where nothing is promised.
    """

    ratio: float
    least: float
    most: float
    limit: float | None

    @property
    def is_held(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


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
        rows = [
            (_USUAL, f"{self.usual_us:.1f}"),
            (_COPYTO, f"{self.copyto_us:.1f}"),
            (f"{_IMAGE_INTO}, with {self.backend}", f"{self.image_into_us:.1f}"),
            *_rows("the usual way", self.usual),
            *_rows("the copy alone", self.copyto),
            ("values right", "yes" if self.verified else "NO"),
        ]
        return "\n".join([self._heading(), *(f"  {a:<38}{b:>12}" for a, b in rows), ""])

    def _heading(self) -> str:
        return (
            f"preprocess, {self.payload}: a picture of bytes into a slot, as floats,"
            f" channels first\n  {f'{self.rounds} rounds of {self.copies} copies':<38}"
            f"{'p50 µs':>12}"
        )


def _rows(name: str, versus: Versus) -> list[tuple[str, str]]:
    rows = [
        (f"ratio to {name}", f"{versus.ratio:.3f}"),
        ("  least and most", f"{versus.least:.2f}..{versus.most:.2f}"),
    ]
    if versus.limit is not None:
        verdict = "held" if versus.is_held else "NOT held"
        rows.append((f"  limit {versus.limit:g}", verdict))
    return rows


def measure_preprocess(payload: Payload, *, rounds: int) -> Preprocessing:
    """Measure with a picture of the payload's size. Takes some seconds."""
    with (
        ScriptedServer([sink_model()], allow_client_shm=True) as server,
        Session(server.url, "sink", slots=1) as session,
        session.lease() as lease,
    ):
        return _compare(lease, payload, rounds)


def _compare(lease: Lease, payload: Payload, rounds: int) -> Preprocessing:
    _, channels, height, width = payload.shape
    frame = np.random.default_rng(1).integers(
        0, 256, (height, width, channels), np.uint8
    )
    target = lease.view(_INPUT, (1, *payload.shape[1:]))
    ready = _usual(frame)
    steps: dict[str, Callable[[], None]] = {
        _USUAL: lambda: np.copyto(target, _usual(frame)),
        _COPYTO: lambda: np.copyto(target, ready),
        _IMAGE_INTO: lambda: image_into(target, frame, layout="nchw"),
    }
    take_turns(steps)
    measured = [take_turns(steps) for _ in range(rounds)]
    target.fill(np.nan)
    image_into(target, frame, layout="nchw")
    verified = bool(np.allclose(target, ready, rtol=1e-6, atol=0))
    return _summary(payload, measured, verified=verified)


def _usual(frame: Array) -> Array:
    """As most programs have it, a new array in every step."""
    numbers = frame.transpose(2, 0, 1).astype(np.float32) / 255
    return np.ascontiguousarray(numbers)[np.newaxis]


def _summary(
    payload: Payload, measured: list[dict[str, float]], *, verified: bool
) -> Preprocessing:
    def median_us(name: str) -> float:
        return round(statistics.median(turn[name] for turn in measured), 2)

    return Preprocessing(
        payload=payload.name,
        rounds=len(measured),
        copies=COPIES,
        backend="NumPy" if opencv() is None else "OpenCV",
        usual_us=median_us(_USUAL),
        copyto_us=median_us(_COPYTO),
        image_into_us=median_us(_IMAGE_INTO),
        usual=_versus(_USUAL, payload, measured),
        copyto=_versus(_COPYTO, payload, measured),
        verified=verified,
    )


def _versus(name: str, payload: Payload, measured: list[dict[str, float]]) -> Versus:
    ratios = [turn[_IMAGE_INTO] / turn[name] for turn in measured]
    limits = {} if opencv() is None else _LIMITS.get(payload.name, {})
    return Versus(
        ratio=round(statistics.median(ratios), 4),
        least=round(min(ratios), 4),
        most=round(max(ratios), 4),
        limit=limits.get(name),
    )
