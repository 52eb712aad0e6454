"""Callers that hold futures: several requests in flight from one thread.

Owns what becomes of a future: it is waited for, cancelled or forgotten. Refuses to let
one go unanswered: every request has a limit, and its future is done soon after.
"""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from shmlane import OwnedResult, PoolClosed, Session
from shmlane.session_base import BaseSession
from tests.chaos.habits import Asked, some_limit, some_shape, some_view, what_is_kept
from tests.chaos.lanes import INPUT, OUTPUT, SLOTS, Lane
from tests.chaos.tokens import Array, filled
from tests.chaos.witness import Witness

# Limits are a few seconds at most; stops of this process come on top.
ANSWERED_WITHIN = 20.0
_IMPATIENCE = 0.03
_FATES = (["wait", "cancel", "forget"], [60, 32, 8])


class Pending(NamedTuple):
    """A future, and what is done with its result."""

    future: Future[Any]
    use: Callable[[Any], None]


def submit_copies(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    """More than one request in flight, for whose outputs nothing is held."""
    _settle_all(witness, lane, dice, _submit_copy, dice.randint(1, SLOTS))


def submit_leases(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    """Leases go with the requests, and slots with their results."""
    _settle_all(witness, lane, dice, _submit_lease, dice.randint(1, SLOTS - 1))


def leave_in_flight(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    """The session is closed meanwhile: its futures are done by then or soon after."""
    session = lane.session
    pending = [_submit_lease(witness, lane, dice)]
    if dice.random() < 0.5:
        pending.append(_submit_copy(witness, lane, dice))
    time.sleep(dice.uniform(0, _IMPATIENCE))
    session.close(wait=dice.random() < 0.5)
    while pending:
        with witness.excusing(lane):
            _look_at(pending.pop(), witness, lane)


def _look_at(pending: Pending, witness: Witness, lane: Lane[BaseSession]) -> None:
    future, use = pending
    if is_answered(future, witness, lane):
        try:
            use(future.result())
        except PoolClosed:
            witness.tally.add("futures closed")


def is_answered(future: Future[Any], witness: Witness, lane: Lane[BaseSession]) -> bool:
    """Wait until a future is done, whatever it gets; report one that never is."""
    concurrent.futures.wait([future], ANSWERED_WITHIN)
    if not future.done():
        witness.report(f"a future of {lane.session!r} is not answered: {future!r}")
    return future.done()


def _settle_all(
    witness: Witness,
    lane: Lane[Session],
    dice: random.Random,
    submit: Callable[[Witness, Lane[Session], random.Random], Pending],
    count: int,
) -> None:
    pending: list[Pending] = []
    try:
        pending.extend(submit(witness, lane, dice) for _ in range(count))
    finally:
        dice.shuffle(pending)
        while pending:
            with witness.excusing(lane):
                _settle(pending.pop(), witness, lane, dice)


def _settle(
    pending: Pending, witness: Witness, lane: Lane[Session], dice: random.Random
) -> None:
    (fate,) = dice.choices(*_FATES)
    if fate == "forget":
        # Nobody looks, and the slot comes back.
        witness.tally.add("futures forgotten")
        return
    future, use = pending
    if fate == "cancel":
        time.sleep(dice.uniform(0, _IMPATIENCE))
        if future.cancel():
            witness.tally.add("futures cancelled")
            return
    elif dice.random() < 0.3:
        _await_call_back(future)
    if is_answered(future, witness, lane):
        use(future.result())


def _await_call_back(future: Future[Any]) -> None:
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    called.wait(ANSWERED_WITHIN)


def _submit_copy(witness: Witness, lane: Lane[Session], dice: random.Random) -> Pending:
    token, shape = witness.tokens.make(), some_shape(dice)
    array = filled(shape, token)
    witness.tally.add("requests")
    future = lane.session.submit({INPUT: array}, timeout=some_limit(dice))
    # It was copied: the caller may do with it what it likes.
    array[...] = -1.0

    def use(outputs: dict[str, Array]) -> None:
        witness.tally.add("successes")
        witness.judge(outputs[OUTPUT], token, shape, lane)

    return Pending(future, use)


def _submit_lease(
    witness: Witness, lane: Lane[Session], dice: random.Random
) -> Pending:
    with lane.session.lease() as lease:
        asked = Asked(witness, lane, some_view(lease, dice), keep=what_is_kept(dice))
        future = lease.submit(timeout=some_limit(dice))

    def use(result: OwnedResult) -> None:
        output = result[OUTPUT]
        time.sleep(asked.answered(output, dice))
        asked.used(output)
        # Otherwise it is dropped, which does the same.
        if dice.random() < 0.5:
            result.release()

    return Pending(future, use)
