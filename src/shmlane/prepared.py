"""Requests that were built once, to be sent many times.

Owns the bytes of a slot's request and the reply that is known to it. Refuses to build
the one (`requests`) and to judge the other (`exchange`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from .options import RequestOptions
from .sizes import Key
from .tensors import Tensor

# As ids they have 14 hexadecimal digits, now and after any count of requests: all are
# of one length.
_LEAST = 1 << 52
_SPAN = 1 << 55
# Equal to no reply, whatever the number.
_UNKNOWN: tuple[bytes, Any] = (b"%x", None)


def first_number() -> int:
    """Where a slot begins to count its requests, far from where any other is."""
    return _LEAST + secrets.randbelow(_SPAN)


def template(data: bytes, number: int) -> bytes:
    """What gives `data`, or the same with another number, by `template % number`."""
    return data.replace(b"%", b"%%").replace(b"%x" % number, b"%x")


class Prepared:
    """A request that is finished but for its id, and its reply.

    Each time it is sent it has a number of its own for id, which no other request of
    any slot has: something in between may repeat a reply, late, or mix up connections,
    and what it tells would pass for the answer to another request. A reply that but for
    this number equals the last checked one needs no parsing. With a caller's own id it
    is finished, and sent once.

    request: with the id left out as `%x`, unless that is the caller's own. known: the
    reply in the same way, and what it means. given: bits of the inputs that are sent.
    wire_inputs: those of them that go behind the request. wire_outputs: outputs that
    come behind the reply. key: the shapes of the inputs, where sizes of outputs depend
    on them.
    """

    __slots__ = (
        "__weakref__",
        "given",
        "key",
        "known",
        "options",
        "request",
        "wire_inputs",
        "wire_outputs",
    )

    def __init__(
        self,
        request: bytes,
        *,
        given: int,
        options: RequestOptions | None = None,
        wire_inputs: Sequence[Tensor] = (),
        wire_outputs: frozenset[str] = frozenset(),
        key: Key | None = None,
    ) -> None:
        self.request = request
        self.given = given
        self.options = options
        self.wire_inputs = wire_inputs
        self.wire_outputs = wire_outputs
        self.key = key
        self.forget()

    def parts(self, request: bytes) -> list[bytes | memoryview]:
        """The finished request, and the inputs that go behind it."""
        parts: list[bytes | memoryview] = [request]
        parts += [tensor.content.data for tensor in self.wire_inputs]
        return parts

    def serves(self, given: int, options: RequestOptions | None) -> bool:
        """Whether the next request, with these inputs and options, is this one."""
        return self.given == given and self.options is options

    def spoil(self) -> None:
        """Have another prepared before the next request."""
        self.given = -1

    def remember(self, number: int, reply: bytes, answer: Any) -> None:
        """`reply` to the request of this number means `answer`."""
        # Not where the model tells it, too, or the id is the caller's.
        if reply.count(b"%x" % number) == 1:
            # In one step: Ctrl-C must not leave the one with another's other.
            self.known = (template(reply, number), answer)

    def forget(self) -> None:
        """Know no reply: outputs have other shapes now than it told of."""
        self.known = _UNKNOWN
