"""Memory to work in that stays warm from one frame to the next.

Owns one buffer per thread and purpose, kept up to `KEPT_BYTES`. Refuses to lend a
buffer twice: whoever comes while it is out (a signal handler in the middle of a frame)
gets memory of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from shmlane.metadata import Array

# A resized picture of 1600 x 1600 x 3 bytes is kept, larger ones are made each time.
KEPT_BYTES = 8 << 20


class _Shelf(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, Array] = {}


_shelf = _Shelf()


@contextmanager
def scratch(
    purpose: str, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> Iterator[Array]:
    """An array of undefined content, the caller's until the `with` block ends."""
    kind: np.dtype[Any] = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    buffer = _shelf.buffers.pop(purpose, None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = np.empty(nbytes, np.uint8)
    try:
        yield buffer[:nbytes].view(kind).reshape(shape)
    finally:
        if buffer.nbytes <= KEPT_BYTES:
            _shelf.buffers[purpose] = buffer
