"""Where a picture lies in a model's input that has another shape, and the way back.

Owns this arithmetic. Refuses to touch pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmlane.errors import TensorMismatch
from shmlane.metadata import Array


@dataclass(frozen=True, slots=True)
class Letterbox:
    """A picture of `source` pixels fitted into the middle of `target` pixels.

    scale: target pixels per source pixel. pad_x, pad_y: columns to its left and rows
    above it; to its right and below it is one more where the rest is odd. source,
    target: (height, width) in pixels. Immutable, so any thread may use it.
    """

    scale: float
    pad_x: int
    pad_y: int
    source: tuple[int, int]
    target: tuple[int, int]

    @classmethod
    def fit(cls, source: tuple[int, int], target: tuple[int, int]) -> Letterbox:
        """The largest that keeps the picture's proportions, to the nearest pixel."""
        scale = min(target[0] / source[0], target[1] / source[1])
        height, width = _inner(source, target, scale)
        pad_x, pad_y = (target[1] - width) // 2, (target[0] - height) // 2
        return cls(scale, pad_x, pad_y, source, target)

    @property
    def inner(self) -> tuple[int, int]:
        """(height, width) of the picture in the target, in pixels."""
        return _inner(self.source, self.target, self.scale)

    def boxes_back(self, xyxy: npt.ArrayLike) -> Array:
        """Boxes in source pixels, clipped to the picture, from boxes in target pixels.

        xyxy: numbers of shape (..., 4), left, top, right and bottom, or an empty list,
        which has the shape (0, 4). Returns an array of the same shape, of its own:
        float32, or float64 for wider numbers. A box that lies in the border alone comes
        back without area. Each axis is mapped by what the picture really measures in
        the target, after rounding to whole pixels.
        Raises `TensorMismatch` for what is no array of boxes.
        """
        boxes = np.asarray(xyxy)
        if boxes.shape == (0,):
            # A list without boxes does not say how many numbers each would have.
            boxes = boxes.reshape(0, 4)
        if boxes.dtype.kind not in "iuf" or boxes.shape[-1:] != (4,):
            raise TensorMismatch(
                f"boxes of shape {boxes.shape} and dtype {boxes.dtype}; allowed are"
                " real numbers of shape (..., 4): left, top, right, bottom.",
                shape=boxes.shape,
                dtype=boxes.dtype,
            )
        (height, width), (inner_height, inner_width) = self.source, self.inner
        kind = np.result_type(boxes.dtype, np.float32)
        pads = np.array([self.pad_x, self.pad_y] * 2, kind)
        ratios = np.array([width / inner_width, height / inner_height] * 2, kind)
        found: Array = (boxes - pads) * ratios
        np.clip(found, 0, np.array([width, height] * 2, kind), out=found)
        return found


def _inner(
    source: tuple[int, int], target: tuple[int, int], scale: float
) -> tuple[int, int]:
    height, width = (
        min(most, max(1, round(length * scale)))
        for length, most in zip(source, target, strict=True)
    )
    return height, width
