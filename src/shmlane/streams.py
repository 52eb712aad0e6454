"""Many requests from one thread: a stream of items, each on a slot of its own.

Owns when an item is begun, and the one wait for all replies. Refuses to decide in which
order results leave (`outcomes`) and what replies mean (`exchange`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from .blocking import BlockingShell
from .board import Board
from .errors import RequestLost, UsageError
from .exchange import Answer, Exchange, Verdict
from .flights import Flight, Timetable
from .leases import BaseLease, Result
from .metadata import Array
from .options import RequestOptions
from .outcomes import Outcomes, Progress
from .slots import Slot
from .timing import Timeout
from .transport import timed_out

L = TypeVar("L", bound=BaseLease)
I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")

# A source whose items take longer than this keeps results waiting, which then go first.
_SLOW_SOURCE = 1e-3
# Between two results that are asked for, replies are looked for after so long.
_LOOK_AGAIN = 1e-4


class StreamPlan(Generic[L, I, R]):
    """How a stream is to run: its arguments, checked.

    total: how many items there are, None if nobody knows.
    """

    def __init__(
        self,
        items: Iterable[I],
        *,
        slots: int,
        write: Callable[[L, I], object] | None,
        read: Callable[[I, Result], R] | None,
        in_flight: int | None,
        ordered: bool,
        return_exceptions: bool,
        workers: int,
        progress: Progress | None,
        timeout: Timeout,
        options: RequestOptions | None,
    ) -> None:
        self.items = items
        self.write: Callable[[L, Any], object] = write or _write_all
        self.read: Callable[[Any, Result], Any] = read or _copy
        self.in_flight = _checked_in_flight(in_flight, slots)
        self.workers = _checked_count("workers", workers, least=0)
        self.timeout = timeout
        self.options = options
        self.outcomes: Outcomes[R] = Outcomes(
            self.in_flight,
            ordered=ordered,
            return_exceptions=return_exceptions,
            progress=progress,
            total=len(items) if isinstance(items, Sized) else None,
        )
        if options is not None and options.has_sequence:
            raise UsageError(
                "the steps of a sequence cannot be a stream: each has to wait for the"
                " one before.",
                hint="Use lease.infer(options=...) for each step.",
            )


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
        return next(self._run)  # type: ignore[return-value]

    def __len__(self) -> int:
        if self._outcomes.total is None:
            raise TypeError("this stream has no length: its items have none")
        return self._outcomes.total

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
        host: StreamHost[L],
        shell: BlockingShell,
        exchange: Exchange,
    ) -> None:
        self._plan = plan
        self._outcomes = plan.outcomes
        self._host = host
        self._shell = shell
        self._exchange = exchange
        self._source: Iterator[I] = iter(plan.items)
        # An item that has been fetched and waits for a slot.
        self._waiting: deque[I] = deque()
        self._is_exhausted = False
        self._source_is_slow = False
        self._looked = 0.0
        self._flying: dict[Passage[L], Passage[L]] = {}
        self._timetable = Timetable()
        self._board: Board[Passage[L]]
        self._workshop: _Workshop | None = None

    def run(self) -> Generator[R | Exception, None, None]:
        """Begins nothing, and needs no descriptor, before the first is asked for."""
        with contextlib.closing(Board[Passage[L]]()) as self._board:
            try:
                if self._plan.workers:
                    self._workshop = _Workshop(self._plan.workers, self._board)
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
                return

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
        except StopIteration:
            self._is_exhausted = True
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
        self._flying[passage] = passage
        self._expect(passage)
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


class _Workshop:
    """Threads that fill slots and read results, for one stream.

    busy: how many pieces of work are not finished yet.
    """

    def __init__(self, threads: int, board: Board[Any]) -> None:
        self.busy = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="shmlane-stream")
        self._board = board
        self._leases: dict[Future[object], BaseLease] = {}
        self._ended: deque[
            tuple[Future[object], Callable[[Exception | None], object]]
        ] = deque()

    def do(
        self,
        work: Callable[[], object],
        then: Callable[[Exception | None], object],
        lease: BaseLease,
    ) -> None:
        """`work` in a thread, which has `lease` meanwhile; `then` in `finish`."""
        future = self._threads.submit(work)
        self._leases[future] = lease
        self.busy += 1

        def ended(future: Future[object]) -> None:
            self._ended.append((future, then))
            self._board.ring()

        future.add_done_callback(ended)

    def finish(self) -> None:
        """Go on with what the threads have done."""
        while self._ended:
            future, then = self._ended.popleft()
            del self._leases[future]
            self.busy -= 1
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            then(error)

    def close(self) -> None:
        """Wait for work that was begun, then give back its leases."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for lease in self._leases.values():
            lease.release()


def _write_all(lease: BaseLease, item: object) -> None:
    if not hasattr(item, "items"):
        raise UsageError(
            f"an item of the stream is a {type(item).__name__}, not {{name: array}}.",
            hint="Say how it fills the inputs: stream(items, write=function), called"
            " with a lease and the item.",
        )
    for name, array in item.items():
        lease.write(name, array)


def _copy(_item: object, result: Result) -> dict[str, Array]:
    return result._take()


def _checked_in_flight(in_flight: int | None, slots: int) -> int:
    count = slots if in_flight is None else _checked_count("in_flight", in_flight)
    if count > slots:
        raise UsageError(
            f"in_flight={count}: the session has {slots} slots, and each request in"
            " flight needs one.",
            hint=f"Give the session more: Session(..., slots={count}).",
            in_flight=count,
            slots=slots,
        )
    return count


def _checked_count(name: str, value: int, *, least: int = 1) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise UsageError(f"{name}={value!r}: give a whole number, {least} or more.")
    return count
