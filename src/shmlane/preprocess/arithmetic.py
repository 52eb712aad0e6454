"""What happens to the values of a block between the frame and the view.

Owns the passes over one block: in place where the view is float32, by table where 256
values are all there are, else by way of a float32 block. All compute in float32 and
round once more where they store. Refuses to know about channels and rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shmlane.metadata import Array

from .opencv import opencv
from .recipe import Numbers
from .scratch import scratch

# Called with where to write and what to read, both of one shape.
Writer = Callable[[Array, Array], None]
_Factor = float | Array

# A quarter of a MiB.
_PLACES = 1 << 15
_BYTE = np.dtype(np.uint8)
_SINGLE = np.dtype(np.float32)
_LAST = np.float32(255)


def make_writer(
    factor: float, addend: float, source: np.dtype[Any], out: np.dtype[Any]
) -> Writer:
    """A writer of `factor * value + addend`."""
    is_copy = factor == 1 and addend == 0
    if is_copy and (out in (source, _SINGLE) or _BYTE not in (source, out)):
        return _copy
    if is_by_table(source, out):
        return partial(_look_up, _table(factor, addend, out))
    return partial(_compute if out == _SINGLE else _compute_aside, factor, addend)


def make_row_writer(
    factors: Numbers, addends: Numbers, width: int, out: np.dtype[Any]
) -> Writer:
    """A writer with numbers for each channel of pixels that have them last."""
    # A whole row of them: NumPy is slow where only three numbers repeat.
    factor, addend = (
        np.tile(np.array(each, _SINGLE), (width, 1)) for each in (factors, addends)
    )
    return partial(_compute if out == _SINGLE else _compute_aside, factor, addend)


def is_by_table(source: np.dtype[Any], out: np.dtype[Any]) -> bool:
    """Whether a table is the fastest way; into float32 arithmetic is faster."""
    return source == _BYTE and out != _SINGLE


def saturate(values: Array) -> None:
    """Round to whole numbers from 0 to 255, ties to even; NaN becomes 0."""
    np.rint(values, out=values)
    np.fmax(values, 0, out=values)
    np.minimum(values, _LAST, out=values)


def _copy(out: Array, source: Array) -> None:
    np.copyto(out, source, casting="same_kind")


def _compute(factor: _Factor, addend: _Factor, out: Array, source: Array) -> None:
    np.copyto(out, source, casting="same_kind")
    np.multiply(out, factor, out=out)
    if isinstance(addend, np.ndarray) or addend:
        np.add(out, addend, out=out)


def _compute_aside(factor: _Factor, addend: _Factor, out: Array, source: Array) -> None:
    with scratch("numbers", out.shape, _SINGLE) as work:
        _compute(factor, addend, work, source)
        if out.dtype == _BYTE:
            saturate(work)
        np.copyto(out, work, casting="unsafe")


def _table(factor: float, addend: float, out: np.dtype[Any]) -> Array:
    table = np.empty(256, out)
    _compute_aside(factor, addend, table, np.arange(256, dtype=_BYTE))
    return table


def _look_up(table: Array, out: Array, source: Array) -> None:
    cv2 = opencv()
    if cv2 is None or not (out.flags.c_contiguous and source.flags.c_contiguous):
        _look_up_strided(table, out, source)
        return
    # As one channel of whole numbers: every version of OpenCV has those.
    whole = np.dtype(f"u{table.itemsize}")
    made = out.view(whole).reshape(len(out), -1)
    cv2.LUT(source.reshape(made.shape), table.view(whole), made)


def _look_up_strided(table: Array, out: Array, source: Array) -> None:
    """With NumPy, which wants places of eight bytes each: some rows at a time."""
    step = max(1, _PLACES * len(source) // source.size)
    with scratch("places", (step, *source.shape[1:]), np.intp) as room:
        for top in range(0, len(source), step):
            rows = source[top : top + step]
            places = room[: len(rows)]
            np.copyto(places, rows)
            # No place is outside; "clip" spares the copy that NumPy makes in case.
            table.take(places, out=out[top : top + step], mode="clip")
