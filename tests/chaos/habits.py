"""What callers decide at random, whichever way they ask.

Owns shapes, time limits, what is kept beyond a lease, and how a reply is worked with.
Refuses to ask.
"""

from __future__ import annotations

import math
import random

from shmlane import Timeouts
from shmlane.leases import BaseLease
from shmlane.session_base import BaseSession
from shmlane.timing import DEFAULT, Timeout
from tests.chaos.lanes import INPUT, LARGEST, Lane
from tests.chaos.tokens import Array, Shape, fill
from tests.chaos.witness import Witness

_LONGEST_USE = 0.03
_KEEP = (["", "input", "reply"], [90, 4, 6])


def some_shape(dice: random.Random) -> Shape:
    """Any size up to the largest, small ones far more often, in any proportion."""
    size = int(math.exp(dice.uniform(0, math.log(LARGEST))))
    height = dice.randint(1, math.isqrt(size))
    return (1, 1, height, size // height)


def some_view(lease: BaseLease, dice: random.Random) -> Array:
    if dice.random() < 0.5:
        return lease[INPUT]
    return lease.view(INPUT, some_shape(dice))


def some_limit(dice: random.Random) -> Timeout:
    """The time limit of one call: usually ample, at times short, or hopeless."""
    kind = dice.random()
    if kind < 0.03:
        return dice.choice((0.0, 1e-6, 1e-4))
    return dice.uniform(0.0005, 0.03) if kind < 0.2 else DEFAULT


def some_wait(dice: random.Random) -> Timeout:
    """How long a caller waits for a lease."""
    return DEFAULT if dice.random() < 0.9 else dice.uniform(0, 0.02)


def limits_of_a_visit(dice: random.Random) -> Timeouts:
    return Timeouts(connect=0.3, lease=0.5, infer=dice.choice((0.2, 1.0)))


def what_is_kept(dice: random.Random) -> str:
    """Of a lease's last call: "input", "reply" or usually nothing."""
    return dice.choices(*_KEEP)[0]


class Asked:
    """One request in place: its token, and what is done with its memory.

    keep: what stays alive beyond the lease; see `what_is_kept`.
    """

    def __init__(
        self,
        witness: Witness,
        lane: Lane[BaseSession],
        view: Array,
        *,
        keep: str = "",
    ) -> None:
        self.shape: Shape = view.shape
        self._witness = witness
        self._lane = lane
        self._keep = keep
        self._token = witness.tokens.make()
        fill(view, self._token)
        if keep == "input":
            # Whatever becomes of the call: the server reads there, and nobody writes.
            witness.keep(view, self._token, "an input", lane)
        witness.tally.add("requests")

    def answered(
        self, output: Array, dice: random.Random, *, view: Array | None = None
    ) -> float:
        """Judge a reply and begin to work with it; for how many seconds to go on.

        view: the input, where the caller still has it.
        """
        witness = self._witness
        witness.tally.add("successes")
        witness.judge(output, self._token, self.shape, self._lane)
        if self._keep != "input" and view is not None:
            # The next one's data already, which no reply may show yet.
            fill(view, witness.tokens.make())
        if dice.random() < 0.5:
            return 0.0
        # Callers work with a reply in place, and write to it: a server that does so as
        # well would go unseen if the request was sent again with the same data.
        self._token = witness.tokens.make()
        fill(output, self._token)
        return dice.uniform(0, _LONGEST_USE)

    def used(self, output: Array) -> None:
        """Judge it once more, after that time."""
        self._witness.judge(output, self._token, self.shape, self._lane)
        if self._keep == "reply":
            self._witness.keep(output, self._token, "a reply", self._lane)
