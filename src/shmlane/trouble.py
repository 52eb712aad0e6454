"""What is told when a connection does not do what was asked of it.

Owns the words of these errors: no time left, half a request sent, a reply that cannot
come or be read, nobody to connect to. Refuses to know sockets (`transport`).
"""

from __future__ import annotations

import errno

from .buffers import Outbox
from .endpoint import Endpoint
from .errors import InferTimeout, RequestLost, ServerUnreachable
from .timing import Deadline, in_seconds


def broken(error: OSError | None) -> RequestLost:
    """The connection ended with its reply outstanding; None: the server closed it."""
    reason = "the server closed it" if error is None else error.strerror or error
    return RequestLost(
        f"the connection broke before the reply was complete ({reason}); the model may"
        " have run.",
        hint="Send the request again if running it twice does no harm; memory that the"
        " server may still write to stays set aside.",
    )


def cut_off(outbox: Outbox, limit: float | None) -> InferTimeout:
    return InferTimeout(
        f"{outbox.nbytes - outbox.left} of {outbox.nbytes} bytes of the request were"
        f" sent within {in_seconds(limit)}: the server has not begun.",
        hint="It reads slowly or not at all. Raise the timeout, or look at its load.",
        timeout=limit,
    )


def timed_out(timeout: float | None) -> InferTimeout:
    return InferTimeout(
        f"no complete reply came within {in_seconds(timeout)} of waiting.",
        hint="The model may still run. To try again, call infer of the session again,"
        " or release this lease and take another. Raise the timeout, or look at the"
        " server's queue.",
        timeout=timeout,
    )


def unread(reason: str) -> RequestLost:
    return RequestLost(
        f"the reply cannot be read ({reason}); the model may have run.",
        hint="Is the process out of descriptors or threads? See ulimit -n and -u.",
    )


def unreachable(
    endpoint: Endpoint, deadline: Deadline, error: OSError
) -> ServerUnreachable:
    hint = "Is tritonserver running, and is this its HTTP address?"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "This process has no descriptor left: see ulimit -n, or use fewer slots."
    return ServerUnreachable(
        f"could not connect to {endpoint.address} within {in_seconds(deadline.limit)}:"
        f" {error.strerror or error}.",
        hint=hint,
        url=endpoint.url,
        timeout=deadline.limit,
    )
