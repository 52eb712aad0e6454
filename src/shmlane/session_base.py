"""What every session is, whichever way its callers wait.

Owns the state of a session, and the parts of its surface that never wait: construction,
telling, and taking slots back from their leases. Refuses to wait for anything; that is
what `session` and `session_async` add.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any, NoReturn, Self, SupportsIndex

from .endpoint import Connection
from .engine import Engine
from .errors import (
    ForkedSession,
    LeaseExpired,
    NotPicklable,
    PoolClosed,
    ShmlaneError,
    UsageError,
)
from .handoff import SessionHandle, SlotRef
from .layout import Sizes
from .leases import BaseLease
from .lifetimes import Weakly, look_after
from .options import RequestOptions
from .regions import RegionOptions
from .settings import Settings
from .sharing import attached_settings
from .slots import Holder, Slot
from .stats import SessionStats
from .streams import Course
from .tensors import Tensor
from .timing import DEFAULT, Deadline, Default, Timeout, Timeouts, check_timeout


class State(Enum):
    NEW = "not open"
    OPEN = "open"
    CLOSED = "closed"
    FORKED = "open in another process"


# Asked for with each lease: to find members in their class takes five times as long.
OPEN, CLOSED, FORKED = State.OPEN, State.CLOSED, State.FORKED


class SendingLease(BaseLease):
    """A lease of a session, however its caller waits for replies.

    _parted: why it has no slot, if it gave that away; not set before that.
    """

    __slots__ = ("_parted",)
    _host: BaseSession
    _parted: str

    def _check(
        self, timeout: Timeout, options: RequestOptions | None
    ) -> tuple[Slot, Engine, float | None]:
        """What is needed to send, and for how long to wait; raises why not to send."""
        slot = self._slot
        if slot is None or slot.server_hold or ~self._given & slot.required:
            raise self._not_ready(slot)
        host = self._host
        engine = host._engine
        if engine is None or host._state is not OPEN:
            raise host._unusable()
        if options is not None and not isinstance(options, RequestOptions):
            raise UsageError(
                f"options is a {type(options).__name__}: give RequestOptions(...)."
            )
        return slot, engine, checked_limit(timeout, host._timeouts.infer)

    def detach(self) -> SlotRef:
        """Lend the slot, as it is filled, to whichever process adopts it; ends this.

        Give the reference to `Session.adopt`, in this process or another. It is good
        once, for `Timeouts.handoff` seconds; the slot comes back by itself. Raises
        `UsageError` while views of the slot are alive, or if its tensors go over the
        wire, and `LeaseExpired`, `LeaseBusy`.
        """
        slot, host = self._slot, self._host
        if slot is None or slot.server_hold or self.held is None:
            raise self._unusable(slot)
        if host._engine is None or host._state is not OPEN:
            raise host._unusable()
        viewed = [tensor.name for tensor in slot.tensors if tensor.has_views()]
        if viewed:
            raise UsageError(
                "arrays over this slot are alive, through which it could be changed"
                f" while another process has it: {', '.join(map(repr, viewed))}.",
                hint="Let go of them first (del view), or fill with lease.write.",
                tensors=viewed,
            )
        self._slot = None
        try:
            ref = host._engine.passing.hand_over(self, slot, self._given)
        except BaseException:
            # Interrupted, it may have been lent: then it comes back by itself.
            self._slot = self.held
            raise
        self._parted = "this lease was detached: its slot is for whoever adopts it."
        return ref

    def _go_with_future(self) -> None:
        self._slot = None
        self._parted = (
            "this lease was submitted: its slot went along with its future or task."
        )

    def _unusable(self, slot: Slot | None) -> ShmlaneError:
        error = super()._unusable(slot)
        why = getattr(self, "_parted", "")
        if why and type(error) is LeaseExpired:
            return LeaseExpired(why, hint=error.hint)
        return error

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refused: two leases would give back one slot."""
        raise _not_picklable(
            self,
            hint="Another process has what it adopts: give it lease.detach(), or the"
            " outputs as copies.",
        )

    def _adopt(self, engine: Engine, ref: SlotRef | str) -> None:
        given = engine.passing.adopt(ref, self)
        self._begin()
        self._given = given

    def _zero(self) -> bool:
        """Fill what has to be given with zeros; False if not every shape is known."""
        assert self._slot is not None
        inputs = self._slot.inputs.values()
        required = [each for each in inputs if not each.spec.optional]
        if any(tensor.default is None for tensor in required):
            return False
        for tensor in required:
            self[tensor.name].fill(0)
        return True


class BaseSession:
    """One model on one server: what `Session` and `AsyncSession` have in common."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        version: str = "",
        slots: int = 4,
        memory: str = "system",
        shapes: Sizes | None = None,
        outputs: Iterable[str] | Sizes | None = None,
        rerun: bool = False,
        connection: Connection | None = None,
        timeouts: Timeouts | None = None,
        region: RegionOptions | None = None,
    ) -> None:
        self._begin(
            Settings.check(
                url,
                model,
                version=version,
                slots=slots,
                memory=memory,
                shapes=shapes,
                outputs=outputs,
                rerun=rerun,
                connection=connection,
                timeouts=timeouts,
                region=region,
            )
        )

    @classmethod
    def attach(
        cls,
        handle: SessionHandle | str,
        *,
        slots: int = 1,
        connection: Connection | None = None,
        timeouts: Timeouts | None = None,
    ) -> Self:
        """A session with slots that another process shares; see `share`.

        handle: what `share` returned, or its text. slots: how many are claimed when
        this is opened, for as long as it lives; with 0 it can only `adopt`. The kernel
        gives back the claims of a process that dies. No server is asked for it: a
        process that only fills and detaches needs none.
        Raises `RegionError` where the shared slots are gone, and opening raises
        `SlotsClaimed` where too few are unclaimed.
        """
        session = cls.__new__(cls)
        session._begin(
            attached_settings(
                handle, slots=slots, connection=connection, timeouts=timeouts
            )
        )
        return session

    def _begin(self, settings: Settings) -> None:
        self._state = State.NEW
        self._engine: Engine | None = None
        self._settings = settings
        self._timeouts = settings.timeouts
        self.url = settings.url
        self.model = settings.model
        self.version = settings.version
        # Not a plain lock: a signal handler may close what its own thread opens.
        self._opening = threading.RLock()
        self._is_closing = False
        self._courses: Weakly[Course[Any, Any, Any]] = Weakly()
        look_after(self)

    # --- opening and closing ----------------------------------------------------------

    def _open_once(self) -> None:
        """Try once: between tries the lock is free, so that `close` can come in.

        Called by a signal handler of this thread, `close` comes in at any time.
        """
        with self._opening:
            if self._state is OPEN:
                return
            if self._state is not State.NEW:
                raise self._unusable()
            self._engine = Engine.open(self._settings, session=weakref.ref(self))
            self._state = OPEN
            if self._is_closing:
                self._begin_to_close()
                self._end(wait=False)
                raise self._unusable()

    def _begin_to_close(self) -> None:
        """Begin nothing new; whoever waits for a slot gets `PoolClosed`."""
        with self._opening:
            if self._state is FORKED:
                return
            self._is_closing = True
            if self._engine is not None:
                self._engine.begin_to_close()
            self._state = CLOSED

    def _end(self, *, wait: bool, kept: Collection[Slot] = ()) -> None:
        """After `_begin_to_close`: take back what is idle.

        wait: first wait for the replies of requests in flight, but those of `kept`.
        """
        if self._engine is not None and self._state is not FORKED:
            self._engine.close(wait=wait, kept=kept)

    def _end_at_exit(self) -> None:
        self._begin_to_close()
        self._end(wait=False)
        if self._engine is not None and self._state is not FORKED:
            self._engine.take_back(at_exit=True)

    def __del__(self) -> None:
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is None or self._state is FORKED:
            return
        if not engine.has_ended:
            # Of a closed one, the rest may just be on its way back.
            state = repr(self) if self._state is OPEN else ""
            self._begin_to_close()
            self._end_dropped(engine)
            if state:
                warnings.warn(
                    f"{state} was dropped without close; use it in a with block.",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )

    def _end_dropped(self, engine: Engine) -> None:
        """In a finaliser: take back what is idle."""
        engine.close(wait=False)

    # --- telling ----------------------------------------------------------------------

    @property
    def memory(self) -> str:
        """Where tensors lie: "system" or "wire", "auto" until that is decided."""
        if self._engine is None:
            return self._settings.memory
        return "system" if self._engine.memory.is_shared else "wire"

    def stats(self) -> SessionStats:
        """Counters since the session was opened, and the slots as they are now.

        After `close`: as they were when the last of it was taken back.
        """
        if self._engine is None or self._state is FORKED:
            return SessionStats()
        return self._engine.stats()

    # --- what leases ask for ----------------------------------------------------------

    def _give_back(self, lease: Holder) -> None:
        slot: Slot = lease._hold[1]
        slot.epoch += 1
        slot.leased = False
        engine = self._engine
        if slot.has_loans:
            slot.end_loans()
        if engine is None or self._state is FORKED:
            return
        if slot.server_hold and not slot.is_shared:
            engine.give_up(slot)
        if slot.server_hold:
            engine.receiver.take_over(lease)
        elif slot.is_borrowed:
            engine.borrower.release(lease)
        else:
            engine.pool.release(lease)
        if self._state is CLOSED:
            self._take_back(engine)

    def _take_back(self, engine: Engine) -> None:
        """End what the last lease of a closed session has let go of."""
        engine.take_back()

    def _grow(self, slot: Slot, tensor: Tensor, nbytes: int) -> None:
        if self._engine is None or self._state is not OPEN:
            raise self._unusable()
        self._engine.memory.grow(slot, tensor, nbytes)

    # --- state ------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refused: the end of a copy would be the end of this session's memory."""
        raise _not_picklable(
            self,
            hint="Open one in each process, or give it session.share() and"
            " Session.attach.",
        )

    def _disown(self) -> None:
        """In a forked child: memory and connections belong to the parent."""
        # Another thread of the parent may have held it; it does not exist here.
        self._opening = threading.RLock()
        if self._engine is not None and not self._engine.has_ended:
            self._state = FORKED
            self._engine.disown()
            for course in self._courses:
                course.disown()

    def _why_unusable(self) -> ShmlaneError | None:
        """Why leases cannot be used, if the session is the reason."""
        return self._unusable() if self._state is FORKED else None

    def _unusable(self) -> ShmlaneError:
        if self._state is FORKED:
            return ForkedSession(
                "this session was opened before a fork; its memory and connections"
                " belong to the parent process.",
                hint="Open a session of its own in each process, after the fork.",
            )
        return PoolClosed(
            f"the session for {self.model!r} is closed.",
            hint="Open a new one, or close it later.",
        )

    def __repr__(self) -> str:
        state = self._state.value
        slots = ""
        if self._engine is not None and self._state is OPEN:
            slots = f", memory {self.memory!r}, {self._engine.pool!r}"
        name = type(self).__name__
        return f"<{name} {self.model!r} at {self.url} {state}{slots}>"


def _not_picklable(what: BaseSession | BaseLease, *, hint: str) -> NotPicklable:
    name = type(what).__name__
    article = "an" if name.startswith("A") else "a"
    return NotPicklable(
        f"{article} {name} cannot be pickled or copied: its memory and connections"
        " belong to this process.",
        hint=hint,
    )


def checked_limit(timeout: Timeout, default: float | None = None) -> float | None:
    """The limit that was given, else `default`; `UsageError` if it is none."""
    return default if isinstance(timeout, Default) else check_timeout(timeout)


def one_deadline(timeout: Timeout) -> Deadline | None:
    """One for all parts of a call; None where each part is to have its own limit."""
    return None if timeout is DEFAULT else Deadline(checked_limit(timeout))


def time_left(deadline: Deadline | None) -> Timeout:
    """What of `one_deadline` is left for the next part."""
    return DEFAULT if deadline is None else deadline.remaining


def checked_inputs(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the short form was given; `UsageError` if it has no names."""
    if isinstance(inputs, Mapping):
        return inputs
    raise UsageError(f"inputs is a {type(inputs).__name__}: give {{name: array}}.")
