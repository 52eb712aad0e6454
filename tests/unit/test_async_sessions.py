"""Sessions of event loops: their one loop, their end, and what is left without one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import urllib.request
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from shmlane import AsyncSession, PoolClosed, ServerUnreachable, UsageError
from shmlane.testing import Answer, Delay, ScriptedServer
from tests.sessions import frame
from tests.unit.children import run_python
from tests.unit.one_slot import INPUT, OUTPUT, serving
from tests.unit.scripted import error
from tests.unit.tasks import (
    asking,
    becomes,
    cancel,
    comes,
    echo,
    fill,
    in_a_loop,
    serves_right,
    state,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


# --- opening --------------------------------------------------------------------------


@in_a_loop
async def test_the_first_use_opens_the_session(server: ScriptedServer) -> None:
    for use in (
        lambda each: echo(each, 1),
        lambda each: each.warmup(),
        lambda each: each.open(),
        _stream,
        _take_a_lease,
    ):
        session = asking(server.url)
        with pytest.raises(UsageError, match="opened first"):
            _ = session.metadata
        await use(session)
        assert session.metadata.name == "identity"
        await serves_right(session)
        await session.close()


@in_a_loop
async def test_many_tasks_that_use_it_first_open_it_once(
    server: ScriptedServer,
) -> None:
    session = asking(server.url, slots=2)
    await asyncio.gather(*(echo(session, value) for value in range(20)))
    assert sum("register" in each.path for each in server.requests) == 2
    await session.close()


@in_a_loop
async def test_it_can_be_opened_after_it_could_not(server: ScriptedServer) -> None:
    session = asking(server.url, limit=0.5)
    server.stop()
    with pytest.raises(ServerUnreachable):
        await session.open()
    opening = asyncio.create_task(session.open(wait=10.0))
    await asyncio.sleep(0)
    server.start()
    assert await opening is session
    await serves_right(session)
    await session.close()


# --- closing --------------------------------------------------------------------------


@in_a_loop
async def test_closing_it_ends_the_wait_for_slots(server: ScriptedServer) -> None:
    async with asking(server.url) as session:
        async with session.lease():
            waiting = [asyncio.create_task(echo(session, each)) for each in range(3)]
            await comes(lambda: session.stats().waits == 3, "three tasks wait")
            await session.close()
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in ended] == 3 * [PoolClosed]
        await comes(lambda: not server.regions, "the last lease takes back the rest")


@pytest.mark.parametrize("wait", [True, False])
@in_a_loop
async def test_closing_it_lets_tasks_have_their_replies(
    server: ScriptedServer, wait: bool
) -> None:
    session = asking(server.url, slots=2)
    await session.open()
    with server.hold():
        tasks = [asyncio.create_task(echo(session, each)) for each in range(2)]
        await comes(lambda: server.in_model == 2, "both are in the model")
        closing = asyncio.create_task(session.close(wait=wait))
        if not wait:
            await closing
        await comes(lambda: "closed" in repr(session), "it closes")
        with pytest.raises(PoolClosed):
            await session.lease()
    await asyncio.gather(closing, *tasks)
    await comes(lambda: not server.regions, "nothing is registered")


@in_a_loop
async def test_a_request_that_would_have_to_be_sent_again_ends_with_the_session(
    server: ScriptedServer,
) -> None:
    session = asking(server.url)
    await echo(session, 1)
    server.script(Answer(error(400, "Unable to find shared memory region: 'gone'")))
    with server.hold():
        task = asyncio.create_task(echo(session, 2))
        await comes(lambda: server.in_model == 1, "it is in the model")
        await session.close(wait=False)
    with pytest.raises(PoolClosed):
        await task
    await comes(lambda: not server.regions, "nothing is registered")


@in_a_loop
async def test_a_thread_that_works_on_a_slot_does_so_until_its_end(
    server: ScriptedServer,
) -> None:
    session = asking(server.url)
    await echo(session, 1)
    may_go_on = threading.Event()
    server.unregister_all()
    server.script(Delay(may_go_on), path="/register")
    before = len(server.requests)
    task = asyncio.create_task(echo(session, 2))
    await comes(lambda: len(server.requests) > before + 1, "it is registered again")
    await session.close()
    may_go_on.set()
    await task
    await comes(lambda: not server.regions, "nothing is registered")


@in_a_loop
async def test_a_close_that_is_cancelled_is_finished_by_another(
    server: ScriptedServer,
) -> None:
    session = asking(server.url)
    await session.open()
    with server.hold():
        task = asyncio.create_task(echo(session, 1))
        await comes(lambda: server.in_model == 1, "it is in the model")
        closing = asyncio.create_task(session.close())
        await comes(lambda: "closed" in repr(session), "it closes")
        await cancel(closing)
    await task
    await session.close()
    await comes(lambda: not server.regions, "nothing is registered")
    await session.close()


@in_a_loop
async def test_a_session_that_was_never_opened_is_closed_at_once(
    server: ScriptedServer,
) -> None:
    session = asking(server.url)
    await session.close()
    with pytest.raises(PoolClosed):
        await echo(session, 1)
    assert server.requests == ()


# --- without an end -------------------------------------------------------------------


@in_a_loop
async def test_a_session_that_is_dropped_says_so_and_leaves_nothing(
    server: ScriptedServer,
) -> None:
    before = descriptors(server)
    session = asking(server.url)
    await echo(session, 1)
    sessions = [session]
    del session
    with pytest.warns(ResourceWarning, match="dropped without close"):
        sessions.clear()
    await comes(lambda: server.regions == {}, "the server has forgotten it")
    await comes(lambda: descriptors() <= before, "no descriptor is left")


def test_a_session_that_is_dropped_when_its_loop_has_ended(
    server: ScriptedServer,
) -> None:
    before = descriptors(server)
    session = asking(server.url)
    asyncio.run(echo(session, 1))
    sessions = [session]
    del session
    with pytest.warns(ResourceWarning, match="dropped without close"):
        sessions.clear()
    assert server.regions == {}
    assert descriptors() <= before


def test_a_session_can_be_closed_when_its_loop_has_ended(
    server: ScriptedServer,
) -> None:
    before = descriptors(server)
    session = asking(server.url)
    asyncio.run(echo(session, 1))
    asyncio.run(session.close())
    assert server.regions == {}
    assert descriptors() <= before


def test_a_loop_that_ends_with_requests_in_flight_loses_no_slot(
    server: ScriptedServer,
) -> None:
    session = asking(server.url, slots=2)

    async def leave() -> None:
        task = asyncio.create_task(echo(session, 1))
        await comes(lambda: server.in_model == 1, "it is in the model")
        lease = await session.lease()
        # The task is cancelled with the loop, and nobody releases the lease.
        del task, lease

    with server.hold():
        with pytest.warns(ResourceWarning, match="without release"):
            asyncio.run(leave())
        assert state(session) == "free late"
    asyncio.run(becomes(session, "free"))
    asyncio.run(session.close())


# --- other loops ----------------------------------------------------------------------


def test_another_event_loop_is_refused(server: ScriptedServer) -> None:
    session = asking(server.url)
    leases = []

    async def begin() -> None:
        leases.append(await session.lease())
        fill(leases[0], 1)

    asyncio.run(begin())
    for use in (
        lambda: echo(session, 1),
        lambda: session.open(),
        lambda: session.warmup(),
        lambda: leases[0].infer(),
        lambda: _stream(session),
        lambda: _take_a_lease(session),
    ):
        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(use())
    assert state(session) == "leased"
    leases[0].release()
    asyncio.run(session.close())


@in_a_loop
async def test_the_loop_of_another_thread_is_refused_but_may_close(
    server: ScriptedServer,
) -> None:
    before = descriptors(server)
    session = asking(server.url)
    await echo(session, 1)

    async def elsewhere(use: Coroutine[Any, Any, None]) -> None:
        await asyncio.to_thread(asyncio.run, use)

    with pytest.raises(UsageError, match="another event loop"):
        await elsewhere(echo(session, 2))
    await serves_right(session)
    await elsewhere(session.close())
    assert server.regions == {}
    await comes(lambda: descriptors() <= before, "no descriptor is left")


# --- forks ----------------------------------------------------------------------------

FORK = """
import asyncio, os, sys
import numpy as np
from shmlane import AsyncSession, ForkedSession

ROW = {"INPUT__0": np.full((1, 1, 1, 8), 7.0, np.float32)}

async def refused(session):
    for use in (session.infer(ROW), session.open(), session.warmup()):
        try:
            await use
        except ForkedSession:
            continue
        os._exit(1)
    await session.close()

async def main():
    async with AsyncSession(sys.argv[1], "identity", slots=2) as session:
        await session.infer(ROW)
        if not (child := os.fork()):
            asyncio.run(refused(session))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        # The loop still hears of replies.
        for _ in range(3):
            outputs = await asyncio.wait_for(session.infer(ROW), 5.0)
            assert (outputs["OUTPUT__0"] == 7.0).all()
    print("served")

asyncio.run(main())
"""


def test_a_forked_child_is_refused_and_harms_nothing(server: ScriptedServer) -> None:
    assert run_python(FORK, server.url) == "served\n"


# --- tools ----------------------------------------------------------------------------


async def _stream(session: AsyncSession) -> None:
    async for came in session.stream([{INPUT: frame(1)}]):
        np.testing.assert_array_equal(came[OUTPUT], frame(1))


async def _take_a_lease(session: AsyncSession) -> None:
    async with session.lease() as lease:
        fill(lease, 1)


def descriptors(server: ScriptedServer | None = None) -> int:
    """How many of those that this process has open are a loop's, or a session's.

    server: has those that it needs, by then.
    """
    if server is not None:
        with urllib.request.urlopen(f"http://{server.url}/v2/health/live"):
            pass
    links = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum("eventpoll" in each or "shmlane" in each for each in links)
