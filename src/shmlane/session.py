"""The blocking session: one model on one server, from any number of threads.

Owns what callers may do when, and what they get. Refuses to make and to end what a
session consists of (`engine`), to decide what a reply means (`exchange`) and who gets a
slot (`pool`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar, overload

from .blocking import BlockingShell
from .engine import Engine
from .errors import LeaseTimeout, ModelNotReady, ServerUnreachable
from .frames import values_in
from .handoff import SessionHandle, SlotRef
from .lease_blocking import Lease
from .leases import Result
from .metadata import Array, ModelMetadata
from .options import RequestOptions
from .outcomes import Progress, Stream
from .session_base import (
    OPEN,
    BaseSession,
    checked_inputs,
    checked_limit,
    one_deadline,
    time_left,
)
from .settings import checked_count
from .slots import Slot
from .stream_plan import StreamPlan
from .streams import Course
from .tensors import COUNTS_ARE_EXACT
from .timing import DEFAULT, Deadline, Timeout, check_timeout

I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")

_OPEN_PAUSE = 0.05


class Session(BaseSession):
    """Shared memory and connections for one model on one server.

    url: `host:port`, `http://host:port`, or `unix:///path/http.sock`.
    slots: how many requests can be prepared or in flight at once; each has its memory
        and its connection.
    memory: "system" for shared memory; "wire" to send tensors with the requests, as to
        a server on another machine; "auto" for shared memory where the server sees it,
        else the wire, with one `WireFallback` warning that says why.
    shapes: largest shape of inputs whose dimensions the model leaves open; for BYTES
        the most bytes, 4 for each element included. Without it they grow as needed.
    outputs: names of the outputs wanted (all if None), or their largest shapes (BYTES:
        bytes) by name. An output of unknown size comes over the wire, until a call with
        inputs of these shapes has told its size.
    rerun: where an output did not fit its block after all, run the model once more
        instead of `InferFailed`. Never done within a sequence.

    Construction does nothing; `open`, `with` or the first use does. Thread-safe, but a
    lease belongs to one thread at a time. An open session cannot be used in a forked
    child. Raises `UsageError` for arguments that cannot work.
    """

    # --- opening and closing ----------------------------------------------------------

    def open(self, *, wait: float | None = 0.0) -> Session:
        """Ask for the model, make the memory, register it. Opening twice does nothing.

        wait: seconds to keep trying while the server cannot be reached or the model is
        loading, beyond `Timeouts.connect` for connecting once; None for ever. Returns
        the session. Raises `ServerUnreachable`, `ModelNotReady`,
        `OutOfSharedMemory`, `RegionNotVisible`, `SharedMemoryDisabled`, `UsageError`;
        nothing is left behind then.
        """
        deadline = Deadline(check_timeout(wait, "wait"))
        while True:
            try:
                self._open_once()
                return self
            except (ServerUnreachable, ModelNotReady) as error:
                if not error.retryable or deadline.has_passed:
                    raise
            time.sleep(_OPEN_PAUSE)

    def close(self, *, wait: bool = True) -> None:
        """Hand out no more leases, unregister, remove the memory. Twice does nothing.

        wait: first wait for the replies of requests in flight, for at most
        `Timeouts.infer` seconds; in the callback of a future it does not wait. Views
        that are still alive stay valid; leases still held can only be released, which
        takes back the rest. Where the server does not answer, the memory stays until
        the next session or `shmlane clean`, so that it can be unregistered then. An
        interrupted close is finished by another. In a signal handler, the inference
        that it interrupts goes on afterwards; a stream ends with `PoolClosed`.
        """
        # In a signal handler, amid the inference of this thread, which goes on then.
        kept: list[Slot] = values_in(BlockingShell.infer, "slot")
        for course in self._courses if wait else ():
            kept += course.leave(kept)
        self._begin_to_close()
        self._end(wait=wait, kept=kept)

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- use --------------------------------------------------------------------------

    @property
    def metadata(self) -> ModelMetadata:
        """What the server says about the model; opens the session if need be."""
        return self._ensure_open().metadata

    def lease(self, *, timeout: Timeout = DEFAULT) -> Lease:
        """A free slot for this caller, waiting for at most `timeout` seconds.

        `Timeouts.lease` if not given, None for ever. Callers are served in turn. Raises
        `LeaseTimeout`, `PoolClosed`, and what `open` raises.
        """
        engine = self._engine
        if engine is None or self._state is not OPEN:
            engine = self._ensure_open()
        limit = self._timeouts.lease
        if timeout is not DEFAULT:
            limit = checked_limit(timeout)
        lease = Lease(self)
        try:
            engine.pool.acquire(lease, limit)
        except LeaseTimeout as error:
            engine.receiver.nudge()
            self._tell_of_streams(error)
            raise
        # As `_begin`, without its call.
        lease._slot = slot = lease._hold[1]
        slot.leased = True
        if not COUNTS_ARE_EXACT:
            slot.renew_arrays()
        return lease

    def _tell_of_streams(self, error: LeaseTimeout) -> None:
        """What a loop over a stream waits for comes only as the loop goes on."""
        if held := sum(course.held_by_this_thread for course in self._courses):
            slots = self._settings.slots
            few = f"stream(..., in_flight={slots - 1})"
            error.hint = (
                f"This thread is in a loop over a stream, which has {held} of them in"
                " flight until its next result is asked for: leave some for others,"
                f" {few if slots > 1 else 'Session(..., slots=2) and in_flight=1'}."
            )

    def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout: Timeout = DEFAULT,
        cast: bool = False,
        options: RequestOptions | None = None,
    ) -> dict[str, Array]:
        """The short form: copy inputs in, infer, copy outputs out.

        timeout: seconds for all of it, waiting for a slot included; if not given, the
        session's limits hold for each part. cast: allow any conversion of datatypes
        that NumPy knows. options: see `Lease.infer`. Over the wire, contiguous arrays
        are sent from where they lie. Raises what `lease`, `write` and `Lease.infer`
        raise.
        """
        checked_inputs(inputs)
        deadline = one_deadline(timeout)
        with self.lease(timeout=time_left(deadline)) as lease:
            for name, array in inputs.items():
                lease._lend(name, array, cast=cast)
            result = lease.infer(timeout=time_left(deadline), options=options)
            return result._take()

    def submit(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout: Timeout = DEFAULT,
        cast: bool = False,
        options: RequestOptions | None = None,
    ) -> Future[dict[str, Array]]:
        """As `infer`, with a future in the place of the outputs; see `Lease.submit`.

        The inputs are copied before this returns. It waits for a free slot as `lease`
        does: no more requests are in flight than there are slots.
        """
        deadline = one_deadline(timeout)
        with self.lease(timeout=time_left(deadline)) as lease:
            for name, array in checked_inputs(inputs).items():
                lease.write(name, array, cast=cast)
            return lease._submit_copies(time_left(deadline), options)

    @overload
    def stream(
        self,
        items: Iterable[I],
        *,
        write: Callable[[Lease, I], object] | None = None,
        read: None = None,
        in_flight: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> Stream[dict[str, Array]]: ...
    @overload
    def stream(
        self,
        items: Iterable[I],
        *,
        write: Callable[[Lease, I], object] | None = None,
        read: Callable[[I, Result], R],
        in_flight: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> Stream[R]: ...
    def stream(
        self,
        items: Iterable[I],
        *,
        write: Callable[[Lease, I], object] | None = None,
        read: Callable[[I, Result], Any] | None = None,
        in_flight: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        workers: int = 0,
        progress: Progress | None = None,
        timeout: Timeout = DEFAULT,
        options: RequestOptions | None = None,
    ) -> Stream[Any]:
        """Infer for each of `items`, with many requests in flight, from this thread.

        items: any iterable, also without an end: no more are fetched than are needed.
        write: fills a lease from an item; by default items are {name: array}.
        read: makes of an item and its Result, which expires then, what is handed out;
            by default copies of all outputs, {name: array}.
        in_flight: how many requests at once; by default as many as there are slots.
        ordered: hand out results in the order of the items, else as they come.
        return_exceptions: hand out errors in the place of results. Otherwise the first
            one is raised when its turn comes, and ends the stream.
        workers: so many threads run `write` and `read`, for preprocessing that takes
            time without the GIL; with 0 this thread does.
        progress: called as progress(done, total) with each result; total is None where
            items have no length.
        timeout: seconds for each inference, from the moment that its inputs are filled.

        Requests are sent and replies read while results are asked for, and at no other
        time: for slots to use meanwhile, leave some with in_flight. Leaving the loop
        early, or `close`, leaves the slots in flight to come back with their late
        replies. Streams in several threads get as many slots as each other. Raises
        `UsageError`, and what `lease`, `write`, `read` and `Lease.infer` raise.
        """
        plan = StreamPlan(
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
        limit = checked_limit(timeout, self._timeouts.infer)
        engine = self._ensure_open()
        course = Course(
            plan,
            items,
            self,
            engine.shell,
            engine.exchange,
            engine.fairness,
            limit=limit,
        )
        self._courses.add(course)
        return Stream(course.run(), plan.outcomes)

    def _take_lease(self, *, wait: bool) -> Lease | None:
        """A lease for a stream; None if there is none at once and it must not wait."""
        if wait:
            return self.lease()
        engine = self._engine
        if engine is None or self._state is not OPEN:
            engine = self._ensure_open()
        lease = Lease(self)
        if not engine.pool.take(lease):
            return None
        # As `_begin`, without its call.
        lease._slot = slot = lease._hold[1]
        slot.leased = True
        if not COUNTS_ARE_EXACT:
            slot.renew_arrays()
        return lease

    def _next_lease(self, lease: Lease, fetch: Callable[[], bool]) -> Lease | None:
        """End `lease` and take the next one, for what `fetch` finds to be done.

        While it looks, the slot is anybody's. None where there is nothing to do, or no
        slot at once. Most streams get the same one back, from the cache.
        """
        slot, engine = lease._slot, self._engine
        if (
            slot is None
            or engine is None
            or self._state is not OPEN
            or slot.server_hold
            or slot.has_loans
        ):
            lease.release()
        else:
            # As `release`, without its calls.
            lease._slot = None
            slot.epoch += 1
            slot.leased = False
            engine.pool.release(lease)
            if self._state is not OPEN:
                self._take_back(engine)
        return self._take_lease(wait=False) if fetch() else None

    def share(self, *, slots: int | None = None) -> SessionHandle:
        """Make slots beside those of this session, for processes that attach.

        slots: how many, as many as this session has if not given. They live as long as
        any session that shares, has claimed or has adopted one of them. Raises what
        `open` raises.
        """
        engine = self._ensure_open()
        count = self._settings.slots if slots is None else slots
        return engine.passing.share(checked_count(count))

    def adopt(self, ref: SlotRef | str) -> Lease:
        """The lease of a slot that was detached, by any session with this model.

        ref: what `detach` returned, or its text.
        Its inputs are as they were filled; they can be changed, and more be filled.
        Released or detached, it goes back or on. Raises `HandoffExpired`, and
        `UsageError` for slots of another server or model.
        """
        engine = self._ensure_open()
        lease = Lease(self)
        lease._adopt(engine, ref)
        return lease

    def warmup(self) -> None:
        """Connect every free slot, and run the model once on each with zeros.

        Slots of models whose input shapes are not known yet are only connected. Raises
        what `infer` raises.
        """
        engine = self._ensure_open()
        leases: list[Lease] = []
        try:
            while engine.pool.take(lease := Lease(self)):
                leases.append(lease)
                lease._begin()
            for lease in leases:
                self._warm(engine, lease)
        finally:
            for lease in leases:
                lease.release()

    def _warm(self, engine: Engine, lease: Lease) -> None:
        if lease._zero():
            lease.infer()
            return
        assert lease._slot is not None
        engine.shell.make_ready(lease._slot, 0, Deadline(self._timeouts.infer))

    def _ensure_open(self) -> Engine:
        if self._state is not OPEN:
            self.open()
        assert self._engine is not None
        return self._engine
