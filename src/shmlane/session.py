"""The blocking session: one model on one server, from any number of threads.

Owns opening, closing and what callers may do when. Refuses to talk to the server itself
(`blocking`), to decide what a reply means (`exchange`) and who gets a slot (`pool`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any

from . import control
from .blocking import BlockingShell, run
from .errors import (
    ForkedSession,
    LeaseTimeout,
    ModelNotReady,
    PoolClosed,
    ServerUnreachable,
    ShmlaneError,
    UsageError,
)
from .exchange import Exchange
from .inventory import clean_up
from .layout import Array, ModelMetadata, SlotLayout
from .leases import BaseLease, Result
from .memory import SessionMemory
from .pool import SlotPool
from .receiver import Receiver
from .regions import RegionOptions
from .slots import Channel, Holder, Label, Slot, Tensor
from .stats import SessionStats
from .timing import DEFAULT, Deadline, Default, Timeout, Timeouts, check_timeout
from .transport import Connection, Endpoint
from .wire import HttpRequests

_OPEN_PAUSE = 0.05
_CLOSE_PAUSE = 0.002
_CLEAN_LIMIT = 0.5


class _State(Enum):
    NEW = "not open"
    OPEN = "open"
    CLOSED = "closed"
    FORKED = "open in another process"


class Lease(BaseLease):
    """The right to use one slot: fill inputs, infer, read the result in place."""

    __slots__ = ()
    _host: Session

    def infer(self, *, timeout: Timeout = DEFAULT) -> Result:
        """Send the inputs that were filled in this lease and wait for the outputs.

        timeout: seconds for this call, `Timeouts.infer` if not given, None for ever.
        A second call sends the same inputs again unless they were changed; the earlier
        Result expires. Raises `InputMissing`, `InferTimeout`, `RequestLost`,
        `ServerUnreachable`, `ModelNotReady`, `InferFailed`. After each of them the
        lease can be released as usual, and the slot comes back by itself.
        """
        slot = self._slot
        given = self._given
        if slot is None or slot.server_hold or given & slot.required != slot.required:
            raise self._not_ready(slot)
        host = self._host
        if host._state is not _State.OPEN:
            raise host._unusable()
        limit = host._timeouts.infer if timeout is DEFAULT else _limit(timeout)
        # Whatever was read before expires, also if this fails.
        slot.epoch = epoch = slot.epoch + 1
        return Result(slot, epoch, host._shell.infer(slot, given, limit))


class Session:
    """Shared memory and connections for one model on one server.

    url: `host:port`, `http://host:port`, or `unix:///path/http.sock`.
    slots: how many requests can be prepared or in flight at once; each has its memory
        and its connection.
    shapes: largest shape of inputs whose dimensions the model leaves open.
    outputs: names of the outputs wanted (all if None), or their largest shapes by name.
        Outputs of unknown size come over the wire.

    Construction does nothing; `open`, `with` or the first use does. Thread-safe, but a
    lease belongs to one thread at a time. An open session cannot be used in a forked
    child. Raises `UsageError` for arguments that cannot work.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        version: str = "",
        slots: int = 4,
        shapes: Mapping[str, Iterable[int]] | None = None,
        outputs: Iterable[str] | Mapping[str, Iterable[int]] | None = None,
        connection: Connection | None = None,
        timeouts: Timeouts | None = None,
        region: RegionOptions | None = None,
    ) -> None:
        self._state = _State.NEW
        _check_types(
            url=(url, str),
            model=(model, str),
            shapes=(shapes, Mapping),
            connection=(connection, Connection),
            timeouts=(timeouts, Timeouts),
            region=(region, RegionOptions),
        )
        self._slot_count = _checked_count(slots)
        self.url = url
        self.model = model
        # A number is what most people write.
        self.version = str(version)
        self._shapes = shapes
        self._outputs = outputs
        self._timeouts = timeouts or Timeouts()
        self._region_options = region or RegionOptions()
        self._connection = connection or Connection()
        self._endpoint = Endpoint.parse(url)
        self._requests = HttpRequests(
            self._endpoint.host_header,
            model,
            version=self.version,
            headers=self._connection.headers,
        )
        self._opening = threading.Lock()
        # A finaliser may take back a slot while the same thread takes back others.
        self._closing = threading.RLock()
        self._remains: set[Slot] = set()
        self._is_known = False
        self._last_stats = SessionStats()
        self._shell = BlockingShell(
            self._endpoint, self._requests, self._connection, self._timeouts
        )
        _sessions.add(self)

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
                # Let go of between tries, so that `close` can come in.
                with self._opening:
                    self._open_once()
                return self
            except (ServerUnreachable, ModelNotReady) as error:
                if not error.retryable or deadline.has_passed:
                    raise
            time.sleep(_OPEN_PAUSE)

    def _open_once(self) -> None:
        if self._state is _State.OPEN:
            return
        if self._state is not _State.NEW:
            raise self._unusable()
        self._open()

    def _open(self) -> None:
        headers = {self.url: self._connection.headers}
        clean_up(limit=_CLEAN_LIMIT, headers=headers, only=self.url)
        deadline = Deadline(self._timeouts.infer)
        with contextlib.ExitStack() as undo:
            channel = self._shell.connect(deadline)
            undo.callback(channel.close)
            talk = control.discover(self._requests, self.model, version=self.version)
            metadata = run(talk, channel, deadline)
            layout = SlotLayout.plan(
                metadata, shapes=self._shapes, outputs=self._outputs
            )
            memory = SessionMemory(
                layout,
                options=self._region_options,
                server=self.url,
                model=self.model,
            )
            undo.callback(memory.close)
            slots = memory.make_slots(self._slot_count)
            undo.callback(self._undo, memory, slots, channel)
            for slot in slots:
                self._shell.register(slot, channel, deadline)
            undo.pop_all()
        # The slot that is handed out first inherits the connection.
        slots[0].channel = channel
        self._start(metadata, memory, slots)

    def _start(
        self, metadata: ModelMetadata, memory: SessionMemory, slots: Sequence[Slot]
    ) -> None:
        self._metadata = metadata
        self._memory = memory
        exchange = Exchange(self._requests, metadata)
        self._shell.start(exchange, memory)
        # Nothing here refers back to the session: dropping it ends it at once.
        spare = functools.partial(memory.make_slots, self._slot_count)
        self._pool = SlotPool(slots, spare=spare)
        self._receiver = Receiver(
            exchange,
            self._endpoint,
            session=weakref.ref(self),
            give_back=self._pool.put_back,
            move_outputs=memory.move_outputs,
            retire=functools.partial(_replace, self._pool, memory),
        )
        self._state = _State.OPEN

    def close(self, *, wait: bool = True) -> None:
        """Hand out no more leases, unregister, remove the memory. Twice does nothing.

        wait: first wait for the replies of requests in flight, for at most
        `Timeouts.infer` seconds. Views that are still alive stay valid; leases still
        held can only be released, which takes back the rest. Where the server does not
        answer, the memory stays until the next session or `shmlane clean`, so that it
        can be unregistered then. An interrupted close is finished by another.
        """
        with self._opening:
            if self._state is _State.OPEN:
                self._remains = set(self._pool.slots)
            if self._state is not _State.FORKED:
                self._state = _State.CLOSED
            if not self._remains:
                return
        self._shell.is_closed = True
        self._pool.close()
        try:
            if wait:
                self._wait_for({Label.IN_FLIGHT, Label.LATE}, self._timeouts.infer)
                # Lost requests are only waited for to leave no registration behind.
                self._wait_for({Label.LOST}, self._timeouts.connect)
        finally:
            # A slot whose reply it has just seen is given back before this returns.
            self._receiver.stop()
            self._take_back()

    def _take_back(self, *, at_exit: bool = False) -> None:
        """Unregister and remove what nobody uses any more of a closed session.

        Slots that a lease still holds are left to whoever gives them back, which no
        thread that waits for a reply does any more when the interpreter ends. A server
        that may still know of a region keeps it, and nobody could tell any more whose
        it was: then the files stay as if this process had died, for the next session or
        `clean` to end both.
        """
        with self._closing:
            held = [
                slot
                for slot in self._remains
                if slot.server_hold and (at_exit or not slot.leased)
            ]
            self._last_stats = self._collect_stats()
            slots = [*self._remains.intersection(self._pool.take_all()), *held]
            if not self._shell.unregister(slots):
                self._is_known = True
            for slot in slots:
                slot.close(leave=self._is_known)
            self._remains.difference_update(slots)
            if not self._remains:
                self._memory.close(leave=self._is_known)
                _sessions.discard(self)
            if not self._is_known:
                self._shell.unregister_doubtful(slots)

    def _undo(
        self, memory: SessionMemory, slots: Sequence[Slot], channel: Channel
    ) -> None:
        """Take back what a failed opening has made."""
        leave = not self._shell.unregister(slots, channel)
        for slot in slots:
            slot.close(leave=leave)
        memory.close(leave=leave)
        if not leave:
            self._shell.unregister_doubtful(slots)

    def _wait_for(self, labels: set[Label], limit: float | None) -> None:
        """Wait until no slot has one of these labels."""
        deadline = Deadline(limit)
        while not deadline.has_passed:
            if not any(slot.label in labels for slot in self._pool.slots):
                return
            time.sleep(_CLOSE_PAUSE)

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        is_open = getattr(self, "_state", None) is _State.OPEN
        if is_open or getattr(self, "_remains", None):
            state = repr(self)
            self.close(wait=False)
            warnings.warn(
                f"{state} was dropped without close; use it in a with block.",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # --- use --------------------------------------------------------------------------

    @property
    def metadata(self) -> ModelMetadata:
        """What the server says about the model; opens the session if need be."""
        self._ensure_open()
        return self._metadata

    def lease(self, *, timeout: Timeout = DEFAULT) -> Lease:
        """A free slot for this caller, waiting for at most `timeout` seconds.

        `Timeouts.lease` if not given, None for ever. Callers are served in turn. Raises
        `LeaseTimeout`, `PoolClosed`, and what `open` raises.
        """
        if self._state is not _State.OPEN:
            self._ensure_open()
        limit = self._timeouts.lease if timeout is DEFAULT else _limit(timeout)
        lease = Lease(self)
        try:
            self._pool.acquire(lease, limit)
        except LeaseTimeout:
            self._receiver.nudge()
            raise
        # As `_begin`, without its call.
        lease._slot = slot = lease._hold[1]
        slot.leased = True
        return lease

    def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout: Timeout = DEFAULT,
        cast: bool = False,
    ) -> dict[str, Array]:
        """The short form: copy inputs in, infer, copy outputs out.

        timeout: seconds for all of it, waiting for a slot included; if not given, the
        session's limits hold for each part. cast: allow any conversion of datatypes
        that NumPy knows. Raises what `lease`, `write` and `Lease.infer` raise.
        """
        if not isinstance(inputs, Mapping):
            raise UsageError(
                f"inputs is a {type(inputs).__name__}: give {{name: array}}."
            )
        deadline = None if timeout is DEFAULT else Deadline(_limit(timeout))
        with self.lease(
            timeout=DEFAULT if deadline is None else deadline.remaining
        ) as lease:
            for name, array in inputs.items():
                lease.write(name, array, cast=cast)
            left = DEFAULT if deadline is None else deadline.remaining
            return lease.infer(timeout=left).copy()

    def warmup(self) -> None:
        """Connect every free slot, and run the model once on each with zeros.

        Slots of models whose input shapes are not known yet are only connected. Raises
        what `infer` raises.
        """
        self._ensure_open()
        leases: list[Lease] = []
        try:
            while self._pool.take(lease := Lease(self)):
                leases.append(lease)
                lease._begin()
            for lease in leases:
                self._warm(lease)
        finally:
            for lease in leases:
                lease.release()

    def _warm(self, lease: Lease) -> None:
        slot = lease._slot
        assert slot is not None
        required = [each for each in slot.inputs.values() if not each.spec.optional]
        if any(tensor.default is None for tensor in required):
            self._shell.make_ready(slot, 0, Deadline(self._timeouts.infer))
            return
        for tensor in required:
            lease[tensor.name].fill(0)
        lease.infer()

    def stats(self) -> SessionStats:
        """Counters since the session was opened, and the slots as they are now.

        After `close`: as they were when the last of it was taken back.
        """
        if self._state is _State.OPEN or self._remains:
            return self._collect_stats()
        return self._last_stats

    def _collect_stats(self) -> SessionStats:
        return SessionStats.collect(
            self._pool,
            self._memory,
            self._receiver,
            connections=self._shell.connections,
            registrations=self._shell.registrations,
            retries=self._shell.retries,
        )

    # --- what leases ask for ----------------------------------------------------------

    def _give_back(self, lease: Holder) -> None:
        slot: Slot = lease._hold[1]
        slot.epoch += 1
        slot.leased = False
        if self._state is _State.FORKED:
            return
        if not slot.server_hold:
            self._pool.release(lease)
        else:
            lease._hold.pop()
            self._receiver.watch(slot)
        if self._state is _State.CLOSED:
            self._take_back()

    def _grow(self, slot: Slot, tensor: Tensor, nbytes: int) -> None:
        if self._state is not _State.OPEN:
            raise self._unusable()
        self._memory.grow(slot, tensor, nbytes)

    # --- state ------------------------------------------------------------------------

    def _ensure_open(self) -> None:
        if self._state is not _State.OPEN:
            self.open()

    def _why_unusable(self) -> ShmlaneError | None:
        """Why leases cannot be used, if the session is the reason."""
        return self._unusable() if self._state is _State.FORKED else None

    def _unusable(self) -> ShmlaneError:
        if self._state is _State.FORKED:
            return ForkedSession(
                "this session was opened before a fork; its memory and connections"
                " belong to the parent process.",
                hint="Open a session of its own in each process, after the fork.",
            )
        return PoolClosed(f"the session for {self.model!r} is closed.")

    def __repr__(self) -> str:
        state = self._state.value
        slots = f", {self._pool!r}" if self._state is _State.OPEN else ""
        return f"<Session {self.model!r} at {self.url} {state}{slots}>"


def _replace(pool: SlotPool, memory: SessionMemory, slot: Slot) -> None:
    """Put new memory in the place of a slot that must never be used again."""
    # Without room for it the slot stays lost, which the counters show.
    with contextlib.suppress(ShmlaneError):
        pool.replace(slot, memory.make_slots(1)[0])


def _check_types(**arguments: tuple[object, type]) -> None:
    """A mistake in the constructor must not be met later and elsewhere."""
    for name, (value, wanted) in arguments.items():
        is_missing = value is None and name not in ("url", "model")
        if not is_missing and not isinstance(value, wanted):
            raise UsageError(
                f"{name}={value!r} must be a {wanted.__name__}, not a"
                f" {type(value).__name__}."
            )


def _checked_count(slots: int) -> int:
    try:
        count = operator.index(slots)
    except TypeError:
        count = 0
    if count < 1:
        raise UsageError(f"slots={slots!r}: a session needs one slot or more.")
    return count


def _limit(timeout: Timeout) -> float | None:
    assert not isinstance(timeout, Default)
    return check_timeout(timeout)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for session in list(_sessions):
        # One that cannot be closed is no reason to leave the others open.
        with contextlib.suppress(Exception):
            session.close(wait=False)
            if session._remains:
                session._take_back(at_exit=True)


def _disown_in_child() -> None:
    for session in list(_sessions):
        # Another thread of the parent may have held them; it does not exist here.
        session._opening = threading.Lock()
        session._closing = threading.RLock()
        if session._state is _State.OPEN:
            session._state = _State.FORKED
            for slot in session._pool.slots:
                _disown(slot)


def _disown(slot: Slot) -> None:
    """Refuse every use of a slot in a forked child; shared memory is not touched."""
    slot.server_hold = True
    slot.epoch += 1
    # A copy of a descriptor would keep the connection up when the parent closes it.
    if slot.channel is not None:
        slot.channel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_in_child)
