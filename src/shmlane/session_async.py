"""The asynchronous session: one model on one server, for the tasks of an event loop.

Owns what tasks may do when, and what they get; everything but the waiting is what a
blocking session does, with the same words. Refuses to work in two event loops.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import (
    AsyncIterable,
    Callable,
    Iterable,
    Mapping,
)
from types import TracebackType
from typing import Any, TypeVar, overload

from .asynchronous import AsyncShell
from .engine import Engine
from .errors import (
    LeaseTimeout,
    ModelNotReady,
    ServerUnreachable,
    UsageError,
)
from .handoff import SessionHandle, SlotRef
from .lease_async import AsyncHost, AsyncLease
from .leases import Result
from .lifetimes import Ending, in_background
from .metadata import Array, ModelMetadata
from .options import RequestOptions
from .outcomes import Progress
from .session_base import (
    FORKED,
    OPEN,
    checked_inputs,
    checked_limit,
    one_deadline,
    time_left,
)
from .settings import checked_count
from .stream_plan import StreamPlan
from .streams_async import AsyncCourse, AsyncStream
from .timing import DEFAULT, Deadline, Timeout, check_timeout
from .work import Work

I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")
T = TypeVar("T")

_OPEN_PAUSE = 0.05


class AsyncSession(AsyncHost):
    """Shared memory and connections for one model on one server, for asyncio.

    Takes what `Session` takes, and does what it does; whatever waits there is awaited
    here. No thread waits for a reply, and the event loop never does: connecting,
    registering and making memory happen in a few threads of its own.

    It belongs to the event loop in which it was opened. Filling a slot takes the time
    of a copy; `await asyncio.to_thread(lease.write, name, array)` spends that in a
    thread, and so does growing, which `shapes=` avoids.
    """

    # --- opening and closing ----------------------------------------------------------

    async def open(self, *, wait: float | None = 0.0) -> AsyncSession:
        """Ask for the model, make the memory, register it. Opening twice does nothing.

        As `Session.open`. Cancelled, it may still come to be open: another `open` or
        the next use goes on with it, and `close` ends it.
        """
        deadline = Deadline(check_timeout(wait, "wait"))
        while True:
            try:
                await self._open_in_thread()
                break
            except (ServerUnreachable, ModelNotReady) as error:
                if not error.retryable or deadline.has_passed:
                    raise
            await asyncio.sleep(_OPEN_PAUSE)
        if self._shell is None:
            await self._enter_loop(self._opened_engine())
        self._opened_shell().check_loop()
        return self

    async def _open_in_thread(self) -> None:
        if self._state is not OPEN:
            (await _in_thread(self._open_once)).take()

    async def _enter_loop(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._shell = AsyncShell(engine.shell, engine.exchange, loop)
        except Exception:
            # No descriptor left, or no system on which a loop can do this.
            at_once = functools.partial(self._close_in_thread, wait=False)
            (await _in_thread(at_once)).take()
            raise

    def _close_in_thread(self, *, wait: bool) -> None:
        self._begin_to_close()
        self._end(wait=wait)

    async def close(self, *, wait: bool = True) -> None:
        """Hand out no more leases, unregister, remove the memory. Twice does nothing.

        As `Session.close`. Tasks that wait for replies get them meanwhile. Cancelled,
        it is finished in the background.
        """
        closing = functools.partial(self._close_in_thread, wait=wait)
        try:
            (await asyncio.shield(_in_thread(closing))).take()
        finally:
            # In a forked child, what the loop watches is the parent's to change.
            if self._shell is not None and self._state is not FORKED:
                self._shell.close_from_anywhere()

    async def __aenter__(self) -> AsyncSession:
        try:
            return await self.open()
        except asyncio.CancelledError:
            # A thread may still be opening it, and nobody would close it.
            in_background(functools.partial(self._close_in_thread, wait=False))
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- use --------------------------------------------------------------------------

    @property
    def metadata(self) -> ModelMetadata:
        """What the server says about the model; only an opened session knows."""
        return self._opened_engine().metadata

    def lease(self, *, timeout: Timeout = DEFAULT) -> AsyncLease:
        """A free slot for this caller, waiting for at most `timeout` seconds.

        `async with session.lease() as lease`, or `lease = await session.lease()`. As
        `Session.lease` otherwise.
        """
        return AsyncLease(self, checked_limit(timeout, self._timeouts.lease))

    async def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout: Timeout = DEFAULT,
        cast: bool = False,
        options: RequestOptions | None = None,
    ) -> dict[str, Array]:
        """The short form: copy inputs in, infer, copy outputs out.

        As `Session.infer`.
        """
        checked_inputs(inputs)
        deadline = one_deadline(timeout)
        # The step of a sequence that is cancelled is sent to its end all the same, by
        # when the caller's arrays may be others.
        is_step = isinstance(options, RequestOptions) and options.has_sequence
        async with self.lease(timeout=time_left(deadline)) as lease:
            await lease._write_all(inputs, cast=cast, is_lent=not is_step)
            left = time_left(deadline)
            result = await lease.infer(timeout=left, options=options)
            return result._take()

    async def submit(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout: Timeout = DEFAULT,
        cast: bool = False,
        options: RequestOptions | None = None,
    ) -> asyncio.Task[dict[str, Array]]:
        """As `infer`, begun at once in a task of its own, which is what is returned.

        It waits for a free slot first, as `Session.submit` does, so that no more tasks
        are made than there are slots. Cancelling the task is always safe.
        """
        checked_inputs(inputs)
        deadline = one_deadline(timeout)
        lease = await self.lease(timeout=time_left(deadline))
        try:
            await lease._write_all(inputs, cast=cast)
            return lease._submit_copies(time_left(deadline), options)
        except BaseException:
            lease.release()
            raise

    @overload
    def stream(
        self,
        items: Iterable[I] | AsyncIterable[I],
        *,
        write: Callable[[AsyncLease, I], object] | None = None,
        read: None = None,
        in_flight: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> AsyncStream[dict[str, Array]]: ...
    @overload
    def stream(
        self,
        items: Iterable[I] | AsyncIterable[I],
        *,
        write: Callable[[AsyncLease, I], object] | None = None,
        read: Callable[[I, Result], R],
        in_flight: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> AsyncStream[R]: ...
    def stream(
        self,
        items: Iterable[I] | AsyncIterable[I],
        *,
        write: Callable[[AsyncLease, I], object] | None = None,
        read: Callable[[I, Result], Any] | None = None,
        in_flight: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> AsyncStream[Any]:
        """Infer for each of `items`, with many requests in flight: `async for`.

        As `Session.stream`. Items may come from an asynchronous iterable; `write` and
        `read` are plain functions, which `workers` threads keep out of the event loop.
        Requests go on while the loop runs, until as many results wait to be asked for
        as there are slots.
        """
        plan: StreamPlan[AsyncLease, I, Any] = StreamPlan(
            items,
            slots=self._settings.slots,
            write=write,
            read=read,
            in_flight=in_flight,
            ordered=ordered,
            return_exceptions=return_exceptions,
            workers=workers,
            progress=progress,
            timeout=timeout,
            options=options,
        )
        return AsyncStream(AsyncCourse(plan, items, self), plan.outcomes)

    async def _begin_lease(self) -> tuple[AsyncLease, AsyncShell]:
        lease = await self.lease()
        return lease, self._opened_shell()

    @staticmethod
    async def _fill_item(lease: AsyncLease, item: Any) -> None:
        await lease._write_all(item, cast=False)

    @staticmethod
    async def _infer_item(
        lease: AsyncLease, plan: StreamPlan[AsyncLease, Any, Any]
    ) -> Result:
        return await lease.infer(timeout=plan.timeout, options=plan.options)

    async def share(self, *, slots: int | None = None) -> SessionHandle:
        """As `Session.share`."""
        engine = await self._ensure_open()
        count = self._settings.slots if slots is None else slots
        share = functools.partial(engine.passing.share, checked_count(count))
        return await self._opened_shell().run(share)

    async def adopt(self, ref: SlotRef | str) -> AsyncLease:
        """As `Session.adopt`."""
        engine = await self._ensure_open()
        if engine.passing.needs_opening(ref):
            await self._opened_shell().run(functools.partial(engine.passing.open, ref))
        lease = AsyncLease(self, None)
        lease._adopt(engine, ref)
        return lease

    async def warmup(self) -> None:
        """Connect every free slot, and run the model once on each with zeros.

        As `Session.warmup`, all at once.
        """
        engine = await self._ensure_open()
        leases: list[AsyncLease] = []
        try:
            while engine.pool.take(lease := self.lease()):
                leases.append(lease)
                lease._begin()
            await asyncio.gather(*(self._warm(engine, lease) for lease in leases))
        finally:
            for lease in leases:
                lease.release()

    async def _warm(self, engine: Engine, lease: AsyncLease) -> None:
        if lease._zero():
            await lease.infer()
            return
        assert lease._slot is not None
        limit = Deadline(self._timeouts.infer)
        connect = functools.partial(engine.shell.make_ready, lease._slot, 0, limit)
        await self._opened_shell().run_apart(lease, connect)

    # --- what leases ask for ----------------------------------------------------------

    async def _acquire(self, lease: AsyncLease, limit: float | None) -> None:
        shell = self._shell
        engine = self._engine
        if shell is None or engine is None or self._state is not OPEN:
            engine = await self._ensure_open()
            shell = self._opened_shell()
        shell.check_loop()
        try:
            await shell.acquire(engine.pool, lease, limit)
        except LeaseTimeout:
            engine.receiver.nudge()
            raise

    def _take_back(self, engine: Engine) -> None:
        # The server is asked, which takes time, and keeps the session until it is done.
        # Where no thread can be had, the end of the interpreter does this work.
        in_background(functools.partial(super()._take_back, engine))

    def _end_dropped(self, engine: Engine) -> None:
        ending = Ending(functools.partial(engine.close, wait=False), engine.disown)
        # The loop that is in the middle of this must not wait for a server.
        if not (_is_in_a_loop() and in_background(ending.run)):
            ending.run()

    # --- state ------------------------------------------------------------------------

    async def _ensure_open(self) -> Engine:
        if self._state is not OPEN or self._shell is None:
            await self.open()
        self._opened_shell().check_loop()
        return self._opened_engine()

    def _opened_shell(self) -> AsyncShell:
        assert self._shell is not None
        return self._shell

    def _opened_engine(self) -> Engine:
        if self._engine is None:
            raise UsageError(
                f"{self!r} has to be opened first.",
                hint="Use it in an async with block, or await session.open().",
            )
        return self._engine

    def __del__(self) -> None:
        super().__del__()
        shell = getattr(self, "_shell", None)
        if shell is not None and self._state is not FORKED:
            shell.close_from_anywhere()


def _in_thread(work: Callable[[], T]) -> asyncio.Future[Work[T]]:
    """Begin `work` in a thread of the running loop."""
    return asyncio.get_running_loop().run_in_executor(None, Work(work).do)


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
