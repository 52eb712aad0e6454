"""Requests that are sent again, once the server has let go of the lost one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import Connection, RequestLost, Session, Timeouts
from shmlane.inventory import clean_up
from shmlane.testing import Close, ScriptedServer, sink_model
from tests.unit.scripted import SMALL


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()]) as server:
        yield server
    # What a session left that could not ask for its registrations to be taken back.
    clean_up(only=server.url)


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    with Session(
        server.url,
        "sink",
        slots=1,
        shapes={"INPUT__0": (1, 1, 1, 4)},
        connection=Connection(replay=True),
        timeouts=Timeouts(connect=0.3),
        region=SMALL,
    ) as session:
        yield session


def ask(session: Session, value: float, *, timeout: float = 10.0) -> float:
    array = np.full((1, 1, 1, 4), value, np.float32)
    outputs = session.infer({"INPUT__0": array}, timeout=timeout)
    return float(outputs["OUTPUT__0"][0])


def test_a_lost_request_is_sent_again_through_a_few_closed_connections(
    server: ScriptedServer, session: Session
) -> None:
    server.script(Close())
    server.script(*[Close()] * 3, path="/status")
    assert ask(session, 3) == 3


def test_a_server_that_closes_every_connection_is_not_stormed(
    server: ScriptedServer, session: Session
) -> None:
    # As Triton does from SIGTERM on, and a proxy without a server.
    server.script(Close())
    server.script(*[Close()] * 1000, path="/status")
    before = session.stats().connections
    with pytest.raises(RequestLost):
        ask(session, 3, timeout=1.5)
    assert 3 < session.stats().connections - before < 30
