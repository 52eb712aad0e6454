"""Time limits: what callers may say, and the one deadline that a call keeps.

Owns the meaning of timeouts (seconds, None for no limit). Refuses to wait.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from enum import Enum

from .errors import InferTimeout, UsageError


class Default(Enum):
    """Marks an argument that was not given where None means "no limit"."""

    DEFAULT = "default"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = Default.DEFAULT
Timeout = float | None | Default


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits in seconds. None waits for ever and has to be asked for.

    connect: making a connection, retries included. lease: waiting for a free slot.
    infer: one inference, from making ready to the last byte of the reply. handoff: how
    long a slot that was detached waits to be adopted, before it is taken back.
    Where the server is given by name, each connection begins with looking that up, for
    which the limits of the system's resolver hold instead; addresses and Unix sockets
    need none.
    """

    connect: float | None = 2.0
    lease: float | None = 5.0
    infer: float | None = 60.0
    handoff: float | None = 30.0

    def __post_init__(self) -> None:
        for name in ("connect", "lease", "infer", "handoff"):
            check_timeout(getattr(self, name), name)


def check_timeout(value: float | None, name: str = "timeout") -> float | None:
    """`value` if it is None or a number of seconds >= 0, else `UsageError`."""
    try:
        is_limit = value is None or 0 <= value <= threading.TIMEOUT_MAX
    except TypeError:
        is_limit = False
    if not is_limit:
        raise UsageError(
            f"{name}={value!r} is not a time limit: give seconds >= 0, or None to wait"
            " for ever."
        )
    return value


def in_seconds(limit: float | None) -> str:
    """A limit as people read it."""
    if limit is None:
        return "no limit"
    if 0 < limit < 1e-3:
        return f"{limit * 1e3:.2g} ms"
    return f"{round(limit, 3):g} s"


def no_time_left(limit: float | None) -> InferTimeout:
    """For a caller whose time was up before its request could be sent."""
    return InferTimeout(
        f"no time was left of {in_seconds(limit)}; nothing was sent.",
        hint="Raise the timeout: connections and registrations are made within it.",
        timeout=limit,
    )


class Deadline:
    """A point in time that one call must not pass, whatever it waits for.

    begun: when the call began by `time.monotonic`; now, if not given.
    """

    __slots__ = ("limit", "when")

    def __init__(self, limit: float | None, begun: float | None = None) -> None:
        self.limit = limit
        if limit is None:
            self.when = math.inf
        else:
            self.when = (time.monotonic() if begun is None else begun) + limit

    @property
    def remaining(self) -> float | None:
        """Seconds left, 0 when it has passed, None when there is no end."""
        if self.limit is None:
            return None
        return max(0.0, self.when - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.limit is not None and time.monotonic() >= self.when

    def within(self, limit: float | None) -> Deadline:
        """The earlier of this deadline and `limit` seconds from now."""
        other = Deadline(limit)
        return other if other.when < self.when else self

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining} of {self.limit} s left>"
