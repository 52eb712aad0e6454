"""What a cancelled task began is finished, and its errors are told to nobody."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shmlane import OutOfSharedMemory, RequestLost
from shmlane.board import Board
from shmlane.memory import SessionMemory
from shmlane.testing import Delay, ScriptedServer
from tests.unit.one_slot import OUTPUT, files_of, serving
from tests.unit.tasks import (
    asking,
    becomes,
    cancel,
    comes,
    echo,
    fill,
    in_a_loop,
    serves_right,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """The loop hears of no error that nobody asked for."""
    heard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    yield
    gc.collect()
    assert heard == []


def asked(server: ScriptedServer, path: str) -> int:
    return sum(path in request.path for request in server.requests)


@in_a_loop
async def test_what_fails_in_a_thread_for_a_cancelled_task_is_not_told(
    server: ScriptedServer,
) -> None:
    go = threading.Event()
    async with asking(server.url) as session:
        await echo(session, 1)
        server.unregister_all()
        server.script(Delay(go), path="/register")
        with unheard():
            task = asyncio.create_task(echo(session, 2, timeout=1.0))
            await comes(lambda: asked(server, "/register") == 2, "a thread works")
            await cancel(task)
            del task
            await becomes(session, "free")
        go.set()
        await serves_right(session)


@in_a_loop
async def test_spare_slots_that_fail_for_a_cancelled_task_are_not_told(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, go = threading.Event(), threading.Event()
    make = SessionMemory.make_slots
    calls = iter(range(2))

    def fail(memory: SessionMemory, count: int) -> Any:
        if next(calls) == 0:
            return make(memory, count)
        making.set()
        assert go.wait(10)
        raise OutOfSharedMemory("for this test")

    monkeypatch.setattr(SessionMemory, "make_slots", fail)
    async with asking(server.url) as session:
        async with session.lease() as lease:
            fill(lease, 1)
            kept = (await lease.infer())[OUTPUT]
        with unheard():
            task = asyncio.create_task(echo(session, 2))
            await comes(making.is_set, "a thread makes spare slots")
            task.cancel()
            await asyncio.sleep(0.01)
            go.set()
            await asyncio.wait({task})
            del task
        del kept
        await serves_right(session)


@in_a_loop
async def test_closing_that_is_cancelled_is_finished(server: ScriptedServer) -> None:
    go = threading.Event()
    session = await asking(server.url).open()
    await echo(session, 1)
    server.script(Delay(go), path="/unregister")
    with unheard():
        task = asyncio.create_task(session.close())
        await comes(lambda: asked(server, "/unregister") == 1, "it is being closed")
        await cancel(task)
        del task
        go.set()
        await comes(lambda: not server.regions, "the server has forgotten it")
        await comes(lambda: not files_of(server), "its memory is removed")
    # Nothing is left that dropping it would warn of.
    del session
    gc.collect()


@in_a_loop
async def test_a_reply_that_the_loop_cannot_watch_for_is_lost(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with asking(server.url) as session:
        with monkeypatch.context() as patch, unheard():
            patch.setattr(Board, "expect", refuse)
            with pytest.raises(RequestLost, match="No space left"):
                await echo(session, 1)
        await serves_right(session)
