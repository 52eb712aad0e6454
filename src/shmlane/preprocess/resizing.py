"""Frames of another size, with OpenCV or with NumPy alone.

Owns the interpolation, with half-pixel centres as OpenCV has them. Yields the resized
picture in blocks of rows, so that without OpenCV it never exists as a whole. Refuses to
blur before shrinking: "linear" and "nearest" look at the closest pixels alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np

from shmlane.errors import UsageError
from shmlane.metadata import Array

from .opencv import opencv, opencv_for
from .painting import block_rows
from .scratch import scratch

Interpolation = Literal["linear", "nearest", "area", "cubic"]
# Height and width in pixels.
Size = tuple[int, int]

_WITHOUT_OPENCV = ("linear", "nearest")


def check_interpolation(interpolation: str) -> None:
    """Refuse what is unknown, and what needs OpenCV where that is missing."""
    known = get_args(Interpolation)
    if interpolation not in known:
        raise UsageError(
            f"interpolation={interpolation!r} is not known; known are"
            f" {', '.join(known)}.",
            interpolation=interpolation,
        )
    if interpolation not in _WITHOUT_OPENCV:
        opencv_for(f"interpolation={interpolation!r}")


@contextmanager
def resized(
    pixels: Array, size: Size, interpolation: str, *, corner: Size, window: Size
) -> Iterator[Iterator[tuple[int, Array]]]:
    """The window of the picture at `size`, as (first row in the window, rows).

    corner: first row and column of the window. What it yields is the caller's until the
    `with` block ends or the next rows are asked for.
    """
    cv2 = opencv()
    if pixels.shape[:2] == size:
        yield iter([(0, _cut(pixels, corner, window))])
    elif cv2 is None:
        yield _blocks(pixels, size, interpolation, corner, window)
    else:
        with _resized_by_opencv(cv2, pixels, size, interpolation) as whole:
            yield iter([(0, _cut(whole, corner, window))])


def _cut(pixels: Array, corner: Size, window: Size) -> Array:
    (top, left), (height, width) = corner, window
    return pixels[top : top + height, left : left + width]


@contextmanager
def _resized_by_opencv(
    cv2: Any, pixels: Array, size: Size, interpolation: str
) -> Iterator[Array]:
    flags = {
        "linear": cv2.INTER_LINEAR,
        "nearest": cv2.INTER_NEAREST,
        "area": cv2.INTER_AREA,
        "cubic": cv2.INTER_CUBIC,
    }
    # OpenCV does not resize float16.
    source = pixels.astype(np.float32) if pixels.dtype == np.float16 else pixels
    height, width = size
    with scratch("resized", (*size, pixels.shape[2]), source.dtype) as room:
        made = cv2.resize(
            source, (width, height), dst=room, interpolation=flags[interpolation]
        )
        yield made.reshape(room.shape)


def _blocks(
    pixels: Array, size: Size, interpolation: str, corner: Size, window: Size
) -> Iterator[tuple[int, Array]]:
    make = _linear if interpolation == "linear" else _nearest
    rows, columns = (
        np.arange(start, start + count)
        for start, count in zip(corner, window, strict=True)
    )
    # What is gathered first is as wide as the frame.
    step = block_rows(len(rows), max(pixels.shape[1], len(columns)))
    for top in range(0, len(rows), step):
        yield top, make(pixels, size, rows[top : top + step], columns)


def _nearest(pixels: Array, size: Size, rows: Array, columns: Array) -> Array:
    """Pixels whose area holds the upper left corner of each new pixel."""
    height, width, _ = pixels.shape
    gathered = pixels.take(rows * height // size[0], axis=0)
    picked: Array = gathered.take(columns * width // size[1], axis=1)
    return picked


def _linear(pixels: Array, size: Size, rows: Array, columns: Array) -> Array:
    height, width, _ = pixels.shape
    upper, lower, down = _neighbours(rows, height, size[0])
    left, right, along = _neighbours(columns, width, size[1])
    mixed = _mix(pixels.take(upper, 0), pixels.take(lower, 0), down[:, None, None])
    mixed = _mix(mixed.take(left, 1), mixed.take(right, 1), along[:, None])
    if pixels.dtype == np.uint8:
        return np.rint(mixed, out=mixed).astype(np.uint8)
    return mixed


def _neighbours(places: Array, source: int, target: int) -> tuple[Array, Array, Array]:
    """Between which two pixels each new one lies, and how far towards the second."""
    at = np.clip((places + 0.5) * (source / target) - 0.5, 0, source - 1)
    first = at.astype(np.intp)
    second = np.minimum(first + 1, source - 1)
    return first, second, (at - first).astype(np.float32)


def _mix(first: Array, second: Array, share: Array) -> Array:
    """`first` and that share of the way to `second`, in float32 or wider."""
    mixed = np.subtract(second, first, dtype=np.result_type(first, np.float32))
    mixed *= share
    mixed += first
    return mixed
