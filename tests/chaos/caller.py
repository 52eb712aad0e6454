"""What callers in a client's threads do: every way to ask, with every kind of limit.

Owns the choice of a way, and the calls that wait for their reply. Refuses to repeat a
failed call: what is written down is what a caller would have seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from shmlane import Lease, Session
from tests.chaos import flows, futures
from tests.chaos.habits import (
    Asked,
    limits_of_a_visit,
    some_limit,
    some_shape,
    some_view,
    some_wait,
    what_is_kept,
)
from tests.chaos.handing import Handing, Way
from tests.chaos.lanes import INPUT, OUTPUT, Lane
from tests.chaos.letters import Letterbox
from tests.chaos.tokens import filled
from tests.chaos.witness import Witness


class Caller:
    """Calls at random, from any number of threads."""

    def __init__(
        self, lanes: Sequence[Lane[Session]], witness: Witness, letters: Letterbox
    ) -> None:
        self._lanes = lanes
        self._witness = witness
        handing = Handing(letters, _WAYS_OF_A_VISIT[0])
        self._ways: list[Way] = [*_WAYS, handing.give, handing.take, handing.attach]

    def act(self, dice: random.Random) -> None:
        """One call, and a look at a kept view. Never raises."""
        (way,), lane = dice.choices(self._ways, _WEIGHTS), dice.choice(self._lanes)
        with self._witness.excusing(lane):
            way(self._witness, lane, dice)
        self._witness.glance(dice)


def ask_by_copy(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    token, shape = witness.tokens.make(), some_shape(dice)
    inputs = {INPUT: filled(shape, token)}
    witness.tally.add("requests")
    outputs = lane.session.infer(inputs, timeout=some_limit(dice))
    witness.tally.add("successes")
    witness.judge(outputs[OUTPUT], token, shape, lane)


def ask_in_place(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    with lane.session.lease(timeout=some_wait(dice)) as lease:
        while dice.random() < 0.3:
            _infer(lease, witness, lane, dice)
        _infer(lease, witness, lane, dice, keep=what_is_kept(dice))


def drop_the_lease(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    """What a caller does who does not know `with`: a finaliser gives it back."""
    witness.tally.add("leases dropped")
    _infer(lane.session.lease(), witness, lane, dice, keep=what_is_kept(dice))


def visit(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    """A session for a single way to ask, opened and closed amid the faults."""
    visit = lane.visit(limits_of_a_visit(dice))
    witness.tally.add("visits")
    (way,) = dice.choices(*_WAYS_OF_A_VISIT)
    with visit.session as session:
        try:
            way(witness, visit, dice)
        finally:
            witness.tally.add_stats(session.stats())


def _infer(
    lease: Lease,
    witness: Witness,
    lane: Lane[Session],
    dice: random.Random,
    *,
    keep: str = "",
) -> None:
    """One inference; the last one of a lease may `keep` a view beyond it."""
    view = some_view(lease, dice)
    asked = Asked(witness, lane, view, keep=keep)
    output = lease.infer(timeout=some_limit(dice))[OUTPUT]
    time.sleep(asked.answered(output, dice, view=view))
    asked.used(output)


_WAYS: tuple[Way, ...] = (
    ask_in_place,
    ask_by_copy,
    futures.submit_copies,
    futures.submit_leases,
    flows.stream,
    drop_the_lease,
    visit,
)
# Of these, and of giving, taking and attaching.
_WEIGHTS = (32, 18, 10, 13, 10, 3, 1, 5, 12, 2)
_WAYS_OF_A_VISIT: tuple[list[Way], list[int]] = (
    [ask_in_place, futures.leave_in_flight, flows.stream],
    [50, 30, 20],
)
