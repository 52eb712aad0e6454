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

# Of NumPy's own resizing, which goes over each block several times.
_BLOCK_PIXELS = 1 << 16
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
    width = max(pixels.shape[1], len(columns))
    step = block_rows(len(rows), width, pixels=_BLOCK_PIXELS)
    for top in range(0, len(rows), step):
        with make(pixels, size, rows[top : top + step], columns) as made:
            yield top, made


@contextmanager
def _nearest(pixels: Array, size: Size, rows: Array, columns: Array) -> Iterator[Array]:
    """Pixels whose area holds the upper left corner of each new pixel."""
    height, width, _ = pixels.shape
    # Not `take`: it copies a whole frame that does not lie in one piece.
    gathered = pixels[rows * height // size[0]]
    yield gathered.take(columns * width // size[1], axis=1)


@contextmanager
def _linear(pixels: Array, size: Size, rows: Array, columns: Array) -> Iterator[Array]:
    height, width, channels = pixels.shape
    upper, lower, down = _neighbours(rows, height, size[0])
    left, right, along = _neighbours(columns, width, size[1])
    is_bytes = pixels.dtype == np.uint8
    kind = np.result_type(pixels, np.float32)
    with (
        scratch("rows", (len(rows), width, channels), kind) as whole,
        scratch("sides", (2, len(rows), len(columns), channels), kind) as sides,
    ):
        _mix(pixels[upper], pixels[lower], down[:, None, None], out=whole)
        for places, side in zip((left, right), sides, strict=True):
            # No place is outside; "clip" spares the copy that NumPy makes in case.
            whole.take(places, axis=1, out=side, mode="clip")
        made = sides[1]
        _mix(sides[0], made, along[:, None], out=made)
        yield np.rint(made, out=made).astype(np.uint8) if is_bytes else made


def _neighbours(places: Array, source: int, target: int) -> tuple[Array, Array, Array]:
    """Between which two pixels each new one lies, and how far towards the second."""
    at = np.clip((places + 0.5) * (source / target) - 0.5, 0, source - 1)
    first = at.astype(np.intp)
    second = np.minimum(first + 1, source - 1)
    return first, second, (at - first).astype(np.float32)


def _mix(first: Array, second: Array, share: Array, *, out: Array) -> None:
    """`first` and that share of the way to `second`; `out` may be `second`."""
    np.subtract(second, first, out=out, dtype=out.dtype)
    np.multiply(out, share, out=out)
    np.add(out, first, out=out)
