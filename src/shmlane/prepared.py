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

# What the last character of an id may be: each takes its turn.
TURNS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
LAST_TURN = len(TURNS) - 1
# What is before that, in hexadecimal: of one length now and after any count of series.
_LEAST = 1 << 48
_SPAN = 1 << 51


def first_series() -> int:
    """Where a slot begins to count, far from where any other is."""
    return _LEAST + secrets.randbelow(_SPAN)


def id_of(series: int, turn: int) -> str:
    return f"{series:x}{TURNS[turn]:c}"


def _last_of(data: bytes, id_: str) -> int:
    """Where the last character of that id is."""
    return data.index(id_.encode()) + len(id_) - 1


class Prepared:
    """A request that is finished but for its id, and its reply.

    Each time it is sent it has an id that no other request of any slot has: something
    in between may repeat a reply, late, or mix up connections, and what it tells would
    pass for the answer to another request. A reply that but for the id equals the last
    checked one needs no parsing. With a caller's own id it is finished, and sent once.

    Ids take turns in their last character only, which is put where `place` says. Before
    a turn comes again, `stamp` puts another series in front of it.

    known: the last checked reply, the place of the same character in it, and what it
    means. given: bits of the inputs that are sent. wire_inputs: those of them that go
    behind the request. wire_outputs: outputs that come behind the reply. key: the
    shapes of the inputs, where sizes of outputs depend on them.
    """

    __slots__ = (
        "__weakref__",
        "given",
        "key",
        "known",
        "options",
        "place",
        "request",
        "wire_inputs",
        "wire_outputs",
    )

    def __init__(
        self,
        request: bytes,
        *,
        given: int,
        our_id: str = "",
        options: RequestOptions | None = None,
        wire_inputs: Sequence[Tensor] = (),
        wire_outputs: frozenset[str] = frozenset(),
        key: Key | None = None,
    ) -> None:
        self.request = bytearray(request)
        self.place = _last_of(request, our_id) if our_id else 0
        self.given = given
        self.options = options
        self.wire_inputs = wire_inputs
        self.wire_outputs = wire_outputs
        self.key = key
        self.known: tuple[bytearray, int, Any]
        self.forget()

    def parts(self, request: bytearray) -> list[bytearray | memoryview]:
        """The finished request, and the inputs that go behind it."""
        parts: list[bytearray | memoryview] = [request]
        parts += [tensor.content.data for tensor in self.wire_inputs]
        return parts

    def stamp(self, series: int) -> None:
        """Have ids of that series from now on, unless the id is the caller's."""
        text = b"%x" % series
        reply, place, _ = self.known
        for data, last in ((self.request, self.place), (reply, place)):
            if last:
                data[last - len(text) : last] = text

    def serves(self, given: int, options: RequestOptions | None) -> bool:
        """Whether the next request, with these inputs and options, is this one."""
        return self.given == given and self.options is options

    def spoil(self) -> None:
        """Have another prepared before the next request."""
        self.given = -1

    def remember(self, sent_id: str, reply: bytes, answer: Any) -> None:
        """`reply` to the request of that id, one of ours, means `answer`."""
        # Not where the model tells it, too.
        if reply.count(sent_id.encode()) == 1:
            # In one step: Ctrl-C must not leave the one with another's other.
            self.known = (bytearray(reply), _last_of(reply, sent_id), answer)

    def forget(self) -> None:
        """Know no reply: outputs have other shapes now than it told of."""
        self.known = (bytearray(1), 0, None)
