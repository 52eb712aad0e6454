"""The items of a stream that are still to come.

Owns when the next one is fetched, whether their source is slow, and what ends it.
Refuses to begin any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from .outcomes import Outcomes

I = TypeVar("I")  # noqa: E741 - an item

# A source whose items take longer than this keeps results waiting, which then go first.
_SLOW = 1e-3


class Upcoming(Generic[I]):
    """Items, of which one at most has been fetched and waits for a slot.

    outcomes: what ends the source is told there. take: the item that was fetched;
    `IndexError` if it is not there any more. is_slow: whether results should be handed
    out before the next is waited for.
    """

    __slots__ = ("_fetched", "_is_exhausted", "_outcomes", "_source", "is_slow", "take")

    def __init__(self, items: Iterable[I], outcomes: Outcomes[Any]) -> None:
        self._source = iter(items)
        self._outcomes = outcomes
        self._fetched: deque[I] = deque()
        self._is_exhausted = False
        self.take: Callable[[], I] = self._fetched.popleft
        self.is_slow = False

    @property
    def may_come(self) -> bool:
        """Whether there may be one yet."""
        return bool(not self._is_exhausted or self._fetched)

    def fetch(self) -> bool:
        """Whether there is one to take; what the source raises ends the stream."""
        if self._fetched:
            return True
        if self._is_exhausted:
            return False
        begun = time.monotonic()
        try:
            self._fetched.append(next(self._source))
        except StopIteration:
            self._is_exhausted = True
            return False
        except Exception as error:
            self.end(error)
            return False
        self.is_slow = time.monotonic() - begun > _SLOW
        return True

    def end(self, failure: Exception) -> None:
        """Fetch no more, because of what is not the fault of one item."""
        self._outcomes.failure = failure
        self._is_exhausted = True
        self._fetched.clear()

    def __repr__(self) -> str:
        fetched = f"{len(self._fetched)} fetched"
        return f"<Upcoming {fetched}{', exhausted' if self._is_exhausted else ''}>"
