"""The sessions of a client, straight to the server and through what comes between.

Owns their models, limits and sizes, and which errors a fault may cause in each. Refuses
to use them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

import shmlane
from shmlane import AsyncSession, Connection, Session, ShmlaneError, Timeouts
from shmlane.session_base import BaseSession
from tests.chaos.tokens import Shape

SLOW = "slow"
INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"

# More than one `recv` takes, and room for many moves to a larger block on the way.
LARGEST = 40_000
FIRST_SHAPE = (1, 1, 4, 16)
SLOTS = 3
LIMITS = Timeouts(connect=1.0, lease=1.5, infer=3.0, handoff=1.0)
# Slots that each client shares, beside those of its sessions.
SHARED = 3

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
# What comes between answers in Triton's place, or says things twice.
_LIED_TO = EXPECTED | {shmlane.ProtocolError}
_IN_PLACE = {OUTPUT: (1, 1, 1, LARGEST)}

S = TypeVar("S", bound=BaseSession)
S_co = TypeVar("S_co", bound=BaseSession, covariant=True)


class Lane(NamedTuple, Generic[S_co]):
    """One session with a model that echoes, and which errors may come."""

    session: S_co
    expected: Collection[type[ShmlaneError]]

    def visit(self, limits: Timeouts) -> Lane[S_co]:
        """The same with a small session of its own."""
        session = self.session
        return self._replace(
            session=_session(
                type(session),
                session.url,
                session.model,
                slots=2,
                memory=session.memory,
                timeouts=limits,
            )
        )


def make_lanes(direct: str, tcp: str, unix: str) -> list[Lane[Session]]:
    """The sessions that threads use.

    Replies lie in place, come on the wire, or answer a request that was sent again;
    some sessions share no memory with the server.
    """
    make, place = Session, _IN_PLACE
    return [
        Lane(_session(make, direct, "identity", outputs=place), EXPECTED),
        Lane(_session(make, direct, "identity"), EXPECTED),
        Lane(_session(make, direct, SLOW, outputs=place), EXPECTED),
        Lane(_session(make, unix, SLOW, outputs=place), _LIED_TO),
        Lane(_session(make, tcp, SLOW, outputs=place, replay=True), _LIED_TO),
        Lane(_session(make, tcp, "identity"), _LIED_TO),
        Lane(_session(make, direct, SLOW, memory="wire"), EXPECTED),
        Lane(_session(make, tcp, "identity", memory="wire", replay=True), _LIED_TO),
    ]


def make_async_lanes(direct: str, tcp: str, unix: str) -> list[Lane[AsyncSession]]:
    """The sessions that tasks use; see `make_lanes`."""
    make, place = AsyncSession, _IN_PLACE
    return [
        Lane(_session(make, direct, SLOW, outputs=place), EXPECTED),
        Lane(_session(make, unix, "identity"), _LIED_TO),
        Lane(_session(make, unix, SLOW, outputs=place), _LIED_TO),
        Lane(_session(make, tcp, SLOW, outputs=place, replay=True), _LIED_TO),
        Lane(_session(make, tcp, SLOW, memory="wire"), _LIED_TO),
    ]


def _session(
    make: type[S],
    url: str,
    model: str,
    *,
    slots: int = SLOTS,
    memory: str = "system",
    outputs: Mapping[str, Shape] | None = None,
    replay: bool = False,
    timeouts: Timeouts = LIMITS,
) -> S:
    return make(
        url,
        model,
        slots=slots,
        memory=memory,
        shapes={INPUT: FIRST_SHAPE},
        outputs=outputs,
        connection=Connection(replay=replay),
        timeouts=timeouts,
    )
