"""What a task holds: a lease on a slot's inputs, whose replies are awaited.

Owns when such a lease begins, and that one request at a time goes out with it. Refuses
to make sessions; its own is `session_async`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from .asynchronous import AsyncShell
from .errors import LeaseBusy, LeaseExpired, ShmlaneError, UsageError
from .exchange import Answer
from .flights import Flight
from .futures import Kept, OwnedResult
from .leases import Result
from .metadata import Array
from .migration import ForeignRequest, triton_api
from .migration_leases import BaseLendingLease
from .options import RequestOptions
from .session_base import BaseSession
from .slots import Slot
from .timing import DEFAULT, Timeout

# Held while a lease begins or ends to be busy: a thread may write into its slot while
# the event loop releases it. A finaliser may release another lease meanwhile.
_parting = threading.RLock()


class AsyncHost(BaseSession):
    """What such a lease asks of its session."""

    _shell: AsyncShell | None = None

    async def _acquire(self, lease: AsyncLease, limit: float | None) -> None:
        raise NotImplementedError


class AsyncLease(BaseLendingLease):
    """The right to use one slot: fill inputs, infer, read the result in place.

    `async with session.lease() as lease`, or `lease = await session.lease()` and
    `release` in the end; until then it has no slot. Belongs to one task at a time:
    while one waits with it, it refuses everybody else.
    """

    __slots__ = ("_is_busy", "_is_left", "_limit")
    _host: AsyncHost

    def __init__(self, host: AsyncHost, limit: float | None) -> None:
        super().__init__(host)
        self._limit = limit
        # A task waits with it; whoever releases it then leaves the end to that task.
        self._is_busy = False
        self._is_left = False

    def view(self, name: str, shape: Iterable[int]) -> Array:
        """As `Lease.view`, also in a thread; see `write`."""
        with _Busy(self) as slot:
            return self._view(slot, name, shape)

    def write(self, name: str, array: Any, *, cast: bool = False) -> None:
        """As `Lease.write`, also in a thread: `asyncio.to_thread(lease.write, ...)`.

        Where the task is cancelled meanwhile, the thread goes on; until it has ended,
        the slot serves nobody else.
        """
        with _Busy(self) as slot:
            self._write(slot, name, array, cast=cast)

    async def infer(
        self, *, timeout: Timeout = DEFAULT, options: RequestOptions | None = None
    ) -> Result:
        """Send the inputs that were filled in this lease and wait for the outputs.

        As `Lease.infer`. Cancelling the task leaves the request in flight: the lease
        can be released as usual, and the slot comes back with the late reply. Where a
        connection had to be made first, the lease may have ended then.
        """
        slot, epoch, answer = await self._send(timeout, options)
        return Result(slot, epoch, answer)

    def submit(
        self, *, timeout: Timeout = DEFAULT, options: RequestOptions | None = None
    ) -> asyncio.Task[OwnedResult]:
        """Infer in a task of its own, to which the slot goes, and then to its result.

        The lease ends here. Cancelling the task is always safe.
        """
        self._check(timeout, options)
        other = AsyncLease(self._host, None)
        other._given = self._given
        other.take_over(self)
        other._slot = self._slot
        self._go_with_future()
        task = asyncio.create_task(other._own(timeout, options))
        # Also if it is cancelled before it has begun.
        task.add_done_callback(lambda _: other.release())
        return task

    async def triton_inputs(self, *, protocol: str = "http") -> list[Any]:
        """As `Lease.triton_inputs`: for the clients of `tritonclient.http.aio` too."""
        return (await self._lend_to(protocol)).inputs()

    async def triton_outputs(self, *, protocol: str = "http") -> list[Any]:
        """As `Lease.triton_outputs`."""
        return (await self._lend_to(protocol)).outputs()

    async def _lend_to(self, protocol: str) -> ForeignRequest:
        foreign = self._lent(protocol)
        if foreign is not None:
            return foreign
        slot, engine, limit = self._check(DEFAULT, None)
        shell = self._host._shell
        assert shell is not None
        shell.check_loop()
        api = triton_api(protocol)
        flight = Flight(slot, self._given, limit)
        if not flight.is_ready():
            prepare = engine.shell.make_ready
            with _Busy(self):
                await shell.run_apart(self, prepare, slot, self._given, flight.deadline)
        return ForeignRequest.begin(slot, api, engine.exchange)

    async def _own(
        self, timeout: Timeout, options: RequestOptions | None
    ) -> OwnedResult:
        slot, epoch, answer = await self._send(timeout, options)
        kept = Kept(self._host)
        kept.take_over(self)
        self._slot = None
        return OwnedResult(slot, epoch, answer, kept)

    def _submit_copies(
        self, timeout: Timeout, options: RequestOptions | None
    ) -> asyncio.Task[dict[str, Array]]:
        """As `submit`, for copies of the outputs."""
        task = asyncio.create_task(self._copy(timeout, options))
        task.add_done_callback(lambda _: self.release())
        return task

    async def _copy(
        self, timeout: Timeout, options: RequestOptions | None
    ) -> dict[str, Array]:
        return (await self.infer(timeout=timeout, options=options))._take()

    async def _send(
        self, timeout: Timeout, options: RequestOptions | None
    ) -> tuple[Slot, int, Answer]:
        slot, _, limit = self._check(timeout, options)
        shell = self._host._shell
        assert shell is not None
        shell.check_loop()
        # Whatever was read before expires, also if this fails.
        slot.epoch = epoch = slot.epoch + 1
        with _Busy(self):
            answer = await shell.infer(self, slot, self._given, limit, options)
        return slot, epoch, answer

    def _keep(self) -> Slot:
        """The slot, at which nobody else gets, nor does it go back, until `_let_go`."""
        with _parting:
            slot = self._slot
            if slot is not None and not slot.server_hold:
                self._slot = None
                self._is_busy = True
                return slot
        raise self._unusable(slot)

    def _let_go(self, slot: Slot) -> None:
        with _parting:
            self._is_busy = False
            is_left = self._is_left
            if self._hold and not is_left:
                self._slot = slot
        if is_left:
            self.release()

    async def _write_all(
        self, inputs: Mapping[str, Any], *, cast: bool, is_lent: bool = False
    ) -> None:
        """Write all inputs; in a thread where a block has to grow for one.

        is_lent: the caller waits, so that its arrays can be sent from where they lie.
        """
        write = self._lend if is_lent else self.write

        def fill() -> None:
            for name, array in inputs.items():
                write(name, array, cast=cast)

        slot, shell = self._slot, self._host._shell
        assert slot is not None
        assert shell is not None
        if all(_fits(slot, name, array) for name, array in inputs.items()):
            fill()
        else:
            await shell.run_apart(self, fill)

    async def _take(self) -> Self:
        if self._is_busy or self._slot is not None or not self._hold:
            raise UsageError(
                f"{self!r} was begun before.", hint="Take another: session.lease()."
            )
        self._is_busy = True
        try:
            await self._host._acquire(self, self._limit)
            self._begin()
        finally:
            self._is_busy = False
            # Cancelled, it may have been served before that.
            if self._is_left or self.held is not self._slot:
                self.release()
        if self._slot is None:
            raise self._unusable(None)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._take().__await__()

    async def __aenter__(self) -> Self:
        return self if self._slot is not None else await self._take()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __enter__(self) -> Self:
        if self._slot is None:
            raise self._unusable(None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the slot back; doing so again does nothing.

        As `Lease.release`. While a task waits with this lease, or a thread writes, its
        slot goes back when that has ended, and they get `LeaseExpired`.
        """
        with _parting:
            self._slot = None
            if self._is_busy:
                self._is_left = True
                return
        if self.held is not None:
            super().release()
        else:
            # One that was never begun cannot be from now on.
            self._hold.clear()

    def _unusable(self, slot: Slot | None) -> ShmlaneError:
        if self._host._why_unusable() is not None or self._is_left:
            return super()._unusable(slot)
        if self._is_busy:
            return LeaseBusy(
                "another task waits with this lease now, or a thread fills it.",
                hint="A lease belongs to one task at a time: take one for each.",
            )
        if slot is None and self._hold:
            return LeaseExpired(
                "this lease has no slot yet.",
                hint="Wait for one: async with session.lease() as lease, or"
                " lease = await session.lease().",
            )
        return super()._unusable(slot)

    def __repr__(self) -> str:
        state = "released"
        if (slot := self.held) is not None:
            state = repr(slot)
        elif self._hold:
            state = "not begun"
        return f"<AsyncLease {state}>"


class _Busy:
    """Nobody else gets at the slot of a lease; raises if it is the lease's no more."""

    __slots__ = ("_lease", "_slot")

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease

    def __enter__(self) -> Slot:
        self._slot = slot = self._lease._keep()
        return slot

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease = self._lease
        lease._let_go(self._slot)
        if kind is None and lease._slot is None:
            raise lease._unusable(None)


def _fits(slot: Slot, name: str, array: object) -> bool:
    """Whether an input can be written without a step that may wait."""
    tensor = slot.inputs.get(name)
    if tensor is None:
        return True
    if not isinstance(array, np.ndarray):
        return False
    if not tensor.is_bytes:
        return array.size * tensor.spec.dtype.itemsize <= tensor.capacity
    # How much text there is in objects is known only when it is read.
    is_bounded = array.dtype.kind in "SU"
    return is_bounded and array.nbytes + 4 * array.size <= tensor.capacity
