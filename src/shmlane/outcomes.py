"""What has become of the items of a stream, until it is asked for.

Owns the order in which results leave, how many may wait to, when an error is raised,
and what callers hold of a stream. Refuses to know how results are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

T = TypeVar("T")

Progress = Callable[[int, int | None], object]

# Beside those in flight, as many again may wait behind one that is slow.
_WINDOW = 2


class _Failure:
    """In the place of a result."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class Outcomes(Generic[T]):
    """Results that were made, in the order in which they are to leave.

    in_flight: how many are made at once. total: of all items, None if nobody knows.
    """

    def __init__(
        self,
        in_flight: int,
        *,
        ordered: bool,
        return_exceptions: bool,
        progress: Progress | None,
        total: int | None,
    ) -> None:
        self.taken = 0
        self.failed = 0
        self.total = total
        # How many may be begun before something is taken.
        self.room = _WINDOW * in_flight
        self._begun = 0
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._progress = progress
        # What ended the source, or the session: raised when all else is handed out.
        self.failure: Exception | None = None
        # Of an ordered stream, those that came before their turn.
        self._early: dict[int, T | _Failure] = {}
        # What can be taken now.
        self.ready: deque[T | _Failure] = deque()
        self._next = 0

    @property
    def length(self) -> int:
        """How many results there will be; `TypeError` if nobody knows."""
        if self.total is None:
            raise TypeError("this stream has no length: its items have none")
        return self.total

    def begin(self) -> int:
        """The number of the next item."""
        number = self._begun
        self._begun += 1
        self.room -= 1
        return number

    def fail(self, number: int, error: Exception) -> None:
        self.failed += 1
        error.add_note(f"This is what became of item {number} of the stream.")
        self.finish(number, _Failure(error))

    def finish(self, number: int, outcome: T | _Failure) -> None:
        if self._ordered:
            if number != self._next:
                self._early[number] = outcome
                return
            self._next += 1
        self.ready.append(outcome)
        while self._early and self._next in self._early:
            self.ready.append(self._early.pop(self._next))
            self._next += 1

    def take(self) -> T | Exception:
        """The next result; an error is raised, or returned if that was asked for."""
        outcome = self.ready.popleft()
        self.taken += 1
        self.room += 1
        if self._progress is not None:
            self._progress(self.taken, self.total)
        if not isinstance(outcome, _Failure):
            return outcome
        if self._return_exceptions:
            return outcome.error
        try:
            raise outcome.error
        finally:
            # The error holds this frame, and with it what its other frames hold.
            del outcome

    def raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            # It holds this frame, and with it what its other frames hold.
            del failure

    def clear(self) -> None:
        """Nothing more is taken."""
        self.ready.clear()

    def __repr__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.taken}{of} done{failed}"


class Stream(Iterator[T]):
    """Results of a stream, made as they are asked for; see `Session.stream`.

    Belongs to one thread at a time. `len` tells how many results there will be, where
    the items have a length, so that progress bars know.
    """

    def __init__(
        self, run: Generator[T | Exception, None, None], outcomes: Outcomes[T]
    ) -> None:
        self._run = run
        self._outcomes = outcomes

    def __iter__(self) -> Iterator[T]:
        # A loop needs no call of ours for each result.
        return cast(Iterator[T], self._run)

    def __next__(self) -> T:
        # An error is there only if it was asked for.
        return cast(T, next(self._run))

    def __len__(self) -> int:
        return self._outcomes.length

    def __bool__(self) -> bool:
        return True

    @property
    def done(self) -> int:
        """How many results have been handed out, errors included."""
        return self._outcomes.taken

    @property
    def failed(self) -> int:
        """How many items have come to an error so far."""
        return self._outcomes.failed

    def close(self) -> None:
        """Begin no more; slots in flight come back with their late replies."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream {self._outcomes!r}>"
