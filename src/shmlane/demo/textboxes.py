"""Text boxes from the probability map of a differentiable-binarisation detector.

Owns the way from a map (one probability per pixel) to rotated rectangles: threshold,
outlines, smallest rectangle, score, expansion. Knows no model, no server and no
picture. Needs OpenCV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from shmlane.errors import TensorMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Map = NDArray[np.float32]
    Points = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TextBox:
    """A rotated rectangle around one run of text.

    corners: four (x, y) points, clockwise from the upper left one.
    """

    corners: Points
    score: float

    @property
    def centre(self) -> tuple[float, float]:
        """The middle of the rectangle as (x, y)."""
        x, y = self.corners.mean(axis=0)
        return float(x), float(y)

    def scaled(self, x_factor: float, y_factor: float) -> TextBox:
        """The same box on a picture larger or smaller than the map."""
        factors = np.array([x_factor, y_factor], np.float32)
        return TextBox(self.corners * factors, self.score)


def find_text_boxes(
    probability: Map,
    *,
    threshold: float = 0.3,
    min_score: float = 0.5,
    expand: float = 1.6,
    min_side: float = 3.0,
) -> list[TextBox]:
    """Boxes on the text of a map of shape (height, width), from top to bottom.

    The detector is trained to mark a shrunken core of each text line. `threshold`
    separates cores from background, a core counts when its mean probability reaches
    `min_score` and its shorter side `min_side` pixels, and `expand` undoes the
    shrinking: every side moves outwards by area * expand / perimeter.
    """
    if probability.ndim != 2:
        raise TensorMismatch(
            f"a map has 2 dimensions, this one {probability.ndim}.",
            shape=probability.shape,
        )
    boxes = []
    for core in _cores(probability, threshold):
        rectangle = cv2.minAreaRect(core)
        if min(rectangle[1]) < min_side:
            continue
        score = _mean_inside(probability, core)
        if score >= min_score:
            boxes.append(TextBox(_expanded(rectangle, expand), score))
    return sorted(boxes, key=lambda box: box.centre[1])


def _cores(probability: Map, threshold: float) -> Iterator[Any]:
    """Outlines of the connected areas above the threshold."""
    marked = (probability > threshold).astype(np.uint8)
    # External outlines only: a hole in a core is no text of its own.
    found, _ = cv2.findContours(marked, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    yield from found


def _mean_inside(probability: Map, outline: Any) -> float:
    """Mean probability inside an outline, computed on its bounding box only."""
    x, y, width, height = cv2.boundingRect(outline)
    window = probability[y : y + height, x : x + width]
    inside = np.zeros(window.shape, np.uint8)
    cv2.fillPoly(inside, [outline - (x, y)], [1.0])
    return float(cv2.mean(window, inside)[0])


def _expanded(rectangle: Any, ratio: float) -> Points:
    """Corners of a rectangle whose sides all moved outwards by the same distance."""
    centre, (width, height), angle = rectangle
    distance = width * height * ratio / (2 * (width + height))
    grown = (width + 2 * distance, height + 2 * distance)
    return _from_upper_left(cv2.boxPoints((centre, grown, angle)))


def _from_upper_left(corners: Any) -> Points:
    """The corners from the upper left one on: the upper of the two on the left."""
    by_x = np.asarray(corners, np.float32)[np.argsort(corners[:, 0], kind="stable")]
    left, right = (side[np.argsort(side[:, 1])] for side in (by_x[:2], by_x[2:]))
    return np.stack([left[0], right[0], right[1], left[1]])
