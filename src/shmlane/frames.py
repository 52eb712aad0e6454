"""What is further up in this thread: who called, and what it is in the middle of.

Owns the look at the interpreter's frames. Refuses to change any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def callers_level() -> int:
    """How many calls up the first is that is not of this package, for a warning."""
    level = 1
    for frame in _above(sys._getframe(1)):
        if frame.f_globals.get("__package__") != __package__:
            break
        level += 1
    return level


def values_in(function: Callable[..., object], name: str) -> list[Any]:
    """What `name` is in each call of `function` that this thread is in the middle of.

    As a signal handler, a finaliser or a callback of a function finds it.
    """
    code = function.__code__
    frames = _above(sys._getframe(1))
    return [frame.f_locals[name] for frame in frames if frame.f_code is code]


def _above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
