"""Steps of sequences whose reply never comes: who waits for them, and until when."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmlane import RequestLost, RequestOptions, Session
from shmlane.inventory import clean_up
from shmlane.testing import Close, Delay, ScriptedServer
from tests.patience import given_up
from tests.polling import eventually
from tests.unit.asked import asked, scores, session_on
from tests.unit.one_slot import files_of

ROW = np.ones((1, 4), np.float32)
FIRST = RequestOptions(sequence_id=7, sequence_start=True)
NEXT = RequestOptions(sequence_id=7)
VERSIONS = ["2.49.0", "2.51.0"]
# Servers before 2.50 do not tell when they have let go of memory.
OLD = VERSIONS[0]


def step(
    session: Session, options: RequestOptions | None, *, timeout: float = 10.0
) -> None:
    came = session.infer({"X": ROW}, options=options, timeout=timeout)
    assert came["Y"].tolist() == ROW.tolist()


def end(server: ScriptedServer) -> None:
    """As a kill does; the next one holds nothing back."""
    server.stop()
    server.release()


def give_up_on_a_step(session: Session, options: RequestOptions) -> None:
    given_up(lambda limit: step(session, options, timeout=limit))
    assert session.stats().late == 1


# --- over the wire --------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_late_step_over_the_wire_whose_server_ends_frees_its_slot(
    version: str,
) -> None:
    with session_on(scores(), memory="wire", server={"version": version}) as (
        server,
        session,
    ):
        server.hold()
        give_up_on_a_step(session, FIRST)
        end(server)
        # There is no server that could be asked, and nothing to ask it.
        eventually(lambda: session.stats().free == 1, lambda: repr(session.stats()))
        stats = session.stats()
        assert (stats.late_replies, stats.drains, stats.retired) == (0, 0, 0)
        server.start()
        step(session, NEXT)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_late_step_over_the_wire_whose_connection_is_closed_frees_its_slot(
    version: str,
) -> None:
    with session_on(scores(), memory="wire", server={"version": version}) as (
        server,
        session,
    ):
        came = threading.Event()
        server.script(Delay(came))
        give_up_on_a_step(session, FIRST)
        before = session.stats().connections
        came.set()
        eventually(lambda: session.stats().free == 1)
        assert session.stats().late_replies == 1
        server.script(Close())
        with pytest.raises(RequestLost):
            step(session, NEXT)
        stats = session.stats()
        assert (stats.free, stats.lost, stats.drains, stats.retired) == (1, 0, 0, 0)
        step(session, NEXT)
        assert session.stats().connections == before + 1


def test_a_session_over_the_wire_closes_when_a_late_step_is_answered() -> None:
    with (
        session_on(scores(), memory="wire") as (server, session),
        ThreadPoolExecutor(1) as pool,
    ):
        came = threading.Event()
        server.script(Delay(came))
        give_up_on_a_step(session, NEXT)
        closing = pool.submit(session.close)
        eventually(lambda: "closed" in repr(session))
        assert not closing.done()
        came.set()
        closing.result(10.0)
        assert (server.regions, files_of(server)) == ({}, [])


def test_a_session_over_the_wire_need_not_wait_for_a_late_step_to_close() -> None:
    with session_on(scores(), memory="wire") as (server, session):
        with server.hold():
            give_up_on_a_step(session, NEXT)
            session.close(wait=False)
            # The second time there is nothing to wait for either.
            begun = time.monotonic()
            session.close()
            assert time.monotonic() - begun < 5.0
            server.wait_for(1)
        eventually(lambda: server.in_model == 0)
        assert session.stats().late_replies == 0


# --- a slot that never comes back -----------------------------------------------------


@contextlib.contextmanager
def on_an_old_server(*, slots: int = 1) -> Iterator[tuple[ScriptedServer, Session]]:
    """Retired memory is left to whoever finds that the server has ended."""
    told = {"version": OLD}
    with session_on(scores(), server=told, slots=slots) as (server, session):
        yield server, session
    clean_up(only=server.url)
    assert files_of(server) == []


def lose(server: ScriptedServer, session: Session) -> None:
    server.script(Close())
    with pytest.raises(RequestLost):
        step(session, FIRST)


def give_up_and_lose(server: ScriptedServer, session: Session) -> None:
    server.hold()
    give_up_on_a_step(session, FIRST)
    end(server)
    server.start()


@pytest.mark.parametrize("fail", [lose, give_up_and_lose])
@pytest.mark.parametrize("options", [FIRST, NEXT])
def test_nobody_waits_for_a_step_whose_slot_was_retired(
    fail: Callable[[ScriptedServer, Session], None], options: RequestOptions
) -> None:
    with on_an_old_server() as (server, session):
        fail(server, session)
        eventually(lambda: session.stats().retired == 1, lambda: repr(session))
        sent = len(asked(server))
        for _ in range(2):
            step(session, options)
        assert len(asked(server)) == sent + 2
        assert session.stats().free == 1


def test_a_step_waits_no_longer_than_until_the_slot_of_the_last_is_retired() -> None:
    with (
        on_an_old_server(slots=2) as (server, session),
        ThreadPoolExecutor(1) as pool,
    ):
        server.hold()
        give_up_on_a_step(session, FIRST)
        later = pool.submit(step, session, NEXT)
        eventually(lambda: session.stats().leased == 1)
        assert not later.done()
        end(server)
        server.start()
        later.result(10.0)
        assert session.stats().retired == 1
