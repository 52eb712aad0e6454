"""Ways to send requests from the tasks of an event loop: the other half of `flavours`.

Owns the loop, which runs in a thread of its own. Refuses to know servers and to judge.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from shmlane import AsyncSession, SessionStats
from tests.flavours import LIMIT, Client, Item, Limits, Outcome, views_of, write_all
from tests.sessions import Array

T = TypeVar("T")


# --- tasks ----------------------------------------------------------------------------


class AsyncClient(Client):
    """Asks from the tasks of an event loop that runs in a thread."""

    def __init__(self, url: str, model: str, **options: Any) -> None:
        self.slots = options["slots"]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.session = AsyncSession(url, model, **options)
        try:
            self._run(self.session.open())
        except BaseException:
            self.end()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT)

    def _start(self, items: Sequence[Item], limits: Limits) -> Future[list[Outcome]]:
        work = self._ask(items, limits)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @abc.abstractmethod
    async def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]: ...

    def keep(self, item: Item) -> dict[str, Array]:
        return self._run(self._keep(item))

    async def _keep(self, item: Item) -> dict[str, Array]:
        async with self.session.lease() as lease:
            write_all(lease, item)
            return dict(await lease.infer())

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        lease = self._run(_awaited(self.session.lease()))
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(lease.release)

    def warm_up(self) -> None:
        self._run(self.session.warmup())

    def close(self, *, wait: bool = True) -> None:
        self.is_closed = True
        self._run(self.session.close(wait=wait))

    def end(self) -> None:
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stats(self) -> SessionStats:
        return self.session.stats()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _gathered(work: Sequence[Awaitable[dict[str, Array]]]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for each in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
        outcomes.append(each)
    return outcomes


class AsyncSessionInfer(AsyncClient):
    """`AsyncSession.infer`, in a task for each item."""

    async def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]:
        return await _gathered([self._one(item, limits) for item in items])

    async def _one(self, item: Item, limits: Limits) -> dict[str, Array]:
        return await self.session.infer(item, **limits._asdict())


class AsyncLeaseInfer(AsyncSessionInfer):
    """`AsyncLease.infer`."""

    async def _one(self, item: Item, limits: Limits) -> dict[str, Array]:
        async with self.session.lease() as lease:
            write_all(lease, item)
            return (await lease.infer(**limits._asdict())).copy()


class AsyncSessionSubmit(AsyncSessionInfer):
    """`AsyncSession.submit`."""

    async def _one(self, item: Item, limits: Limits) -> dict[str, Array]:
        return await (await self.session.submit(item, **limits._asdict()))


class AsyncLeaseSubmit(AsyncSessionInfer):
    """`AsyncLease.submit`."""

    async def _one(self, item: Item, limits: Limits) -> dict[str, Array]:
        async with self.session.lease() as lease:
            write_all(lease, item)
            with await lease.submit(**limits._asdict()) as result:
                return result.copy()

    async def _keep(self, item: Item) -> dict[str, Array]:
        async with self.session.lease() as lease:
            write_all(lease, item)
            with await lease.submit() as result:
                return dict(result)


class AsyncSessionStream(AsyncClient):
    """`AsyncSession.stream`; an error that ends it is that of all that is left."""

    workers = 0

    async def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            async for each in self.session.stream(
                items,
                workers=self.workers,
                return_exceptions=True,
                **limits._asdict(),
            ):
                outcomes.append(each)  # noqa: PERF401 - an error comes in between
        except Exception as error:
            outcomes += [error] * (len(items) - len(outcomes))
        return outcomes

    async def _keep(self, item: Item) -> dict[str, Array]:
        stream = self.session.stream([item], read=views_of, workers=self.workers)
        (views,) = [each async for each in stream]
        return views


class AsyncSessionStreamWithWorkers(AsyncSessionStream):
    """The same, with threads that write and read."""

    workers = 2
