"""`replay=True` sends a request a second time, and never a third."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmlane import Connection, RequestLost, RequestOptions, Session
from shmlane.testing import Close, Reset, ScriptedServer, Truncate
from shmlane.testing.faults import Fault
from tests.polling import eventually
from tests.unit.asked import Repeat, asked, count_of, session_on

FAULTS: list[Fault] = [Close(), Reset(), Truncate(30)]


@pytest.fixture
def repeat() -> Repeat:
    return Repeat()


@pytest.fixture(params=["system", "wire"])
def pair(
    request: pytest.FixtureRequest, repeat: Repeat
) -> Iterator[tuple[ScriptedServer, Session]]:
    replay = Connection(replay=True)
    with session_on(
        repeat.model, memory=request.param, connection=replay, outputs={"Y": (8,)}
    ) as pair:
        yield pair


def await_runs(session: Session, repeat: Repeat, count: int) -> None:
    """The model runs on behind a connection that is closed.

    Where its input was in a slot, that may have been taken from it meanwhile.
    """
    if "memory 'wire'" in repr(session):
        eventually(lambda: repeat.runs == count)
    assert repeat.runs <= count


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_request_that_is_lost_each_time_is_sent_twice(
    pair: tuple[ScriptedServer, Session], repeat: Repeat, fault: Fault
) -> None:
    server, session = pair
    server.script(*[fault] * 10)
    for number in (1, 2):
        with pytest.raises(RequestLost, match="the model may have run"):
            count_of(session, 3)
        assert len(asked(server)) == 2 * number
        eventually(lambda: session.stats().free == 1, lambda: repr(session))
        await_runs(session, repeat, 2 * number)
        assert session.stats().retries == number


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_request_that_is_lost_once_is_answered(
    pair: tuple[ScriptedServer, Session], repeat: Repeat, fault: Fault
) -> None:
    server, session = pair
    for number in range(3):
        server.script(fault)
        assert count_of(session, number + 1) == number + 1
    assert len(asked(server)) == 6
    await_runs(session, repeat, 6)


def test_a_step_of_a_sequence_is_sent_once(
    pair: tuple[ScriptedServer, Session], repeat: Repeat
) -> None:
    server, session = pair
    server.script(Close())
    with pytest.raises(RequestLost):
        session.infer(
            {"X": np.ones(1, np.float32)}, options=RequestOptions(sequence_id=7)
        )
    assert len(asked(server)) == 1


def test_what_did_not_fit_is_no_second_chance_to_replay() -> None:
    repeat = Repeat()
    told: dict[str, Any] = {"rerun": True, "connection": Connection(replay=True)}
    with session_on(repeat.model, outputs={"Y": (4,)}, **told) as (server, session):
        # Lost, then too small for the block, then lost again.
        server.script(Close())
        assert count_of(session, 4096) == 4096
        assert (len(asked(server)), session.stats().reruns) == (3, 1)
        server.script(Close(), Close(), Close())
        with pytest.raises(RequestLost):
            count_of(session, 8192)
        assert len(asked(server)) == 5
