"""Ways to send requests, behind one face: a scenario is written once for all of them.

Owns that face and the adapters of threads: each sends items in its own way, and tells
what became of each. Those of tasks are in `flavours_async`. Refuses to know servers and
to judge.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from shmlane import (
    AsyncLease,
    Lease,
    OwnedResult,
    RequestOptions,
    Result,
    Session,
    SessionStats,
)
from shmlane.timing import DEFAULT, Timeout
from tests.sessions import Array

Item = Mapping[str, Any]
Outcome = dict[str, Array] | Exception

LIMIT = 20.0
_THREADS = 8


class Limits(NamedTuple):
    """What each inference is given beside its inputs."""

    timeout: Timeout = DEFAULT
    options: RequestOptions | None = None


class Client(abc.ABC):
    """A session, and one way to ask it."""

    is_closed = False

    def begin(
        self,
        items: Sequence[Item],
        *,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> Future[list[Outcome]]:
        """Ask for all of these, as many at once as there are slots."""
        return self._start(items, Limits(timeout, options))

    def ask(self, items: Sequence[Item], **limits: Any) -> list[Outcome]:
        """What became of each item: its outputs, or its error."""
        return self.begin(items, **limits).result(LIMIT)

    @abc.abstractmethod
    def _start(
        self, items: Sequence[Item], limits: Limits
    ) -> Future[list[Outcome]]: ...

    @abc.abstractmethod
    def keep(self, item: Item) -> dict[str, Array]:
        """Views of the outputs of one item, whose lease has ended."""

    @abc.abstractmethod
    def holding(self) -> contextlib.AbstractContextManager[None]:
        """Somebody has a slot."""

    @abc.abstractmethod
    def warm_up(self) -> None: ...

    @abc.abstractmethod
    def close(self, *, wait: bool = True) -> None: ...

    @abc.abstractmethod
    def end(self) -> None:
        """After `close`: end what the adapter itself has."""

    @abc.abstractmethod
    def stats(self) -> SessionStats: ...


def _attempt(work: Callable[[], dict[str, Array]]) -> Outcome:
    try:
        return work()
    except Exception as error:
        # Its frames would hold it, and their arrays, by way of the future it goes to.
        return error.with_traceback(None)


def write_all(lease: Lease | AsyncLease, item: Item) -> None:
    for name, array in item.items():
        lease.write(name, array)


def views_of(_item: Item, result: Result) -> dict[str, Array]:
    return dict(result)


# --- threads --------------------------------------------------------------------------


class BlockingClient(Client):
    """Asks from threads."""

    def __init__(self, url: str, model: str, **options: Any) -> None:
        self.session = Session(url, model, **options).open()
        self.slots = options["slots"]
        self._threads = ThreadPoolExecutor(_THREADS)

    def _start(self, items: Sequence[Item], limits: Limits) -> Future[list[Outcome]]:
        return self._threads.submit(self._ask, items, limits)

    @abc.abstractmethod
    def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]: ...

    def keep(self, item: Item) -> dict[str, Array]:
        with self.session.lease() as lease:
            write_all(lease, item)
            return dict(lease.infer())

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        with self.session.lease():
            yield

    def warm_up(self) -> None:
        self.session.warmup()

    def close(self, *, wait: bool = True) -> None:
        self.is_closed = True
        self.session.close(wait=wait)

    def end(self) -> None:
        self._threads.shutdown()

    def stats(self) -> SessionStats:
        return self.session.stats()


class SessionInfer(BlockingClient):
    """`Session.infer`, in as many threads as there are slots."""

    def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]:
        def one(item: Item) -> Outcome:
            return _attempt(lambda: self._one(item, limits))

        with ThreadPoolExecutor(self.slots) as pool:
            return list(pool.map(one, items))

    def _one(self, item: Item, limits: Limits) -> dict[str, Array]:
        return self.session.infer(item, **limits._asdict())


class LeaseInfer(SessionInfer):
    """`Lease.infer`."""

    def _one(self, item: Item, limits: Limits) -> dict[str, Array]:
        with self.session.lease() as lease:
            write_all(lease, item)
            return lease.infer(**limits._asdict()).copy()


class SessionSubmit(BlockingClient):
    """`Session.submit`, all at once."""

    def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]:
        begun: list[Future[dict[str, Array]] | Exception] = []
        for item in items:
            try:
                begun.append(self._begin(item, limits))
            except Exception as error:
                begun.append(error)
        return [
            each if isinstance(each, Exception) else _attempt(each.result)
            for each in begun
        ]

    def _begin(self, item: Item, limits: Limits) -> Future[dict[str, Array]]:
        return self.session.submit(item, **limits._asdict())


class LeaseSubmit(SessionSubmit):
    """`Lease.submit`; each result is copied when it comes, and gives its slot back."""

    def _begin(self, item: Item, limits: Limits) -> Future[dict[str, Array]]:
        with self.session.lease() as lease:
            write_all(lease, item)
            future = lease.submit(**limits._asdict())
        copies: Future[dict[str, Array]] = Future()

        def copy(done: Future[OwnedResult]) -> None:
            try:
                with done.result() as result:
                    copies.set_result(result.copy())
            except Exception as error:
                copies.set_exception(error)

        future.add_done_callback(copy)
        return copies

    def keep(self, item: Item) -> dict[str, Array]:
        with self.session.lease() as lease:
            write_all(lease, item)
            with lease.submit().result() as result:
                return dict(result)


class SessionStream(BlockingClient):
    """`Session.stream`; an error that ends it is that of all that is left."""

    workers = 0

    def _ask(self, items: Sequence[Item], limits: Limits) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            stream = self.session.stream(
                items,
                workers=self.workers,
                return_exceptions=True,
                **limits._asdict(),
            )
            outcomes.extend(stream)
        except Exception as error:
            outcomes += [error] * (len(items) - len(outcomes))
        return outcomes

    def keep(self, item: Item) -> dict[str, Array]:
        (views,) = self.session.stream([item], read=views_of, workers=self.workers)
        return views


class SessionStreamWithWorkers(SessionStream):
    """The same, with threads that write and read."""

    workers = 2
