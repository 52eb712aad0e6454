"""Requests that were built once, to be sent many times.

Owns the bytes of a slot's two requests and the replies that are known to them. Refuses
to build them (`requests`) and to judge replies (`exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .options import RequestOptions
from .sizes import Key
from .tensors import Tensor


class Prepared:
    """Two finished requests, used in turn, and their replies.

    A reply equal to the last checked one of the same id needs no parsing. Their ids are
    "0" and "1", because a reply that something in between sent twice would otherwise
    pass for the answer to the next request. A caller's own id stands in both: they are
    sent once.

    given: bits of the inputs that are sent. wire_inputs: those of them that go behind
    the request. wire_outputs: outputs that come behind the reply. key: the shapes of
    the inputs, where sizes of outputs depend on them.
    """

    __slots__ = (
        "__weakref__",
        "answers",
        "given",
        "ids",
        "key",
        "options",
        "replies",
        "requests",
        "wire_inputs",
        "wire_outputs",
    )

    def __init__(
        self,
        requests: tuple[bytes, bytes],
        *,
        given: int,
        ids: tuple[str, str] = ("0", "1"),
        options: RequestOptions | None = None,
        wire_inputs: Sequence[Tensor] = (),
        wire_outputs: frozenset[str] = frozenset(),
        key: Key | None = None,
    ) -> None:
        self.requests = requests
        self.given = given
        self.ids = ids
        self.options = options
        self.wire_inputs = wire_inputs
        self.wire_outputs = wire_outputs
        self.key = key
        self.forget()

    def parts(self, request: bytes) -> list[bytes | memoryview]:
        """One of the two requests, and the inputs that go behind it."""
        parts: list[bytes | memoryview] = [request]
        parts += [tensor.content.data for tensor in self.wire_inputs]
        return parts

    def serves(self, given: int, options: RequestOptions | None) -> bool:
        """Whether the next request, with these inputs and options, is one of these."""
        return self.given == given and self.options is options

    def spoil(self) -> None:
        """Have another prepared before the next request."""
        self.given = -1

    def remember(self, turn: int, reply: bytes, answer: Any) -> None:
        """`reply` to the request of this turn means `answer`."""
        self.replies[turn] = reply
        self.answers[turn] = answer

    def forget(self) -> None:
        """Know no reply: outputs have other shapes now than the replies told of."""
        self.replies: list[bytes | None] = [None, None]
        self.answers: list[Any] = [None, None]
