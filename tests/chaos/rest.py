"""What a client does while its callers are held back: calls that have to succeed.

Owns the use of every slot, and sessions that are closed while the server stands still.
Refuses to excuse an error: nothing goes wrong meanwhile but what must not matter.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from shmlane import InferTimeout, Lease, OwnedResult, PoolClosed, Session, Timeouts
from shmlane.leases import BaseLease
from shmlane.session_base import BaseSession
from tests.chaos.futures import ANSWERED_WITHIN
from tests.chaos.lanes import FIRST_SHAPE, INPUT, OUTPUT, Lane
from tests.chaos.tokens import Array, fill, filled
from tests.chaos.witness import Witness

PATIENCE = 30.0
HARDLY_ANY = 0.05
LIMITS = Timeouts(connect=0.3, lease=1.0, infer=0.6)


@contextlib.contextmanager
def no_excuse(witness: Witness, lane: Lane[BaseSession]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        witness.report(f"a failure of {lane.session!r} at rest:\n{trace}")


def fill_at_rest(witness: Witness, lease: BaseLease) -> tuple[Array, int]:
    """A request that has to succeed: its input, and its token."""
    token = witness.tokens.make()
    view = lease[INPUT]
    fill(view, token)
    witness.tally.add("calls at rest")
    return view, token


def items_at_rest(
    witness: Witness, count: int
) -> tuple[list[int], list[dict[str, Array]]]:
    """For a stream that has to succeed: tokens, and items."""
    tokens = [witness.tokens.make() for _ in range(count)]
    witness.tally.add("calls at rest", count)
    return tokens, [{INPUT: filled(FIRST_SHAPE, token)} for token in tokens]


class Rest:
    """Orders for quiet times. Used by one thread."""

    def __init__(self, lanes: Sequence[Lane[Session]], witness: Witness) -> None:
        self._lanes = lanes
        self._witness = witness
        self._visits: list[Lane[Session]] = []
        self._departures = itertools.count()

    # --- every slot works -------------------------------------------------------------

    def use_every_slot(self) -> None:
        """What is said to be free can be had, and works, whatever befell it before.

        Twice in a row: afterwards the last two replies on each connection are known.
        """
        for number, lane in enumerate(self._lanes):
            with no_excuse(self._witness, lane):
                if number % 3 == 2:
                    self._stream(lane)
                self._use_slots(lane)

    def _use_slots(self, lane: Lane[Session]) -> None:
        session = lane.session
        with contextlib.ExitStack() as held:
            for number in range(session.stats().slots):
                lease = held.enter_context(session.lease(timeout=PATIENCE))
                self._ask(lane, lease)
                if number % 3 == 1:
                    held.enter_context(self._submit(lane, lease))
                else:
                    self._ask(lane, lease)

    def _ask(self, lane: Lane[Session], lease: Lease) -> None:
        view, token = fill_at_rest(self._witness, lease)
        output = lease.infer(timeout=PATIENCE)[OUTPUT]
        self._witness.judge(output, token, view.shape, lane)

    def _submit(self, lane: Lane[Session], lease: Lease) -> OwnedResult:
        view, token = fill_at_rest(self._witness, lease)
        result = lease.submit(timeout=PATIENCE).result(PATIENCE)
        self._witness.judge(result[OUTPUT], token, view.shape, lane)
        return result

    def _stream(self, lane: Lane[Session]) -> None:
        session = lane.session
        tokens, items = items_at_rest(self._witness, 2 * session.stats().slots)
        results = session.stream(items, timeout=PATIENCE)
        for token, outputs in zip(tokens, results, strict=True):
            self._witness.judge(outputs[OUTPUT], token, FIRST_SHAPE, lane)

    # --- sessions that end without a server -------------------------------------------

    def visit(self) -> None:
        """Open small sessions, which `leave` closes."""
        self._visits = [lane.visit(LIMITS) for lane in self._lanes]
        for visit in self._visits:
            with no_excuse(self._witness, visit):
                visit.session.open(wait=PATIENCE)

    def leave(self) -> None:
        """Close them, while the server stands still: idle, or with a request on it."""
        leaving = [
            threading.Thread(target=self._leave, args=(visit, next(self._departures)))
            for visit in self._visits
        ]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        self._witness.tally.add("sessions left", len(self._visits))
        self._visits = []

    def _leave(self, visit: Lane[Session], number: int) -> None:
        session, witness = visit.session, self._witness
        with no_excuse(witness, visit):
            unanswered = _IN_VAIN[number % len(_IN_VAIN)](witness, session)
            session.close(wait=number // len(_IN_VAIN) % 2 == 0)
            if unanswered is not None:
                error = unanswered.exception(ANSWERED_WITHIN)
                if not isinstance(error, PoolClosed | InferTimeout):
                    witness.report(f"a future got {error!r} from {session!r}")
                witness.tally.add("futures closed")


# --- what is asked in vain: a future that is still unanswered -------------------------


def _nothing(witness: Witness, session: Session) -> None:
    """It leaves with nothing in flight."""


def _infer(witness: Witness, session: Session) -> None:
    with session.lease() as lease:
        fill(lease[INPUT], witness.tokens.make())
        with must_time_out(witness, session):
            lease.infer(timeout=HARDLY_ANY)


def _submit(witness: Witness, session: Session) -> None:
    with must_time_out(witness, session):
        inputs = {INPUT: filled(FIRST_SHAPE, witness.tokens.make())}
        session.submit(inputs, timeout=HARDLY_ANY).result(ANSWERED_WITHIN)


def _submit_and_cancel(witness: Witness, session: Session) -> None:
    if not _submit_lease(witness, session).cancel():
        witness.report(f"a future of {session!r} cannot be cancelled")


def _submit_and_leave(witness: Witness, session: Session) -> Future[Any]:
    return _submit_lease(witness, session)


def _submit_lease(witness: Witness, session: Session) -> Future[OwnedResult]:
    with session.lease() as lease:
        fill(lease[INPUT], witness.tokens.make())
        return lease.submit()


def _stream(witness: Witness, session: Session) -> None:
    items = [{INPUT: filled(FIRST_SHAPE, witness.tokens.make())} for _ in range(2)]
    with must_time_out(witness, session):
        next(session.stream(items, timeout=HARDLY_ANY))


@contextlib.contextmanager
def must_time_out(witness: Witness, session: BaseSession) -> Iterator[None]:
    with contextlib.suppress(InferTimeout):
        yield
        witness.report(f"a server that stands still has answered {session!r}")


_IN_VAIN: tuple[Callable[[Witness, Session], Future[Any] | None], ...] = (
    _submit_and_leave,
    _infer,
    _submit,
    _stream,
    _submit_and_cancel,
    _nothing,
)
