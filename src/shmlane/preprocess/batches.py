"""Frames into the rows of a batch, each written where it will be read.

Owns counting them. Refuses more than there are rows, and to build a batch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeVar

import numpy as np

from shmlane.errors import TensorMismatch, UsageError
from shmlane.metadata import Array

Frame = TypeVar("Frame")


def stack_into(
    view: Array,
    frames: Iterable[Frame],
    *,
    write: Callable[[Array, Frame], object] | None = None,
) -> int:
    """Write each frame into its row of a batch; returns how many there were.

    view: writable, shape (N, ...), of any dtype. frames: at most N of them. write:
    called as `write(view[i], frame)`, such as `image_into`, or one with its options:
    `functools.partial(resize_into, swap_rb=True)`; None copies arrays that have the
    row's shape and dtype. Rows beyond the last frame keep what they had: make the view
    as long as the batch (`lease.view`), or they are sent too.

    Raises `UsageError` for too many frames and for a read-only view, `TensorMismatch`
    for what a copy does not take, and what `write` raises, with a note that says which
    frame it was; frames before it are then written. Where the number of frames is only
    known at the end, as a generator's, too many are found after N are written. Safe
    from several threads for views that do not overlap.
    """
    _check_batch(view)
    if isinstance(frames, Sized) and len(frames) > len(view):
        raise _too_many(len(view), str(len(frames)))
    write_row: Callable[[Array, Any], object] = _copy if write is None else write
    count = 0
    for frame in frames:
        if count == len(view):
            raise _too_many(count, f"more than {count}")
        try:
            # An ellipsis makes an array of a row that would be a number.
            write_row(view[count, ...], frame)
        except Exception as error:
            error.add_note(f"This was frame {count} of the batch, from 0.")
            raise
        count += 1
    return count


def _check_batch(view: object) -> None:
    if not isinstance(view, np.ndarray) or view.ndim == 0:
        raise TensorMismatch("the view has no rows; give an array of shape (N, ...).")
    if not view.flags.writeable:
        raise UsageError(f"the view of shape {view.shape} is read-only.")


def _copy(row: Array, frame: object) -> None:
    if not isinstance(frame, np.ndarray):
        raise TensorMismatch(
            f"the frame is a {type(frame).__name__}, not a NumPy array.",
            hint="Give write= a function that takes such frames.",
        )
    if (frame.shape, frame.dtype) != (row.shape, row.dtype):
        raise TensorMismatch(
            f"the frame has shape {frame.shape} and dtype {frame.dtype}; a row of the"
            f" view has {row.shape} and {row.dtype}.",
            hint="A plain copy converts nothing; write=image_into does.",
            shape=frame.shape,
            dtype=frame.dtype,
        )
    np.copyto(row, frame)


def _too_many(rows: int, given: str) -> UsageError:
    return UsageError(
        f"the view has {rows} rows and there are {given} frames.",
        hint="Take a larger view, or send the rest as another request.",
        rows=rows,
    )
