"""Slots that clients hand to each other, and slots that they share.

Owns giving a slot away, filled or empty, and what becomes of one that was adopted; and
sessions that claim shared slots for a while. Refuses to let a reference be good twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from shmlane import (
    AsyncLease,
    AsyncSession,
    HandoffExpired,
    Lease,
    RegionError,
    Session,
    SessionHandle,
    SlotRef,
    SlotsClaimed,
)
from shmlane.session_base import BaseSession, SendingLease
from tests.chaos.habits import (
    Asked,
    limits_of_a_visit,
    some_limit,
    some_shape,
    what_is_kept,
)
from tests.chaos.lanes import EXPECTED, INPUT, OUTPUT, Lane
from tests.chaos.letters import Letter, Letterbox
from tests.chaos.tokens import filled
from tests.chaos.witness import Witness

Way = Callable[[Witness, Lane[Session], random.Random], object]


class Handing:
    """Ways to ask that need two; for the sessions of threads."""

    def __init__(self, letters: Letterbox, ways: Sequence[Way]) -> None:
        self._letters = letters
        self._ways = ways

    def give(self, witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
        if is_shared(lane):
            with lane.session.lease() as lease:
                fill_and_give(lease, self._letters, witness, lane, dice)

    def take(self, witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
        if not self._take(witness, lane, dice):
            self.give(witness, lane, dice)

    def _take(self, witness: Witness, lane: Lane[Session], dice: random.Random) -> bool:
        """False if there is nothing to take."""
        letter = self._letters.take(lane, dice) if is_shared(lane) else None
        if letter is None:
            return False
        try:
            lease = lane.session.adopt(SlotRef.parse(letter.ref))
        except HandoffExpired:
            witness.tally.add("hand-offs expired")
            return True
        with lease:
            note_adopted(letter, self._letters, witness, lane)
            if dice.random() < 0.3:
                fill_and_give(lease, self._letters, witness, lane, dice)
            else:
                _use(lease, letter, witness, lane, dice)
        return True

    def attach(
        self, witness: Witness, _lane: Lane[Session], dice: random.Random
    ) -> None:
        """A session that claims shared slots, or has none but those that it adopts."""
        handle = self._letters.some_handle(dice)
        if handle is None:
            return
        slots, limits = dice.choice((0, 2)), limits_of_a_visit(dice)
        try:
            shared = SessionHandle.parse(handle)
            session = Session.attach(shared, slots=slots, timeouts=limits).open()
        except SlotsClaimed:
            witness.tally.add("slots found claimed")
            return
        except RegionError:
            # Whoever shared them has died, and somebody has cleaned up.
            witness.tally.add("handles expired")
            self._letters.forget(handle)
            return
        witness.tally.add("visits to shared slots")
        way = dice.choice(self._ways) if slots else self._take
        with session:
            try:
                way(witness, Lane(session, EXPECTED), dice)
            finally:
                witness.tally.add_stats(session.stats())


class AsyncHanding:
    """The same for the sessions of tasks."""

    def __init__(self, letters: Letterbox) -> None:
        self._letters = letters

    async def give(
        self, witness: Witness, lane: Lane[AsyncSession], dice: random.Random
    ) -> None:
        if is_shared(lane):
            async with lane.session.lease() as lease:
                fill_and_give(lease, self._letters, witness, lane, dice)

    async def take(
        self, witness: Witness, lane: Lane[AsyncSession], dice: random.Random
    ) -> None:
        letter = self._letters.take(lane, dice) if is_shared(lane) else None
        if letter is None:
            await self.give(witness, lane, dice)
            return
        try:
            lease = await lane.session.adopt(SlotRef.parse(letter.ref))
        except HandoffExpired:
            witness.tally.add("hand-offs expired")
            return
        with lease:
            note_adopted(letter, self._letters, witness, lane)
            if dice.random() < 0.3:
                fill_and_give(lease, self._letters, witness, lane, dice)
            else:
                await _use_in_task(lease, letter, witness, lane, dice)


def is_shared(lane: Lane[BaseSession]) -> bool:
    """Whether the slots of this lane can be handed over."""
    return lane.session.memory == "system"


def note_adopted(
    letter: Letter, letters: Letterbox, witness: Witness, lane: Lane[BaseSession]
) -> None:
    witness.tally.add("slots adopted")
    if not letters.note_adopted(letter.ref):
        witness.report(f"{letter.ref} was adopted twice, now by {lane.session!r}")


def fill_and_give(
    lease: SendingLease,
    letters: Letterbox,
    witness: Witness,
    lane: Lane[BaseSession],
    dice: random.Random,
) -> None:
    """Hand a slot over: filled, empty, or as it is."""
    token, shape = 0, some_shape(dice)
    if dice.random() < 0.8:
        token = witness.tokens.make()
        lease.write(INPUT, filled(shape, token))
    ref = lease.detach()
    witness.tally.add("slots handed over")
    letters.put(Letter(str(ref), token, shape), lane)


def _use(
    lease: Lease,
    letter: Letter,
    witness: Witness,
    lane: Lane[Session],
    dice: random.Random,
) -> None:
    """Send an adopted slot as it was filled, or filled anew, or give it back."""
    if letter.token and dice.random() < 0.7:
        witness.tally.add("requests")
        output = lease.infer(timeout=some_limit(dice))[OUTPUT]
        witness.tally.add("successes")
        witness.judge(output, letter.token, letter.shape, lane)
        if dice.random() < 0.1:
            witness.keep(output, letter.token, "a reply in an adopted slot", lane)
    elif dice.random() < 0.8:
        view = lease.view(INPUT, some_shape(dice))
        asked = Asked(witness, lane, view, keep=what_is_kept(dice))
        output = lease.infer(timeout=some_limit(dice))[OUTPUT]
        time.sleep(asked.answered(output, dice, view=view))
        asked.used(output)


async def _use_in_task(
    lease: AsyncLease,
    letter: Letter,
    witness: Witness,
    lane: Lane[AsyncSession],
    dice: random.Random,
) -> None:
    """As `_use`, without changing what was filled."""
    if letter.token:
        witness.tally.add("requests")
        output = (await lease.infer(timeout=some_limit(dice)))[OUTPUT]
        witness.tally.add("successes")
        witness.judge(output, letter.token, letter.shape, lane)
