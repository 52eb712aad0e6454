"""Waiting in blocking code: one inference with everything that may come in between.

Owns the send, the receive and the retries of a blocking session. Refuses to decide what
a reply means (`exchange`) and to know how servers differ (`control`). Thread-safe, as
long as a slot belongs to one caller.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from . import control
from .calls import ServerCalls, in_time_of
from .errors import (
    InferFailed,
    InferTimeout,
    RequestLost,
    ServerUnreachable,
    ShmlaneError,
)
from .exchange import Answer, Exchange, Verdict, closed_meanwhile
from .flights import SMALL_BYTES, Flight
from .memory import SessionMemory
from .options import RequestOptions
from .requests import repeats_id
from .slots import Channel, Slot
from .timing import Deadline, in_seconds, no_time_left

# A connection found dead, or a registration found gone, is made anew and the request
# sent again. Neither happens twice in a row unless the server is in trouble, so that
# each further try waits longer.
_ATTEMPTS = range(5)
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.25
STEP_PAUSE = 0.002


class Step(NamedTuple):
    """One step of a sequence: the slot that it was sent from, and as what.

    flight: what may have to send it again, None once that is gone.
    """

    slot: Slot
    epoch: int
    flight: Callable[[], Flight | None]

    @property
    def is_pending(self) -> bool:
        """Whether its caller does not wait and no reply has come."""
        flight = self.flight()
        if flight is not None and not flight.is_over:
            return True
        # Releasing the lease changes the epoch once, the next inference once more.
        return self.slot.server_hold and self.slot.epoch <= self.epoch + 1

    @property
    def is_over(self) -> bool:
        return self.slot.epoch > self.epoch and not self.is_pending


class BlockingShell:
    """Carries out what `exchange` decides, and waits.

    retries, reruns: counters for `SessionStats`.
    """

    def __init__(
        self,
        calls: ServerCalls,
        exchange: Exchange,
        memory: SessionMemory,
        *,
        replay: bool,
    ) -> None:
        self.retries = 0
        self.reruns = 0
        self._calls = calls
        self._exchange = exchange
        self._memory = memory
        self._replay = replay
        self._steps: dict[int | str, Step] = {}
        self._noting_steps = threading.Lock()

    # --- one inference ----------------------------------------------------------------

    def infer(
        self,
        slot: Slot,
        given: int,
        limit: float | None,
        options: RequestOptions | None = None,
    ) -> Answer:
        """Send and receive; whatever is raised, the slot's holds tell the truth."""
        # Whoever needs a deadline makes it of these: most calls need none.
        begun = time.monotonic()
        if limit == 0:
            raise no_time_left(limit)
        if options is not None and options.has_sequence:
            self._await_last_step(slot, options, Deadline(limit, begun))
        replayed = False
        for attempt in _ATTEMPTS:
            channel = slot.channel
            prepared = slot.prepared
            wait = limit
            if (
                prepared is None
                or prepared.given != given
                or prepared.options is not options
                or channel is None
                or not channel.is_quiet
            ):
                deadline = Deadline(limit, begun)
                channel = self.make_ready(slot, given, deadline, options)
                wait = deadline.remaining
            outcome = self._round_trip(
                slot, channel, wait, limit, begun, self._replay and not replayed
            )
            if isinstance(outcome, Answer):
                return outcome
            verdict = outcome
            self._prepare_retry(slot, verdict, attempt)
            replayed = replayed or verdict is Verdict.REPLAY
        raise _gave_up(verdict)

    def _round_trip(
        self,
        slot: Slot,
        channel: Channel,
        wait: float | None,
        limit: float | None,
        begun: float,
        may_replay: bool,
    ) -> Answer | Verdict:
        exchange = self._exchange
        try:
            request = exchange.begin(slot)
            prepared = slot.prepared
            assert prepared is not None
            if prepared.wire_inputs or len(request) > SMALL_BYTES:
                # No name for the parts: an error would hold what they lie in.
                is_sent = channel.send_parts(
                    prepared.parts(request), Deadline(limit, begun)
                )
            else:
                is_sent = channel.send(request)
            if not is_sent:
                exchange.withdraw(slot)
                return Verdict.SEND_AGAIN
            data = channel.receive(wait)
            answer = exchange.matches(slot, data)
            if answer is not None:
                return answer
            reply = channel.finish(data, Deadline(limit, begun))
            return exchange.accept(slot, reply, data)
        except InferTimeout:
            if not channel.is_open:
                # The last byte never left.
                exchange.withdraw(slot)
            # Else the reply may still come, and then frees the slot.
            raise
        except RequestLost:
            channel.close()
            # A step of a sequence that has run must not run again.
            may_replay = may_replay and not slot.is_step
            if may_replay and self._is_drained(slot, Deadline(limit, begun)):
                return Verdict.REPLAY
            raise
        except BaseException:
            # An error, which may come twice and names no id; a reply that cannot be
            # trusted; or Ctrl-C, after which nobody knows whether a reply was read.
            channel.close()
            raise

    def _await_last_step(
        self,
        slot: Slot,
        options: RequestOptions,
        deadline: Deadline,
        flight: Flight | None = None,
    ) -> None:
        while not self.begin_step(slot, options, deadline, flight):
            time.sleep(STEP_PAUSE)

    def begin_step(
        self,
        slot: Slot,
        options: RequestOptions,
        deadline: Deadline,
        flight: Flight | None = None,
    ) -> bool:
        """Whether this step of a sequence may be sent now; it is the last step then.

        It may not overtake one that is unanswered, whose caller gave up or did not
        wait: the reply to that tells that the server has taken it; nor `flight`, which
        may be sent more than once. Raises `InferTimeout` when the deadline has passed
        meanwhile.
        """
        sequence = options.sequence_id
        # A sequence that begins anew has nothing to wait for.
        last = None if options.sequence_start else self._steps.get(sequence)
        if last is not None and last.is_pending:
            if deadline.has_passed:
                raise _too_early(sequence, deadline)
            return False
        with self._noting_steps:
            self._steps[sequence] = Step(slot, slot.epoch, _reference(flight))
            # Steps that were answered are of no interest any more.
            for other in [key for key, step in self._steps.items() if step.is_over]:
                del self._steps[other]
        return True

    def launch(
        self, flight: Flight, problem: Verdict | RequestLost | None = None
    ) -> None:
        """Send what is not waited for here; waits only to make it ready.

        problem: why it has to be sent again. Raises what ends the request.
        """
        slot, options = flight.slot, flight.options
        if flight.limit == 0:
            raise no_time_left(flight.limit)
        if problem is not None:
            self.repair(flight, problem)
        else:
            if options is not None and options.has_sequence:
                self._await_last_step(slot, options, flight.deadline, flight)
            if not flight.is_ready():
                self.make_ready(slot, flight.given, flight.deadline, options)
        while not flight.send(self._exchange):
            self.repair(flight, Verdict.SEND_AGAIN)

    def repair(self, flight: Flight, problem: Verdict | RequestLost) -> None:
        """Make ready to be sent again what nobody waited for, after `problem`.

        This waits: for the server, and longer with each try. Raises what ends the
        request, `problem` itself if it does.
        """
        slot, deadline = flight.slot, flight.deadline
        if isinstance(problem, RequestLost):
            # A step of a sequence that has run must not run again. What a closed
            # session, or one of the parent of this process, has lost is not for this.
            is_final = flight.replayed or slot.is_step or self._exchange.is_closed
            if not self._replay or is_final or not self._is_drained(slot, deadline):
                # The frames that it passes hold `problem`: one that held them too would
                # keep what callers' frames hold, views too, until the collector comes.
                raise copy.copy(problem)
            flight.replayed = True
            problem = Verdict.REPLAY
        self._prepare_retry(slot, problem, flight.attempt)
        flight.attempt += 1
        if flight.attempt == len(_ATTEMPTS):
            raise _gave_up(problem)
        self.make_ready(slot, flight.given, deadline, flight.options)

    def _prepare_retry(self, slot: Slot, verdict: Verdict, attempt: int) -> None:
        self.retries += 1
        if verdict is Verdict.RUN_AGAIN:
            self.reruns += 1
            slot.prepared = None
        if verdict is Verdict.REGISTER_AGAIN:
            slot.renew_registrations()
        is_after_error = verdict in (Verdict.RUN_AGAIN, Verdict.REGISTER_AGAIN)
        if is_after_error and slot.channel is not None:
            # As after any error: it may come twice.
            slot.channel.close()
        if attempt:
            time.sleep(_FIRST_PAUSE * 2**attempt)

    def _is_drained(self, slot: Slot, deadline: Deadline) -> bool:
        """Wait until the server has let go of a lost slot; False if it cannot be told.

        A server that is away meanwhile is asked again until the deadline.
        """
        if not slot.is_shared:
            # What the server still does ends in its own memory.
            self._exchange.withdraw(slot)
            return True
        pause = _FIRST_PAUSE
        while not deadline.has_passed:
            try:
                return self._drain(slot, deadline)
            except ServerUnreachable:
                pass
            except ShmlaneError:
                # That the request was lost is what the caller must know.
                return False
            # A server that is ending, or a proxy without one, takes connections only
            # to close them at once.
            time.sleep(deadline.within(pause).remaining or 0)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    def _drain(self, slot: Slot, deadline: Deadline) -> bool:
        channel = self._calls.connect(deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            outcome = self._calls.drain(slot, channel, deadline)
            if outcome is control.Drained.GIVE_UP:
                return False
            if outcome is control.Drained.MOVE:
                self._memory.move_outputs(slot)
            # Only now: until then the slot must be seen to be lost.
            self._exchange.withdraw(slot)
            slot.channel = channel
            undo.pop_all()
        return True

    def make_ready(
        self,
        slot: Slot,
        given: int,
        deadline: Deadline,
        options: RequestOptions | None = None,
    ) -> Channel:
        """Connect, grow, register and prepare what the slot lacks.

        Raises `InferTimeout` if no time is left, and `PoolClosed` if the session closed
        meanwhile; nothing was sent then.
        """
        if self._exchange.is_closed:
            raise closed_meanwhile()
        if deadline.has_passed:
            raise no_time_left(deadline.limit)
        channel = slot.channel
        with in_time_of(deadline):
            if channel is None or not channel.is_quiet or repeats_id(channel, options):
                if channel is not None:
                    channel.close()
                channel = slot.channel = self._calls.connect(deadline)
            outgrown = self._exchange.building.outgrown(slot, given, options)
            for tensor, nbytes in outgrown:
                self._memory.grow_if_there_is_room(slot, tensor, nbytes)
            if slot.obsolete or any(slot.unregistered()):
                channel = self._register_again(slot, channel, deadline)
        if slot.prepared is None or not slot.prepared.serves(given, options):
            self._exchange.prepare(slot, given, options)
        return channel

    def _register_again(
        self, slot: Slot, channel: Channel, deadline: Deadline
    ) -> Channel:
        """Register over `channel`, or over another if that breaks meanwhile."""
        for attempt in _ATTEMPTS[1:]:
            try:
                self._calls.register(slot, channel, deadline)
                return channel
            except ServerUnreachable:
                if deadline.has_passed:
                    raise
            time.sleep(_FIRST_PAUSE * 2**attempt)
            channel = slot.channel = self._calls.connect(deadline)
        self._calls.register(slot, channel, deadline)
        return channel

    def __repr__(self) -> str:
        return f"<BlockingShell over {self._calls!r}>"


def _reference(flight: Flight | None) -> Callable[[], Flight | None]:
    """Not to the flight itself: dropped, it gives its slot back."""
    return _no_flight if flight is None else weakref.ref(flight)


def _no_flight() -> None:
    return None


def _too_early(sequence: int | str, deadline: Deadline) -> InferTimeout:
    return InferTimeout(
        f"the last step of sequence {sequence!r} is still unanswered after"
        f" {in_seconds(deadline.limit)}; this one was not sent.",
        hint="Release the lease of that step, so that its reply is read; wait longer,"
        " or begin the sequence anew.",
        timeout=deadline.limit,
    )


def _gave_up(verdict: Verdict) -> ShmlaneError:
    """The error after as many tries as there are."""
    if verdict is Verdict.RUN_AGAIN:
        return InferFailed(
            f"gave up after {len(_ATTEMPTS)} runs of the model: its outputs grew with"
            " each.",
            hint="Declare their largest shapes: outputs={name: shape}.",
        )
    return ServerUnreachable(
        f"gave up after {len(_ATTEMPTS)} tries: the connection was dead each time, or"
        " the server did not know the memory just registered.",
        hint="Is the server restarting, or does another client unregister everybody's"
        " shared memory?",
    )
