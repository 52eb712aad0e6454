"""Registrations that nobody waits for any more, and that the server does after all.

A server that stood still does what lies in its sockets in any order: what came first,
over a connection that its client has given up, may be done last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import InferTimeout, Session
from shmlane.testing import Delay, ScriptedServer, sink_model
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.scripted import SMALL

VERSIONS = ("2.51.0", "2.55.0", "2.73.0")


@pytest.fixture(params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    version: str = request.param
    models = [sink_model()]
    with ScriptedServer(models, version=version, allow_client_shm=True) as server:
        yield server


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    shapes = {"INPUT__0": (1, 1, 1, 4)}
    with Session(server.url, "sink", slots=1, shapes=shapes, region=SMALL) as session:
        yield session


def ask(session: Session, value: float, *, timeout: float = 10.0) -> float:
    array = np.full((1, 1, 1, 4), value, np.float32)
    outputs = session.infer({"INPUT__0": array}, timeout=timeout)
    return float(outputs["OUTPUT__0"][0])


def give_up_registering(session: Session, server: ScriptedServer) -> threading.Event:
    """Have a registration that the server does once the event is set."""
    go = threading.Event()
    server.unregister_all()
    server.script(Delay(go), path="/register")
    limit = 0.1
    # As often as the server needs to get there: first it says that it knows nothing.
    while server.faults:
        with pytest.raises(InferTimeout):
            ask(session, 1, timeout=limit)
        all_free(session)
        limit *= 2
    return go


def test_an_overtaken_registration_does_not_block_its_slot(
    server: ScriptedServer, session: Session
) -> None:
    first = give_up_registering(session, server)
    second = threading.Event()
    server.script(Delay(second), path="/register")
    answers: list[float] = []
    asking = threading.Thread(target=lambda: answers.append(ask(session, 2)))
    asking.start()
    eventually(lambda: not server.faults, "the next name is to be registered")
    first.set()
    eventually(lambda: server.regions, "the name that was taken back is registered")
    second.set()
    asking.join()
    assert answers == [2]


def test_an_overtaken_registration_is_taken_back_with_the_next_one(
    server: ScriptedServer, session: Session
) -> None:
    go = give_up_registering(session, server)
    assert ask(session, 2) == 2
    known = set(server.regions)
    go.set()
    eventually(lambda: set(server.regions) > known, "it is registered after all")
    (late,) = set(server.regions) - known
    # Its own region is left alone; the slot needs another one as well.
    shape = (1, 1, 1, 5000)
    outputs = session.infer({"INPUT__0": np.full(shape, 3, np.float32)})
    assert outputs["OUTPUT__0"] == [3]
    assert late not in server.regions


def test_an_overtaken_registration_is_taken_back_at_the_end(
    server: ScriptedServer, session: Session
) -> None:
    go = give_up_registering(session, server)
    assert ask(session, 2) == 2
    go.set()
    eventually(lambda: len(server.regions) == 2, "it is registered after all")
    session.close()
    assert not server.regions
