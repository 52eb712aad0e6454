"""Registrations over connections that break: made again, but not for ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import ServerUnreachable, Session
from shmlane.inventory import clean_up
from shmlane.testing import Close, ScriptedServer, sink_model
from tests.unit.scripted import SMALL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

TRIES = 5


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()]) as server:
        yield server
    clean_up(only=server.url)


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    with Session(
        server.url,
        "sink",
        slots=1,
        shapes={"INPUT__0": (1, 1, 1, 4)},
        region=SMALL,
    ) as session:
        yield session


def ask_more_than_fits(session: Session) -> float:
    """The input moves to a region that the server does not know yet."""
    array = np.full((1, 1, 1, 9000), 3, np.float32)
    return float(session.infer({"INPUT__0": array})["OUTPUT__0"][0])


def registrations(server: ScriptedServer) -> int:
    return sum(request.path.endswith("/register") for request in server.requests)


def test_a_registration_survives_connections_that_break(
    server: ScriptedServer, session: Session
) -> None:
    before = registrations(server)
    server.script(*[Close()] * (TRIES - 1), path="/register")
    assert ask_more_than_fits(session) == 3
    assert registrations(server) - before == TRIES


def test_a_server_that_breaks_every_connection_is_tried_a_few_times_only(
    server: ScriptedServer, session: Session
) -> None:
    before = registrations(server)
    server.script(*[Close()] * TRIES, path="/register")
    with pytest.raises(ServerUnreachable):
        ask_more_than_fits(session)
    assert registrations(server) - before == TRIES
    # The slot is as good as before.
    assert ask_more_than_fits(session) == 3
