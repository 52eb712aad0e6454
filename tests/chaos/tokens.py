"""Tokens: numbers that a request carries in every element and its reply must echo.

Owns making, writing and recognising them, and the views that are kept to see whether
anything changes under them. A token is the bit pattern of a float32: models that copy
keep it exactly, whatever number it is. Refuses to know sessions.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_COUNT_BITS = 22
_CLIENT_LIMIT = 1 << (32 - _COUNT_BITS)


class Tokens:
    """Tokens of one client; two of them are equal only millions of requests apart."""

    def __init__(self, client: int) -> None:
        self._client = (client % (_CLIENT_LIMIT - 1) + 1) << _COUNT_BITS
        self._count = itertools.count(1)

    def make(self) -> int:
        return self._client | next(self._count) % (1 << _COUNT_BITS)


def tell(token: int) -> str:
    """A token as people read it."""
    client, count = divmod(token, 1 << _COUNT_BITS)
    return f"#{count} of client {client - 1}" if client else f"no token ({token})"


def fill(array: Array, token: int) -> None:
    array.view(np.uint32)[...] = token


def filled(shape: Shape, token: int) -> Array:
    array = np.empty(shape, np.float32)
    fill(array, token)
    return array


def complaint(array: Array, token: int, shape: Shape) -> str:
    """What is wrong with an array that should be full of `token`; empty if nothing."""
    if array.shape != shape:
        return f"has shape {array.shape}, not {shape}"
    bits = array.view(np.uint32)
    wrong = bits != token
    if not wrong.any():
        return ""
    found = ", ".join(tell(int(each)) for each in np.unique(bits[wrong])[:3])
    count = int(wrong.sum())
    return f"should be {tell(token)}; {count} of {bits.size} elements are {found}"


class Kept(NamedTuple):
    """A view that outlives its lease, and what it must contain for as long."""

    array: Array
    token: int
    what: str

    def complain(self, report: Callable[[str], None]) -> None:
        if wrong := complaint(self.array, self.token, self.array.shape):
            report(f"a kept view of {self.what} changed: it {wrong}")


class Shelf:
    """Views that are kept for a while. Any thread may put, look and drop."""

    def __init__(self, limit: int, report: Callable[[str], None]) -> None:
        self._limit = limit
        self._report = report
        self._lock = threading.Lock()
        self._kept: list[Kept] = []

    def put(self, kept: Kept) -> None:
        """Keep a view; it takes the place of another one where there is no room."""
        with self._lock:
            self._kept.append(kept)
            surplus = self._kept.pop(0) if len(self._kept) > self._limit else None
        if surplus is not None:
            surplus.complain(self._report)

    def look(self, dice: random.Random, *, drop: bool) -> bool:
        """Judge one of the views, and keep it no longer if so told."""
        with self._lock:
            if not self._kept:
                return False
            place = dice.randrange(len(self._kept))
            kept = self._kept.pop(place) if drop else self._kept[place]
        kept.complain(self._report)
        return True

    def clear(self) -> None:
        """Judge all views for the last time and drop them."""
        with self._lock:
            kept, self._kept = self._kept, []
        for each in kept:
            each.complain(self._report)

    def __repr__(self) -> str:
        return f"<Shelf with {len(self._kept)} of {self._limit} views>"
