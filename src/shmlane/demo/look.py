"""Photographs and a page through two real networks, in place, and every result checked.

Owns the first half of the demo: pixels go straight into slots, results are read where
the server wrote them, and each is compared with onnxruntime run on the same pixels
without a server. Refuses to call anything right that was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import shmlane
from shmlane.demo import pictures
from shmlane.demo.textboxes import TextBox, find_text_boxes
from shmlane.server import networks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Tensor = NDArray[np.float32]

# ImageNet's statistics, blue first as OpenCV decodes.
_MEAN, _DEVIATION = (0.406, 0.456, 0.485), (0.225, 0.224, 0.229)
_HALF = (0.5, 0.5, 0.5)
_TOP = 3
_TEXT_SIDE = 640
# Float sums in another order differ in the last digits; anything wrong differs by more.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared, and how it came out."""

    claim: str
    passed: bool
    detail: str = ""
    difference: float | None = None


@dataclass(frozen=True, slots=True)
class Classes:
    """The strongest classes of one picture, as (class, probability)."""

    picture: str
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Text:
    """Text found on the page, and the picture it was drawn into."""

    boxes: list[TextBox]
    lines: int
    lines_found: int
    picture: Path


@dataclass(frozen=True, slots=True)
class Findings:
    """What the networks said, and whether it was right."""

    classes: list[Classes]
    text: Text
    checks: list[Check]


def look(url: str, *, picture: Path) -> Findings:
    """Ask both networks of the server at `url`; boxes are drawn into `picture`."""
    photographs = pictures.photographs()
    page, lines = pictures.text_page(photographs[0].pixels)
    shown = [*photographs, pictures.Photograph("text page", page)]
    classes, class_checks = classify(url, shown)
    boxes, text_checks = find_text(url, page)
    pictures.save_png(picture, pictures.with_boxes(page, boxes))
    text = Text(boxes, len(lines), pictures.lines_found(lines, boxes), picture)
    return Findings(classes, text, [*class_checks, *text_checks, _lines_check(text)])


def classify(
    url: str, shown: Sequence[pictures.Photograph]
) -> tuple[list[Classes], list[Check]]:
    """All pictures in one request to `resnet50`, then the first one alone."""
    network = networks.network("resnet50")
    with shmlane.Session(url, network.name, slots=2) as session:
        with session.lease() as lease:
            batch = lease.view(network.input, (len(shown), *network.input_dims))
            for picture, planes in zip(shown, batch, strict=True):
                _write_rgb(planes, picture)
            given = batch.copy()
            scores = lease.infer()[network.output]
            classes = [
                Classes(picture.name, _strongest(row))
                for picture, row in zip(shown, scores, strict=True)
            ]
            together = scores.copy()
        with session.lease() as lease:
            _write_rgb(lease[network.input][0], shown[0])
            alone = lease.infer()[network.output].copy()
    expected = networks.reference(network.name, given)
    return classes, [
        _same(f"resnet50, batch of {len(shown)} = onnxruntime", together, expected),
        _same("resnet50, batch of 1 = row 0 of it", alone[0], together[0]),
        _apart("resnet50 tells the pictures apart", together),
    ]


def find_text(url: str, page: pictures.Picture) -> tuple[list[TextBox], list[Check]]:
    """Boxes around the text of a square page, in pixels of the page."""
    network = networks.network("ocr_det")
    # The network takes any size; this one is known before the first request.
    shapes = {network.input: (1, 3, _TEXT_SIDE, _TEXT_SIDE)}
    outputs = {network.output: (1, 1, _TEXT_SIDE, _TEXT_SIDE)}
    with (
        shmlane.Session(
            url, network.name, slots=2, shapes=shapes, outputs=outputs
        ) as session,
        session.lease() as lease,
    ):
        view = lease[network.input]
        pictures.planes_into(view[0], page, mean=_HALF, deviation=_HALF)
        given = view.copy()
        found = lease.infer()[network.output]
        boxes = find_text_boxes(found[0, 0])
        answered = found.copy()
    factor = page.shape[0] / _TEXT_SIDE
    expected = networks.reference(network.name, given)
    return [box.scaled(factor, factor) for box in boxes], [
        _same("ocr_det, batch of 1 = onnxruntime", answered, expected)
    ]


def _write_rgb(planes: Tensor, picture: pictures.Photograph) -> None:
    """Red first, as ResNet was trained: the view is reversed, not the picture."""
    pictures.planes_into(planes[::-1], picture.pixels, mean=_MEAN, deviation=_DEVIATION)


def _strongest(scores: Tensor) -> list[tuple[int, float]]:
    order = np.argsort(scores)[::-1][:_TOP]
    return [(int(index), float(scores[index])) for index in order]


def _same(claim: str, found: Tensor, expected: Tensor) -> Check:
    if found.shape != expected.shape:
        detail = f"shape {found.shape}, not {expected.shape}"
        return Check(claim, passed=False, detail=detail)
    difference = float(np.abs(found - expected).max())
    detail = (
        "bit for bit" if difference == 0 else f"largest difference {difference:.1g}"
    )
    # A comparison with NaN is False: what cannot be compared does not pass.
    return Check(claim, difference <= _TOLERANCE, detail, difference)


def _apart(claim: str, rows: Tensor) -> Check:
    """Each row against all others: a network that ignores its input fails here."""
    between = np.abs(rows[:, None] - rows[None]).max(axis=2)
    np.fill_diagonal(between, np.inf)
    smallest = float(between.min())
    detail = f"smallest difference {smallest:.1g}"
    return Check(claim, smallest > 10 * _TOLERANCE, detail, smallest)


def _lines_check(text: Text) -> Check:
    detail = f"{text.lines_found} of {text.lines}, {len(text.boxes)} boxes"
    return Check(
        "every text line is inside a box", text.lines_found == text.lines, detail
    )
