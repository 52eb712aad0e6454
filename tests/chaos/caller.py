"""What callers in a client do: every way to ask, with every kind of time limit.

Owns one call from the lease to the judged reply, and which errors a fault may cause.
Refuses to repeat a failed call: what is written down is what a caller would have seen.
"""

from __future__ import annotations

import collections
import math
import random
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import shmlane
from shmlane import (
    Connection,
    Lease,
    Session,
    SessionStats,
    ShmlaneError,
    Timeouts,
)
from shmlane.timing import DEFAULT, Timeout
from tests.chaos.slow_model import SLOW
from tests.chaos.tokens import (
    Array,
    Kept,
    Shape,
    Shelf,
    Tokens,
    complaint,
    fill,
    filled,
)

INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"

# More than one `recv` takes, and room for many moves to a larger block on the way.
LARGEST = 40_000
FIRST_SHAPE = (1, 1, 4, 16)
SLOTS = 3
LIMITS = Timeouts(connect=1.0, lease=1.5, infer=3.0)

_LONGEST_USE = 0.03

# Each of them says what a stopped, dying or starting server does to a call. Any other
# one would be shmlane's mistake, such as a caller's error.
EXPECTED: frozenset[type[ShmlaneError]] = frozenset(
    {
        shmlane.InferTimeout,
        shmlane.LeaseTimeout,
        shmlane.RequestLost,
        shmlane.ServerUnreachable,
        shmlane.TransportError,
    }
)
COUNTERS = (
    "registrations",
    "reregistrations",
    "connections",
    "retries",
    "growths",
    "waits",
    "spare_slots",
    "late_replies",
    "drains",
    "retired",
)


class Tally:
    """Counts that many threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def add_stats(self, stats: SessionStats) -> None:
        for name in COUNTERS:
            self.add(name, getattr(stats, name))

    def copy(self) -> collections.Counter[str]:
        with self._lock:
            return self._counts.copy()


class Lane(NamedTuple):
    """One session with a model that echoes, and which errors may come."""

    session: Session
    expected: Collection[type[ShmlaneError]]

    def visit(self, limits: Timeouts) -> Lane:
        """The same with a small session of its own."""
        session = self.session
        return self._replace(
            session=_session(
                session.url,
                session.model,
                slots=2,
                memory=session.memory,
                timeouts=limits,
            )
        )


def make_lanes(direct: str, tcp: str, unix: str) -> list[Lane]:
    """The sessions of a client, straight and through what comes between.

    Replies lie in place, come on the wire, or answer a request that was sent again;
    some sessions share no memory with the server.
    """
    place = {OUTPUT: (1, 1, 1, LARGEST)}
    # What comes between answers in Triton's place, or says things twice.
    lied_to = EXPECTED | {shmlane.ProtocolError}
    return [
        Lane(_session(direct, "identity", outputs=place), EXPECTED),
        Lane(_session(direct, "identity"), EXPECTED),
        Lane(_session(direct, SLOW, outputs=place), EXPECTED),
        Lane(_session(unix, SLOW, outputs=place), lied_to),
        Lane(_session(tcp, SLOW, outputs=place, replay=True), lied_to),
        Lane(_session(tcp, "identity"), lied_to),
        Lane(_session(direct, SLOW, memory="wire"), EXPECTED),
        Lane(_session(tcp, "identity", memory="wire", replay=True), lied_to),
    ]


def _session(
    url: str,
    model: str,
    *,
    slots: int = SLOTS,
    memory: str = "system",
    outputs: Mapping[str, Shape] | None = None,
    replay: bool = False,
    timeouts: Timeouts = LIMITS,
) -> Session:
    return Session(
        url,
        model,
        slots=slots,
        memory=memory,
        shapes={INPUT: FIRST_SHAPE},
        outputs=outputs,
        connection=Connection(replay=replay),
        timeouts=timeouts,
    )


class Caller:
    """Calls at random. Everything that is shared by callers is thread-safe."""

    def __init__(
        self,
        lanes: list[Lane],
        *,
        tokens: Tokens,
        tally: Tally,
        shelf: Shelf,
        report: Callable[[str], None],
    ) -> None:
        self._lanes = lanes
        self._tokens = tokens
        self._tally = tally
        self._shelf = shelf
        self._report = report

    def act(self, dice: random.Random) -> None:
        """One call, and a look at a kept view. Never raises."""
        (way,), lane = dice.choices(*_WAYS), dice.choice(self._lanes)
        try:
            way(self, lane, dice)
        except ShmlaneError as error:
            self._tally.add(type(error).__name__)
            if type(error) not in lane.expected:
                self._complain("an error that no fault explains", lane, error)
        except Exception as error:
            self._complain("not an error of shmlane's", lane, error)
        if self._shelf.look(dice, drop=dice.random() < 0.1):
            self._tally.add("looks at kept views")

    # --- ways to ask ------------------------------------------------------------------

    def _ask_by_copy(self, lane: Lane, dice: random.Random) -> None:
        token, shape = self._tokens.make(), _shape(dice)
        inputs = {INPUT: filled(shape, token)}
        self._tally.add("requests")
        outputs = lane.session.infer(inputs, timeout=_limit(dice))
        self._tally.add("successes")
        self._judge(outputs[OUTPUT], token, lane, shape)

    def _ask_in_place(self, lane: Lane, dice: random.Random) -> None:
        limit = DEFAULT if dice.random() < 0.9 else dice.uniform(0, 0.02)
        with lane.session.lease(timeout=limit) as lease:
            while dice.random() < 0.3:
                self._infer(lease, lane, dice)
            self._infer(lease, lane, dice, keep=dice.choices(*_KEEP)[0])

    def _drop_the_lease(self, lane: Lane, dice: random.Random) -> None:
        """What a caller does who does not know `with`: a finaliser gives it back."""
        self._tally.add("leases dropped")
        self._infer(lane.session.lease(), lane, dice, keep=dice.choices(*_KEEP)[0])

    def _visit(self, lane: Lane, dice: random.Random) -> None:
        """A session for a single lease, opened and closed amid the faults."""
        limits = Timeouts(connect=0.3, lease=0.5, infer=dice.choice((0.2, 1.0)))
        visit = lane.visit(limits)
        self._tally.add("visits")
        with visit.session as session:
            try:
                self._ask_in_place(visit, dice)
            finally:
                self._tally.add_stats(session.stats())

    def _infer(
        self, lease: Lease, lane: Lane, dice: random.Random, *, keep: str = ""
    ) -> None:
        """One inference; the last one of a lease may `keep` a view beyond it."""
        model, token = lane.session.model, self._tokens.make()
        view = _choose_view(lease, dice)
        fill(view, token)
        if keep == "input":
            # Whatever becomes of the call: the server reads there, and nobody writes.
            self._shelf.put(Kept(view, token, f"an input of {model}"))
        self._tally.add("requests")
        output = lease.infer(timeout=_limit(dice))[OUTPUT]
        self._tally.add("successes")
        self._judge(output, token, lane, view.shape)
        if keep != "input":
            # The next one's data already, which no reply may show yet.
            fill(view, self._tokens.make())
        if dice.random() < 0.5:
            # Callers work with a reply in place, and write to it: a server that does so
            # as well would go unseen if the request was sent again with the same data.
            token = self._tokens.make()
            fill(output, token)
            time.sleep(dice.uniform(0, _LONGEST_USE))
            self._judge(output, token, lane, view.shape)
        if keep == "reply":
            self._shelf.put(Kept(output, token, f"a reply of {model}"))

    def _complain(self, what: str, lane: Lane, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        self._report(f"{what}, of {lane.session!r}:\n{trace}")

    def _judge(self, output: Array, token: int, lane: Lane, shape: Shape) -> None:
        if wrong := complaint(output, token, shape):
            self._report(f"a reply of {lane.session!r} {wrong}")


_WAYS = (
    [Caller._ask_in_place, Caller._ask_by_copy, Caller._drop_the_lease, Caller._visit],
    [60, 36, 3, 1],
)
_KEEP = (["", "input", "reply"], [90, 4, 6])


def _shape(dice: random.Random) -> Shape:
    """Any size up to the largest, small ones far more often, in any proportion."""
    size = int(math.exp(dice.uniform(0, math.log(LARGEST))))
    height = dice.randint(1, math.isqrt(size))
    return (1, 1, height, size // height)


def _choose_view(lease: Lease, dice: random.Random) -> Array:
    if dice.random() < 0.5:
        return lease[INPUT]
    return lease.view(INPUT, _shape(dice))


def _limit(dice: random.Random) -> Timeout:
    """The time limit of one call: usually ample, at times short, or hopeless."""
    kind = dice.random()
    if kind < 0.03:
        return dice.choice((0.0, 1e-6, 1e-4))
    return dice.uniform(0.0005, 0.03) if kind < 0.2 else DEFAULT
