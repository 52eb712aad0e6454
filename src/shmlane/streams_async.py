"""Many requests from one task: a stream of items for `AsyncSession`.

Owns the tasks that take items one by one, each on a slot of its own. Refuses to decide
in which order results leave (`outcomes`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from .asynchronous import AsyncShell
from .errors import LeaseTimeout
from .leases import BaseLease, Result
from .outcomes import Outcomes
from .stream_plan import StreamPlan, checked_item

L_co = TypeVar("L_co", bound=BaseLease, covariant=True)
L = TypeVar("L", bound=BaseLease)
I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")


class AsyncStream(AsyncIterator[R]):
    """Results of a stream, made while they are awaited; see `AsyncSession.stream`.

    Belongs to one task at a time. `len` tells how many results there will be, where the
    items have a length.
    """

    def __init__(self, course: AsyncCourse[Any, Any, R], outcomes: Outcomes[R]) -> None:
        self._course = course
        self._outcomes = outcomes

    async def __anext__(self) -> R:
        """The next result. Cancelled, it is asked for again by the next call."""
        # An error is there only if it was asked for.
        return cast(R, await self._course.next())

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

    async def close(self) -> None:
        """Begin no more; slots in flight come back with their late replies."""
        await self._course.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        course = getattr(self, "_course", None)
        if course is not None:
            course.abandon()

    def __repr__(self) -> str:
        return f"<AsyncStream {self._outcomes!r}>"


class AsyncStreamHost(Protocol[L_co]):
    """What a stream asks of its session."""

    async def _begin_lease(self) -> tuple[L_co, AsyncShell]: ...
    async def _fill_item(self, lease: Any, item: Any) -> None: ...
    async def _infer_item(self, lease: Any, plan: Any) -> Result: ...


class AsyncCourse(Generic[L, I, R]):
    """One run of a stream: tasks that make results, and whoever asks for them."""

    def __init__(
        self,
        plan: StreamPlan[L, I, R],
        items: Iterable[I] | AsyncIterable[I],
        host: AsyncStreamHost[L],
    ) -> None:
        self._plan = plan
        self._outcomes = plan.outcomes
        self._host = host
        self._source = _iterate(items)
        self._fetching = asyncio.Lock()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._is_exhausted = False
        self._leased = 0
        self._threads = plan.threads()
        self._tasks: list[asyncio.Task[None]] | None = None

    async def next(self) -> R | Exception:
        """The next result, `StopAsyncIteration` after the last one.

        Begins nothing before the first is asked for. Cancelled, nothing is lost: it can
        be called again. An error that it raises is the end.
        """
        if self._tasks is None:
            count = self._plan.in_flight
            self._tasks = [asyncio.create_task(self._work()) for _ in range(count)]
        while not self._outcomes.ready:
            if all(task.done() for task in self._tasks):
                await self.close()
                self._outcomes.raise_failure()
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        try:
            return self._outcomes.take()
        except BaseException:
            await self.close()
            raise
        finally:
            self._room.set()

    async def close(self) -> None:
        """Begin no more; once this is over, no task has a slot any more."""
        tasks, self._tasks = self._tasks, []
        self._outcomes.clear()
        for task in tasks or ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def abandon(self) -> None:
        """As `close`, by whoever drops a stream, in any thread; does not wait."""
        for task in self._tasks or ():
            # In a loop that was closed, no task goes on anyway.
            with contextlib.suppress(RuntimeError):
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _work(self) -> None:
        """Take item after item until there are none."""
        try:
            while (fetched := await self._fetch()) is not None:
                number, item = fetched
                lease, shell = await self._begin_lease()
                self._leased += 1
                try:
                    with lease:
                        value = await self._pass(lease, shell, item)
                except Exception as error:
                    self._outcomes.fail(number, error)
                else:
                    self._outcomes.finish(number, value)
                    # Its views are the caller's to let go of, while this goes on.
                    del value
                finally:
                    self._leased -= 1
                self._news.set()
        except Exception as error:
            # Not of one item: of the source, or of the session.
            self._is_exhausted = True
            self._outcomes.failure = self._outcomes.failure or error
        finally:
            self._news.set()

    async def _fetch(self) -> tuple[int, I] | None:
        async with self._fetching:
            while self._outcomes.room <= 0:
                self._room.clear()
                await self._room.wait()
            if self._is_exhausted:
                return None
            try:
                item = await anext(self._source)
            except StopAsyncIteration:
                self._is_exhausted = True
                return None
            return self._outcomes.begin(), item

    async def _begin_lease(self) -> tuple[L, AsyncShell]:
        """A slot; where others keep theirs, those that this stream has are enough."""
        while True:
            try:
                return await self._host._begin_lease()
            except LeaseTimeout:
                if not self._leased:
                    raise

    async def _pass(self, lease: L, shell: AsyncShell, item: I) -> R:
        """What becomes of one item."""
        plan, threads = self._plan, self._threads
        if threads is None:
            if plan.is_plain:
                await self._host._fill_item(lease, checked_item(item))
            else:
                plan.write(lease, item)
            result = await self._host._infer_item(lease, plan)
            value: R = plan.read(item, result)
            return value
        await shell.run_apart(lease, plan.write, lease, item, threads=threads)
        result = await self._host._infer_item(lease, plan)
        return await shell.run_apart(lease, plan.read, item, result, threads=threads)


async def _iterate(items: Iterable[I] | AsyncIterable[I]) -> AsyncIterator[I]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
