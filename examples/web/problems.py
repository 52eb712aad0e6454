"""What a client is told when something goes wrong, with the HTTP status that is true.

Owns which error becomes which status. Tells of the inside (addresses, names of memory)
in the log alone. Refuses to know web frameworks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import shmlane

from .pictures import NotAPicture

_log = logging.getLogger(__name__)

_RETRY_AFTER = {"Retry-After": "1"}
# Passing states: the same request may succeed a moment later.
_PASSING = (
    shmlane.LeaseTimeout,
    shmlane.ServerUnreachable,
    shmlane.RequestLost,
    shmlane.ModelNotReady,
    shmlane.PoolClosed,
    shmlane.SlotsClaimed,
)


class BodyTooLarge(Exception):
    """More was posted than this service reads."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reply that is no answer."""

    status: int
    detail: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, str]:
        return {"detail": self.detail}


def problem_of(error: Exception) -> Problem:
    """The reply to a request that ended with `error`, which is logged if it is ours."""
    match error:
        case BodyTooLarge():
            return Problem(413, "the picture has too many bytes")
        case NotAPicture():
            return Problem(400, str(error))
        case shmlane.TensorMismatch():
            # A picture, but not one of this model's.
            return Problem(422, error.message)
    problem = _our_problem(error)
    _log.warning("%d for %s: %s", problem.status, type(error).__name__, error)
    return problem


def _our_problem(error: Exception) -> Problem:
    match error:
        case shmlane.LeaseTimeout():
            return Problem(503, "too many requests at once", _RETRY_AFTER)
        case _ if isinstance(error, _PASSING):
            return Problem(503, "the model cannot be reached", _RETRY_AFTER)
        case shmlane.InferTimeout():
            return Problem(504, "the model did not answer in time")
        case shmlane.ServerError() | shmlane.TransportError():
            return Problem(502, "the model failed")
        case _:
            # A usage error is among these: the mistake is in this program, not in
            # what the client sent.
            return Problem(500, "this service failed")
