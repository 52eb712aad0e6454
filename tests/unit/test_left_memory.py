"""Sessions that end while their server does not answer: what they leave, and to whom.

A server keeps what it has registered, and only the files tell whose that was. So they
stay, as after a crash, until somebody can take back both.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import InferTimeout, RequestLost, ServerUnreachable, Session, Timeouts
from shmlane.inventory import clean_up
from shmlane.slots import Slot
from shmlane.testing import Answer, Close, Delay, Fault, ScriptedServer, sink_model
from tests.polling import eventually
from tests.unit.one_slot import files_of
from tests.unit.scripted import SMALL


@pytest.fixture
def server(thorough: None) -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()]) as server:
        yield server
        # The next session cleans up after all others.
        with session_at(server):
            assert set(files_of(server)) == keys(server)
        assert not files_of(server)
        assert not server.regions


def session_at(
    server: ScriptedServer, *, connect: float = 10.0, infer: float = 10.0
) -> Session:
    return Session(
        server.url,
        "sink",
        slots=2,
        shapes={"INPUT__0": (1, 1, 1, 4)},
        timeouts=Timeouts(connect=connect, infer=infer),
        region=SMALL,
    )


def hasty(server: ScriptedServer, *, connect: float = 0.3) -> Session:
    """One that does not wait long for a server that is silent."""
    return session_at(server, connect=connect, infer=0.3)


def keys(server: ScriptedServer) -> set[str]:
    """Files that the server has registered."""
    return {each.key.lstrip("/") for each in server.regions.values()}


def ask(session: Session, size: int = 4) -> None:
    array = np.full((1, 1, 1, size), 5, np.float32)
    assert session.infer({"INPUT__0": array})["OUTPUT__0"] == [5]


@pytest.fixture
def go(server: ScriptedServer) -> Iterator[threading.Event]:
    """What a silent server waits for."""
    go = threading.Event()
    yield go
    go.set()


def test_files_stay_while_the_server_may_know_them(
    server: ScriptedServer, go: threading.Event
) -> None:
    with hasty(server) as session:
        ask(session)
        server.script(Delay(go), path="/unregister")
    assert set(files_of(server)) == keys(server)


def test_files_stay_whose_registration_was_taken_back_only_in_part(
    server: ScriptedServer, go: threading.Event
) -> None:
    with hasty(server) as session:
        ask(session)
        server.script(Delay(0), Delay(go), path="/unregister")
    assert len(server.regions) == 1
    assert set(files_of(server)) == keys(server)


def test_an_outgrown_file_stays_while_the_server_may_know_it(
    server: ScriptedServer, go: threading.Event
) -> None:
    with hasty(server) as session:
        ask(session, size=2000)
        server.script(Delay(go), path="/unregister")
        with pytest.raises(InferTimeout):
            ask(session, size=8000)
        server.script(Delay(go), path="/unregister")
    assert keys(server) <= set(files_of(server))


def test_files_stay_when_opening_fails_after_a_registration(
    server: ScriptedServer, go: threading.Event
) -> None:
    server.script(Delay(0), Delay(go), path="/register")
    server.script(Delay(go), path="/unregister")
    with pytest.raises(ServerUnreachable):
        hasty(server).open()
    assert set(files_of(server)) == keys(server)


@pytest.mark.parametrize("before", [0, 1])
def test_a_registration_that_comes_while_opening_fails_is_taken_back(
    server: ScriptedServer, go: threading.Event, before: int
) -> None:
    asked: list[bool] = []

    def register_late(reply: bytes) -> bytes:
        # It lay in a socket of the server until its name had been taken back. With the
        # file gone it is refused.
        go.set()
        asked.append(True)
        eventually(lambda: server.regions or not files_of(server))
        return reply

    server.script(Delay(go), path="/register")
    faults: list[Fault] = [Delay(0)] * before
    server.script(*faults, Answer(register_late), path="/unregister")
    with pytest.raises(ServerUnreachable):
        hasty(server).open()
    assert asked
    # On a slow machine the answer may come too late: then the files stay, and tell what
    # to take back. What must not be is a registration without its file.
    clean_up(only=server.url)
    assert not files_of(server)
    assert not server.regions


def test_files_stay_while_the_server_works_on_a_lost_request(
    server: ScriptedServer,
) -> None:
    session = session_at(server).open()
    with server.hold():
        server.script(Close())
        with pytest.raises(RequestLost):
            ask(session)
        session.close(wait=False)
        assert len(server.regions) == 1
        assert set(files_of(server)) == keys(server)
    eventually(lambda: server.in_model == 0, "the lost request has ended")


def test_files_go_at_once_where_no_server_is(server: ScriptedServer) -> None:
    with session_at(server, connect=0.3) as session:
        ask(session)
        server.stop()
    assert not files_of(server)
    server.start()


@pytest.mark.parametrize("wait", [True, False])
def test_nothing_stays_of_a_slot_that_comes_back_as_the_session_closes(
    server: ScriptedServer,
    go: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    wait: bool,
) -> None:
    session = hasty(server, connect=10.0).open()
    closing = threading.Thread(target=session.close, kwargs={"wait": wait})
    give_back = session._ensure_open().receiver._give_back

    def give_back_late(slot: Slot) -> None:
        # The slot looks free, and closing must wait for it all the same.
        closing.start()
        closing.join(0.3)
        give_back(slot)

    monkeypatch.setattr(session._ensure_open().receiver, "_give_back", give_back_late)
    server.script(Delay(go))
    with pytest.raises(InferTimeout):
        ask(session)
    go.set()
    eventually(lambda: closing.ident is not None, "the late reply has come")
    closing.join()
    assert not files_of(server)
    assert not server.regions


def test_nothing_stays_of_a_session_that_is_collected_as_a_slot_comes_back(
    server: ScriptedServer, go: threading.Event
) -> None:
    """By the very thread that is about to give the slot back."""

    def drop_a_session() -> None:
        session = hasty(server, connect=10.0).open()
        receiver = session._ensure_open().receiver
        give_back = receiver._give_back

        def collect_first(slot: Slot) -> None:
            gc.collect()
            give_back(slot)

        receiver._give_back = collect_first
        server.script(Delay(go))
        with pytest.raises(InferTimeout):
            ask(session)
        # Only the collector ends it.
        vars(session)["itself"] = session
        del session
        go.set()
        eventually(lambda: not receiver.is_busy, "the late reply has come")
        gc.collect()

    # By itself, the collector may come while the server still works on the request:
    # then the files have to stay.
    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="dropped without close"):
            drop_a_session()
    finally:
        gc.enable()
    assert not files_of(server)
    assert not server.regions


def test_files_stay_of_a_session_that_is_collected_while_the_server_works(
    server: ScriptedServer, go: threading.Event
) -> None:
    session = hasty(server, connect=10.0).open()
    server.script(Delay(go))
    with pytest.raises(InferTimeout):
        ask(session)
    server.wait_for(1)
    vars(session)["itself"] = session
    del session
    with pytest.warns(ResourceWarning, match="dropped without close"):
        gc.collect()
    assert len(server.regions) == 1
    assert set(files_of(server)) == keys(server)
    go.set()
    eventually(lambda: server.in_model == 0, "the late request has ended")


def test_closing_asks_the_server_for_nothing_while_leases_hold_everything(
    server: ScriptedServer,
) -> None:
    session = session_at(server).open()
    leases = [session.lease(), session.lease()]
    before = session.stats().connections
    session.close()
    assert session.stats().connections == before
    for lease in leases:
        lease.release()
    assert not files_of(server)
    assert not server.regions


def test_views_of_a_session_that_left_its_files_stay_valid(
    server: ScriptedServer, go: threading.Event
) -> None:
    with hasty(server) as session:
        with session.lease() as lease:
            view = lease["INPUT__0"]
            view[...] = 7
            output = lease.infer()["OUTPUT__0"]
        server.script(Delay(go), path="/unregister")
    assert files_of(server)
    assert (view == 7).all()
    assert output == [7]
