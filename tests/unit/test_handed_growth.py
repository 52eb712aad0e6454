"""Slots that grow on their way between sessions, however often: nothing is left."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import InferFailed, InferTimeout, Lease, Session, SlotRef
from shmlane.inventory import clean_up
from shmlane.testing import Delay, ScriptedServer
from tests.sessions import all_free
from tests.unit.one_slot import INPUT, OUTPUT, files_of, one_slot, serving

_SESSIONS = 3
_STEPS = 5


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


class Journey:
    """One slot that goes from session to session, and grows now and then."""

    def __init__(self, home: Session, dice: random.Random) -> None:
        self._home = home
        self._dice = dice
        self._size = 8
        self._ref: SlotRef | None = None

    def go_on(self, session: Session) -> None:
        """A step: the slot is had by `session`, or is at home again."""
        dice = self._dice
        with self.lease(session) as lease:
            if dice.random() < 0.6:
                self._size *= 4
            lease.write(INPUT, np.full((1, 1, 1, self._size), 3, np.float32))
            if dice.random() < 0.5:
                output = lease.infer()[OUTPUT]
                assert output.shape[-1] == self._size
                assert (output == 3).all()
                del output
            if dice.random() < 0.6:
                self._ref = lease.detach()

    def lease(self, session: Session) -> Lease:
        if self._ref is None:
            return self._home.lease()
        ref, self._ref = self._ref, None
        return session.adopt(ref)

    def end(self, session: Session) -> None:
        if self._ref is not None:
            self.lease(session).release()


@pytest.mark.parametrize("seed", range(24))
def test_what_a_slot_grew_out_of_is_removed_whoever_closes_last(
    server: ScriptedServer, seed: int
) -> None:
    dice = random.Random(seed)
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(
                Session(server.url, "identity", slots=1, shapes={INPUT: (1, 1, 1, 8)})
            )
            for _ in range(_SESSIONS)
        ]
        journey = Journey(sessions[0], dice)
        for _ in range(_STEPS):
            journey.go_on(dice.choice(sessions))
        journey.end(dice.choice(sessions))
        assert all(session.stats().free == 1 for session in sessions)
        for session in dice.sample(sessions, _SESSIONS):
            session.close()
    assert files_of(server) == []


def test_a_borrower_that_gives_up_leaves_what_it_grew_out_of_to_the_home(
    server: ScriptedServer,
) -> None:
    """The home goes on where the slot lay before, as after a borrower's death."""
    go = threading.Event()
    with one_slot(server.url) as home:
        with home.lease() as lease:
            lease.write(INPUT, np.full((1, 1, 1, 100), 1, np.float32))
            ref = lease.detach()
        with one_slot(server.url, limit=1.0) as borrower, borrower.adopt(ref) as lease:
            lease.write(INPUT, np.full((1, 1, 1, 5000), 2, np.float32))
            server.script(Delay(go))
            with pytest.raises(InferTimeout):
                lease.infer()
            lease.release()
            borrower.close(wait=False)
        go.set()
        all_free(home)
        server.unregister_all()
        with home.lease() as lease:
            # Not larger than it was before, so that it lies where it lay.
            lease.write(INPUT, np.full((1, 1, 1, 100), 3, np.float32))
            with contextlib.suppress(InferFailed):
                # The first reply of this size may not fit.
                lease.infer()
            assert (lease.infer()[OUTPUT] == 3).all()
    # What the server was still using had to stay for whoever comes next.
    clean_up(only=server.url)
    assert files_of(server) == []
