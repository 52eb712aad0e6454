"""Limits too short to send anything: told as such, by every way of asking alike."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmlane import AsyncSession, InferTimeout, ServerUnreachable, Session, Timeouts
from shmlane.endpoint import Endpoint
from shmlane.testing import Delay, ScriptedServer
from shmlane.timing import in_seconds
from tests.sessions import all_free, frame
from tests.unit.asked import asked
from tests.unit.one_slot import INPUT, one_slot, serving, state
from tests.unit.tasks import asking

ITEM = {INPUT: frame(1)}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    with one_slot(server.url) as session:
        yield session
        all_free(session)


def lease_infer(session: Session, timeout: float) -> object:
    with session.lease() as lease:
        lease.write(INPUT, frame(1))
        return lease.infer(timeout=timeout).copy()


WAYS: dict[str, Callable[[Session, float], Any]] = {
    "infer": lambda session, timeout: session.infer(ITEM, timeout=timeout),
    "lease": lease_infer,
    "submit": lambda session, timeout: session.submit(ITEM, timeout=timeout).result(5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_ready", [False, True])
def test_without_time_nothing_is_sent(
    server: ScriptedServer, session: Session, way: str, is_ready: bool
) -> None:
    if is_ready:
        session.infer(ITEM)
    before = len(asked(server))
    for timeout in (0, 0.0):
        with pytest.raises(InferTimeout, match="of 0 s; nothing was sent"):
            WAYS[way](session, timeout)
        assert state(session) == "free"
    assert len(asked(server)) == before


@pytest.mark.parametrize("is_ready", [False, True])
def test_without_time_nothing_is_sent_by_a_task(
    server: ScriptedServer, is_ready: bool
) -> None:
    async def ask(session: AsyncSession) -> None:
        with pytest.raises(InferTimeout, match="of 0 s; nothing was sent"):
            await session.infer(ITEM, timeout=0.0)
        with pytest.raises(InferTimeout, match="of 0 s; nothing was sent"):
            await (await session.submit(ITEM, timeout=0.0))

    async def run() -> None:
        async with asking(server.url) as session:
            if is_ready:
                await session.infer(ITEM)
            before = len(asked(server))
            await ask(session)
            assert session.stats().free == 1
            assert len(asked(server)) == before

    asyncio.run(run())


def test_a_registration_that_outlasts_the_callers_time_is_no_server_that_is_away(
    server: ScriptedServer, session: Session
) -> None:
    session.infer(ITEM)
    go = threading.Event()
    server.unregister_all()
    server.script(Delay(go), Delay(go), path="/register")
    before = len(asked(server))
    for way in ("infer", "submit"):
        with pytest.raises(InferTimeout, match=r"no time was left of .* was sent"):
            # Long enough for that answer, too.
            WAYS[way](session, 0.3)
    # The very first attempt of the request was answered: its memory was not known.
    assert len(asked(server)) == before + 1
    go.set()
    assert session.infer(ITEM)


def test_a_limit_of_less_than_a_request_takes_is_no_server_that_is_away(
    server: ScriptedServer, session: Session
) -> None:
    session.infer(ITEM)
    for way in WAYS.values():
        with server.hold(), pytest.raises(InferTimeout, match=r"(of|within) .* m?s"):
            way(session, 0.0001)
        all_free(session)


def test_a_server_that_is_away_is_told_as_such_whatever_the_limit(
    server: ScriptedServer,
) -> None:
    limits = Timeouts(connect=0.5)
    with Session(server.url, "identity", slots=1, timeouts=limits) as session:
        session.infer(ITEM)
        server.stop()
        for timeout in (0.1, 5.0):
            with pytest.raises(ServerUnreachable, match="could not connect"):
                session.infer(ITEM, timeout=timeout)
        server.start()


def test_a_server_that_was_seen_to_be_away_is_told_as_such_when_the_time_is_up(
    server: ScriptedServer, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.infer(ITEM)
    server.restart()
    seen = iter([ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")])

    def connect(*_: object) -> None:
        # As where the thread comes to its next try when no time is left.
        raise next(
            seen, BlockingIOError(errno.EINPROGRESS, "Operation now in progress")
        )

    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "connect", connect)
        with pytest.raises(ServerUnreachable, match="Connection refused"):
            session.infer(ITEM, timeout=0.03)
    assert session.infer(ITEM)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (None, "no limit"),
        (0, "0 s"),
        (0.00003, "0.03 ms"),
        (0.0001, "0.1 ms"),
        (0.00099, "0.99 ms"),
        (0.001, "0.001 s"),
        (0.12345, "0.123 s"),
        (60.0, "60 s"),
    ],
)
def test_a_limit_is_never_rounded_to_nothing(limit: float | None, text: str) -> None:
    assert in_seconds(limit) == text
