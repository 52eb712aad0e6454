"""Many requests from one thread: a stream of items, each on a slot of its own.

Owns when an item is begun, and the one wait for all replies. Refuses to decide in which
order results leave (`outcomes`) and what replies mean (`exchange`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from .blocking import BlockingShell
from .board import Board
from .errors import RequestLost
from .exchange import Answer, Exchange, Verdict
from .flights import Flight, Timetable
from .leases import BaseLease, Result
from .options import RequestOptions
from .outcomes import Outcomes
from .slots import Slot
from .stream_plan import StreamPlan
from .timing import Timeout
from .transport import timed_out
from .workshop import Workshop

L = TypeVar("L", bound=BaseLease)
I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")

# A source whose items take longer than this keeps results waiting, which then go first.
_SLOW_SOURCE = 1e-3
# Between two results that are asked for, replies are looked for after so long.
_LOOK_AGAIN = 1e-4


class StreamHost(Protocol[L]):
    """What a stream asks of its session."""

    def _take_lease(self, *, wait: bool) -> L | None: ...
    def _check_lease(
        self, lease: L, timeout: Timeout, options: RequestOptions | None
    ) -> tuple[Slot, float | None]: ...


class Passage(Flight, Generic[L]):
    """The request of one item."""

    __slots__ = ("epoch", "item", "lease", "number")

    def __init__(
        self,
        slot: Slot,
        limit: float | None,
        options: RequestOptions | None,
        *,
        lease: L,
        number: int,
        item: object,
    ) -> None:
        super().__init__(slot, lease._given, limit, options)
        self.lease = lease
        self.number = number
        self.item = item
        # Whatever was read before expires.
        self.epoch = slot.epoch = slot.epoch + 1


class Stream(Iterator[R]):
    """Results of a stream, made as they are asked for; see `Session.stream`.

    Belongs to one thread at a time. `len` tells how many results there will be, where
    the items have a length, so that progress bars know.
    """

    def __init__(
        self, run: Generator[R | Exception, None, None], outcomes: Outcomes[R]
    ) -> None:
        self._run = run
        self._outcomes = outcomes

    def __next__(self) -> R:
        # An error is there only if it was asked for.
        return cast(R, next(self._run))

    def __len__(self) -> int:
        return self._outcomes.length

    def __length_hint__(self) -> int:
        return max(0, (self._outcomes.total or 0) - self._outcomes.taken)

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


class Course(Generic[L, I, R]):
    """One run of a stream, in the thread that asks for its results."""

    def __init__(
        self,
        plan: StreamPlan[L, I, R],
        items: Iterable[I],
        host: StreamHost[L],
        shell: BlockingShell,
        exchange: Exchange,
    ) -> None:
        self._plan = plan
        self._outcomes = plan.outcomes
        self._host = host
        self._shell = shell
        self._exchange = exchange
        self._source: Iterator[I] = iter(items)
        # An item that has been fetched and waits for a slot.
        self._waiting: deque[I] = deque()
        self._is_exhausted = False
        self._source_is_slow = False
        # Raised when the results of the items before have been handed out.
        self._source_error: Exception | None = None
        self._looked = 0.0
        self._flying: dict[Passage[L], Passage[L]] = {}
        self._timetable = Timetable()
        self._board: Board[Passage[L]]
        self._workshop: Workshop | None = None

    def run(self) -> Generator[R | Exception, None, None]:
        """Begins nothing, and needs no descriptor, before the first is asked for."""
        with contextlib.closing(Board[Passage[L]]()) as self._board:
            try:
                if (threads := self._plan.threads()) is not None:
                    self._workshop = Workshop(threads, self._board)
                yield from self._results()
            finally:
                self._abandon()

    def _results(self) -> Iterator[R | Exception]:
        outcomes = self._outcomes
        while True:
            self._begin_what_fits()
            if outcomes.is_ready:
                yield outcomes.take()
                self._look_if_due()
            elif self._busy:
                self._look(self._timetable.remaining)
            elif self._is_exhausted and not self._waiting:
                break
        if self._source_error is not None:
            raise self._source_error

    @property
    def _busy(self) -> int:
        """How many items are on their way."""
        working = 0 if self._workshop is None else self._workshop.busy
        return len(self._flying) + working

    # --- beginning --------------------------------------------------------------------

    def _begin_what_fits(self) -> None:
        outcomes = self._outcomes
        while self._busy < self._plan.in_flight and not outcomes.is_full:
            if outcomes.is_ready and self._source_is_slow:
                return
            if not self._waiting and not self._fetch():
                return
            # If nothing is on its way, others have the slots, and this waits in turn.
            lease = self._host._take_lease(wait=not self._busy)
            if lease is None:
                return
            self._begin(lease, self._waiting.popleft())

    def _fetch(self) -> bool:
        if self._is_exhausted:
            return False
        begun = time.monotonic()
        try:
            self._waiting.append(next(self._source))
        except Exception as error:
            self._is_exhausted = True
            if not isinstance(error, StopIteration):
                self._source_error = error
            return False
        self._source_is_slow = time.monotonic() - begun > _SLOW_SOURCE
        return True

    def _begin(self, lease: L, item: I) -> None:
        number = self._outcomes.begin()
        if self._workshop is not None:
            write = functools.partial(self._plan.write, lease, item)
            then = functools.partial(self._written, lease, item, number)
            self._workshop.do(write, then, lease)
            return
        try:
            self._plan.write(lease, item)
        except Exception as error:
            self._written(lease, item, number, error)
        except BaseException:
            lease.release()
            raise
        else:
            self._written(lease, item, number, None)

    def _written(self, lease: L, item: I, number: int, error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            plan = self._plan
            slot, limit = self._host._check_lease(lease, plan.timeout, plan.options)
            passage = Passage(
                slot, limit, plan.options, lease=lease, number=number, item=item
            )
            self._launch(passage, None)
        except Exception as failure:
            lease.release()
            self._outcomes.fail(number, failure)
        except BaseException:
            lease.release()
            raise

    def _launch(
        self, passage: Passage[L], problem: Verdict | RequestLost | None
    ) -> None:
        self._flying.pop(passage, None)
        self._shell.launch(passage, problem)
        self._expect(passage)
        self._flying[passage] = passage
        self._timetable.note(passage)

    def _expect(self, passage: Passage[L]) -> None:
        channel = passage.slot.channel
        assert channel is not None
        self._board.expect(channel, passage)

    # --- ending -----------------------------------------------------------------------

    def _look_if_due(self) -> None:
        """While results are asked for slowly, replies come that make room for more."""
        if self._busy and time.monotonic() - self._looked > _LOOK_AGAIN:
            self._look(0)

    def _look(self, timeout: float | None) -> None:
        came = self._board.wait(timeout)
        self._looked = time.monotonic()
        for passage in came:
            self._land(passage)
        if self._workshop is not None:
            self._workshop.finish()
        # Only now: what has come in time is not overdue.
        if not came and self._looked >= self._timetable.next:
            for passage in self._timetable.overdue(self._flying):
                self._board.forget(passage)
                self._fail(passage, timed_out(passage.limit))

    def _land(self, passage: Passage[L]) -> None:
        outcome: Answer | Verdict | RequestLost | None
        try:
            try:
                outcome = passage.receive(self._exchange)
            except RequestLost as error:
                outcome = error
            if outcome is None:
                self._expect(passage)
            elif isinstance(outcome, Answer):
                del self._flying[passage]
                self._read(passage, outcome)
            else:
                self._launch(passage, outcome)
        except Exception as error:
            self._fail(passage, error)

    def _fail(self, passage: Passage[L], error: Exception) -> None:
        self._flying.pop(passage, None)
        passage.lease.release()
        self._outcomes.fail(passage.number, error)

    def _read(self, passage: Passage[L], answer: Answer) -> None:
        result = Result(passage.slot, passage.epoch, answer)
        lease, number = passage.lease, passage.number
        if self._workshop is None:
            try:
                value = self._plan.read(passage.item, result)
            finally:
                lease.release()
            self._outcomes.finish(number, value)
            return

        def ended(error: Exception | None) -> None:
            lease.release()
            if error is None:
                self._outcomes.finish(number, values[0])
            else:
                self._outcomes.fail(number, error)

        values: list[Any] = []
        read, item = self._plan.read, passage.item
        self._workshop.do(lambda: values.append(read(item, result)), ended, lease)

    def _abandon(self) -> None:
        """Leave: what is in flight is late from now on."""
        if self._workshop is not None:
            self._workshop.close()
        for passage in list(self._flying):
            passage.lease.release()
        self._flying.clear()
