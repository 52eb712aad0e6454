"""What comes between fails as it says, and a session lives through it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import Session, ShmlaneError, Timeouts
from shmlane.testing import ScriptedServer, identity_model
from tests.chaos.between import BETWEEN, Between
from tests.polling import eventually
from tests.sessions import frame

NAME, OUTPUT, SHAPE = "INPUT__0", "OUTPUT__0", (1, 1, 1, 8)


@pytest.fixture
def between(tmp_path: Path) -> Iterator[Between]:
    with ScriptedServer([identity_model()]) as server:
        dice = random.Random(f"{random.getrandbits(32)}")
        with Between(server.url, folder=tmp_path, dice=dice) as between:
            yield between


@pytest.fixture
def sessions(between: Between) -> Iterator[list[Session]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Session(
                    url,
                    "identity",
                    slots=2,
                    shapes={NAME: SHAPE},
                    outputs={OUTPUT: SHAPE},
                    timeouts=Timeouts(connect=1.0, infer=1.0),
                )
            )
            for url in between.urls
        ]


def echo(session: Session, value: float) -> None:
    came = session.infer({NAME: frame(value)})[OUTPUT]
    assert came.tolist() == frame(value).tolist()


def echoes(session: Session) -> bool:
    """False when a fault makes the call fail; a wrong value fails the test."""
    try:
        echo(session, random.random())
    except ShmlaneError:
        return False
    return True


@pytest.mark.parametrize("fault", BETWEEN)
def test_calls_work_again_once_a_fault_has_ended(
    between: Between, sessions: list[Session], fault: str
) -> None:
    undo = BETWEEN[fault](between)
    for session in sessions:
        echoes(session)
    if undo is not None:
        undo()
    for session in sessions:
        eventually(lambda session=session: echoes(session))  # type: ignore[misc]
        echo(session, 2.0)


def test_no_call_notices_what_befell_its_connection_while_it_was_idle(
    between: Between, sessions: list[Session]
) -> None:
    for number in range(20):
        for session in sessions:
            # The last two replies on a connection are of inferences then.
            for value in (0.25, 0.5):
                echo(session, number + value)
        assert between.spoil() >= len(sessions)
        for session in sessions:
            echo(session, number + 0.75)
