"""Streams: many items of one caller, of which every one comes to something.

Owns what a stream is asked, its functions, and whether what comes out is complete and
in order; and the streams of threads. Refuses to excuse an item that is missing, that
comes twice, or out of turn.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np

from shmlane import Result, Session
from shmlane.leases import BaseLease
from shmlane.session_base import BaseSession
from shmlane.timing import DEFAULT, Timeout
from tests.chaos.habits import Asked, some_limit, some_shape, some_view, what_is_kept
from tests.chaos.lanes import INPUT, OUTPUT, SLOTS, Lane
from tests.chaos.tokens import Array, filled
from tests.chaos.witness import Clumsy, Witness

_MOST = 12
_WORKERS = 2
_CLUMSY = 0.01
_LONGEST_PAUSE = 0.02


class Manner(TypedDict):
    """Arguments of `Session.stream`."""

    in_flight: int
    ordered: bool
    return_exceptions: bool
    workers: int
    timeout: Timeout


class Item(NamedTuple):
    """One of a stream; its dice are its own, for any thread may fill it."""

    number: int
    dice: random.Random


class Reading(NamedTuple):
    """What `read` makes of a result; a view that leaves the stream, at times."""

    number: int
    output: Array | None


class Flow:
    """What one stream is asked, and what has come of it.

    manner: what the stream is told. enough: after how many results it is left.
    """

    def __init__(
        self, witness: Witness, lane: Lane[BaseSession], dice: random.Random
    ) -> None:
        count = dice.randint(1, _MOST)
        is_endless = dice.random() < 0.2
        is_left = is_endless or dice.random() < 0.2
        self.enough = dice.randint(0, count) if is_left else None
        self.manner = Manner(
            in_flight=dice.randint(1, SLOTS - 1),
            ordered=dice.random() < 0.5,
            return_exceptions=dice.random() < 0.7,
            workers=dice.choice((0, 0, _WORKERS)),
            timeout=DEFAULT if dice.random() < 0.5 else some_limit(dice),
        )
        self.is_plain = dice.random() < 0.4
        self._pause = dice.choice((0.0, dice.uniform(0, _LONGEST_PAUSE)))
        self._numbers = itertools.count() if is_endless else iter(range(count))
        self._witness = witness
        self._lane = lane
        self._dice = dice
        self._asked: dict[int, Asked] = {}
        self._plain: dict[int, tuple[int, Array]] = {}
        self._fetched = 0
        self._came: set[int] = set()
        self._taken = 0

    # --- what the stream is given -----------------------------------------------------

    def items(self) -> Iterator[Item]:
        for number in self._numbers:
            self._fetched += 1
            yield Item(number, random.Random(self._dice.getrandbits(64)))

    def plain_items(self) -> Iterator[dict[str, Array]]:
        """As the stream takes them without functions."""
        for item in self.items():
            token = self._witness.tokens.make()
            array = filled(some_shape(item.dice), token)
            self._plain[token] = (item.number, array)
            self._witness.tally.add("requests")
            yield {INPUT: array}

    def write(self, lease: BaseLease, item: Item) -> None:
        dice = item.dice
        if dice.random() < _CLUMSY:
            raise Clumsy(f"writing item {item.number}")
        view = some_view(lease, dice)
        # Whoever gave the slot to another meanwhile would have its data overwritten.
        self._take_time(dice)
        asked = Asked(self._witness, self._lane, view, keep=what_is_kept(dice))
        self._asked[item.number] = asked

    def read(self, item: Item, result: Result) -> Reading:
        dice = item.dice
        if dice.random() < _CLUMSY:
            raise Clumsy(f"reading item {item.number}")
        output, asked = result[OUTPUT], self._asked[item.number]
        asked.answered(output, dice)
        self._take_time(dice)
        asked.used(output)
        return Reading(item.number, output if dice.random() < 0.2 else None)

    def _take_time(self, dice: random.Random) -> None:
        # In the stream's own thread it would hold up all others.
        if self.manner["workers"]:
            time.sleep(dice.uniform(0, _LONGEST_PAUSE))

    # --- what comes out ---------------------------------------------------------------

    @property
    def has_enough(self) -> bool:
        return self.enough is not None and self._taken >= self.enough

    @property
    def pause(self) -> float:
        """For how many seconds the consumer keeps the stream waiting."""
        return self._dice.uniform(0, self._pause)

    def take(self, outcome: Any) -> None:
        """Judge what came out, an error in the place of a result included."""
        turn = self._taken
        self._taken += 1
        if isinstance(outcome, Exception):
            self._witness.tally.add("errors in the place of results")
            self._witness.excuse(self._lane, outcome)
            return
        self._witness.tally.add("results of streams")
        number = self._number_of(outcome)
        if number in self._came:
            self._report(f"item {number} comes twice")
        elif self.manner["ordered"] and number != turn:
            self._report(f"item {number} comes in the place of item {turn}")
        self._came.add(number)

    def _number_of(self, outcome: Any) -> int:
        if isinstance(outcome, Reading):
            if outcome.output is not None:
                self._asked[outcome.number].used(outcome.output)
            return outcome.number
        output: Array = outcome[OUTPUT]
        token = int(output.view(np.uint32).flat[0])
        number, array = self._plain.get(token, (-1, output))
        if number < 0:
            self._report(f"a reply to nothing that was asked, with token {token:#x}")
        self._witness.judge(output, token, array.shape, self._lane)
        self._witness.tally.add("successes")
        return number

    def ended(self, done: int) -> None:
        """The stream says that this was all, after so many results."""
        self._witness.tally.add("streams ended")
        if not self._taken == self._fetched == done:
            self._report(
                f"it ends after {self._taken} of {self._fetched} items, and tells"
                f" of {done}"
            )

    def left(self) -> None:
        self._witness.tally.add("streams left early")

    def _report(self, what: str) -> None:
        self._witness.report(f"a stream of {self._lane.session!r}, {self!r}: {what}")

    def __repr__(self) -> str:
        return f"<Flow {self.manner}, plain: {self.is_plain}, {self._taken} taken>"


def stream(witness: Witness, lane: Lane[Session], dice: random.Random) -> None:
    """A stream of any manner, whose consumer is slow, leaves early, or neither."""
    flow = Flow(witness, lane, dice)
    session, manner = lane.session, flow.manner
    if flow.is_plain:
        results: Any = session.stream(flow.plain_items(), **manner)
    else:
        results = session.stream(
            flow.items(), write=flow.write, read=flow.read, **manner
        )
    for outcome in results:
        flow.take(outcome)
        if flow.has_enough:
            flow.left()
            break
        time.sleep(flow.pause)
    else:
        flow.ended(results.done)
    if dice.random() < 0.5:
        # Otherwise it is dropped, which does the same.
        results.close()
