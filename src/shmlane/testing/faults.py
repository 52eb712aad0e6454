"""What can be scripted to go wrong with the reply to one request.

Owns the values that `ScriptedServer.script` takes. Refuses to act: `serving` does what
they say. All of them are what something between client and server, a dying server, or a
bug can do; Triton itself notices no disconnect while a model runs, so that the model
runs to its end and writes its outputs all the same, unless `model_runs` is False.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from ..errors import UsageError

_NOISE = b"\x00\xff scripted noise, not HTTP\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Delay:
    """The model takes longer: so many seconds, or until the event is set.

    The request is inside the model for that time and its regions are in use.
    """

    until: float | threading.Event

    def wait(self, ended: threading.Event) -> None:
        """Return when the delay is over or the server has ended."""
        if isinstance(self.until, threading.Event):
            # Two events cannot be waited for at once.
            while not (ended.is_set() or self.until.wait(0.01)):
                pass
        else:
            ended.wait(self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The connection is closed when the request has come; then the model runs."""

    model_runs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """As `Close`, with a reset (RST). A Unix socket knows none and is closed."""

    model_runs: bool = True


@dataclass(frozen=True, slots=True)
class Status:
    """Another reply comes at once, as from a proxy, and the model runs behind it.

    With `model_runs=False` it can stand for any refusal of Triton's own.
    """

    code: int
    body: bytes | str = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    model_runs: bool = True


@dataclass(frozen=True, slots=True)
class Truncate:
    """The first `nbytes` of the true reply come, then the connection is closed."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The true reply comes `times` times."""

    times: int = 2


@dataclass(frozen=True, slots=True)
class Garbage:
    """Bytes that are no HTTP come at once, then the model runs.

    The connection stays open. `Answer` sends bytes after the model has run.
    """

    data: bytes = _NOISE


@dataclass(frozen=True, slots=True)
class Answer:
    """Exactly these bytes come in place of the reply, or what a function makes of it.

    The function gets the true reply with its head, after the model has run.
    """

    data: bytes | Callable[[bytes], bytes]


Fault = Delay | Close | Reset | Status | Truncate | Duplicate | Garbage | Answer


def checked(fault: object) -> Fault:
    """The fault; raises for anything else, which would be taken and do nothing."""
    if isinstance(fault, Fault):
        return fault
    kinds = ", ".join(kind.__name__ for kind in get_args(Fault))
    hint = f"Faults are made by {kinds}."
    if isinstance(fault, type) and issubclass(fault, Fault):
        hint = f"Make one of it, with parentheses: {fault.__name__}(...)."
    elif isinstance(fault, int):
        hint = f"Another reply is Status({fault})."
    raise UsageError(f"{fault!r} is not a fault to script.", hint=hint)
