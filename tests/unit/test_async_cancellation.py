"""Tasks that are cancelled, at every moment of using a session: no slot is lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from shmlane import (
    AsyncSession,
    InferFailed,
    InferTimeout,
    LeaseTimeout,
    RequestOptions,
)
from shmlane.endpoint import Endpoint
from shmlane.memory import SessionMemory
from shmlane.testing import Answer, Delay, ScriptedServer, Status
from tests.fault_proxy import FaultProxy
from tests.sessions import frame
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


# --- waiting for a slot ---------------------------------------------------------------


@in_a_loop
async def test_cancelled_while_waiting_for_a_slot(server: ScriptedServer) -> None:
    async with asking(server.url) as session:
        async with session.lease():
            first = asyncio.create_task(echo(session, 1))
            second = asyncio.create_task(echo(session, 2))
            await comes(lambda: session.stats().waits == 2, "two tasks wait")
            await cancel(first)
        await second
        await serves_right(session)


@in_a_loop
async def test_cancelled_when_served_but_not_yet_running(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        lease = await session.lease()
        waiting = asyncio.create_task(echo(session, 1))
        await comes(lambda: session.stats().waits == 1, "a task waits")
        lease.release()
        # The task has the slot by now, and has not heard of it.
        assert state(session) == "free" or session.stats().free == 0
        await cancel(waiting)
        await serves_right(session)


@pytest.mark.parametrize("times", [1, 3])
@in_a_loop
async def test_cancelled_while_spare_slots_are_made_which_are_made_once(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    making, may_go_on = threading.Event(), threading.Event()
    make = SessionMemory.make_slots
    calls = iter(range(2))

    def slowly(memory: SessionMemory, count: int) -> Any:
        if next(calls) == 1:
            making.set()
            assert may_go_on.wait(10.0)
        return make(memory, count)

    monkeypatch.setattr(SessionMemory, "make_slots", slowly)
    async with asking(server.url) as session:
        async with session.lease() as lease:
            fill(lease, 1)
            kept = (await lease.infer())[OUTPUT]
        first = asyncio.create_task(echo(session, 2))
        await comes(making.is_set, "a thread makes the spare slots")
        second = asyncio.create_task(echo(session, 3))
        await comes(lambda: session.stats().waits == 1, "another task waits")
        for _ in range(times):
            first.cancel()
            await asyncio.sleep(0.02)
        assert not first.done()
        may_go_on.set()
        await asyncio.wait([first])
        assert first.cancelled()
        await second
        np.testing.assert_array_equal(kept, frame(1))
        assert session.stats().spare_slots == 1
        del kept
        await serves_right(session)


# --- while a thread works on the slot -------------------------------------------------


@in_a_loop
async def test_cancelled_while_a_thread_registers_the_slot_again(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        await echo(session, 1)
        may_go_on = threading.Event()
        server.unregister_all()
        server.script(Delay(may_go_on), path="/register")
        task = asyncio.create_task(echo(session, 2))
        await comes(lambda: _asked(server, "/register") == 2, "it is registered again")
        await cancel(task)
        # The thread has the slot until it is done; nobody else gets it.
        with pytest.raises(LeaseTimeout):
            await session.lease(timeout=0.05)
        may_go_on.set()
        await serves_right(session)
        assert session.stats().drains == 0


@in_a_loop
async def test_cancelled_while_no_thread_is_free_to_connect(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = hold_connecting(monkeypatch)
    async with asking(server.url, slots=6) as session:
        # The first slot has the connection that the session was opened with.
        await echo(session, 1)
        lease = await session.lease()
        tasks = [asyncio.create_task(echo(session, each)) for each in range(5)]
        await comes(lambda: session.stats().leased == 6, "all slots are taken")
        await asyncio.sleep(0.02)
        for task in tasks:
            await cancel(task)
        may_go_on.set()
        lease.release()
        await serves_right(session)


@in_a_loop
async def test_time_runs_out_while_no_thread_is_free_to_connect(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = hold_connecting(monkeypatch)
    async with asking(server.url, slots=6) as session:
        async with session.lease():
            tasks = [asyncio.create_task(echo(session, each)) for each in range(4)]
            await comes(lambda: session.stats().leased == 5, "all threads connect")
            await asyncio.sleep(0.02)
            with pytest.raises(InferTimeout):
                await echo(session, 5, timeout=0.05)
            may_go_on.set()
            await asyncio.gather(*tasks)
        await serves_right(session)


@in_a_loop
async def test_cancelled_in_the_middle_of_a_large_request(
    server: ScriptedServer,
) -> None:
    large = np.full((1, 1, 2048, 2048), 5.0, np.float32)
    with FaultProxy(server.url) as proxy:
        async with asking(proxy.url, memory="wire", shape=large.shape) as session:
            await echo(session, 1)
            link = proxy.link
            link.requests.change(is_stalled=True)
            task = asyncio.create_task(session.infer({INPUT: large}))
            await comes(lambda: state(session) == "in_flight", "it is being sent")
            await cancel(task)
            # The thread sends it to its end, for nobody.
            with pytest.raises(LeaseTimeout):
                await session.lease(timeout=0.05)
            link.requests.change(is_stalled=False)
            await becomes(session, "free")
            await echo(session, 2)
            assert session.stats().connections == 2


# --- in flight ------------------------------------------------------------------------


@in_a_loop
async def test_cancelled_in_flight_the_slot_comes_back_with_the_late_reply(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        with server.hold():
            task = asyncio.create_task(echo(session, 1))
            await comes(lambda: server.in_model == 1, "it is in the model")
            await cancel(task)
            assert state(session) == "late"
            with pytest.raises(LeaseTimeout):
                await session.lease(timeout=0.05)
        await serves_right(session)
        assert session.stats().late_replies == 1


@in_a_loop
async def test_cancelled_when_the_reply_is_there_but_the_task_does_not_know(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        await echo(session, 1)
        await cancelled_with_the_reply(server, session, echo(session, 2))
        assert state(session) == "free"
        await serves_right(session)
        assert session.stats().late_replies == 0


@in_a_loop
async def test_cancelled_when_an_error_is_there_that_nobody_hears_of(
    server: ScriptedServer,
) -> None:
    """A wiped registration: what the next caller sees is not that error once more."""
    async with asking(server.url) as session:
        await echo(session, 1)
        text = "Unable to find shared memory region: 'gone'"
        server.script(Answer(error(400, text)))
        await cancelled_with_the_reply(server, session, echo(session, 2))
        await serves_right(session)
        # The error might have come twice, on the connection on which it came.
        assert session.stats().connections == 2


@in_a_loop
async def test_cancelled_before_the_connection_breaks_the_slot_is_drained(
    server: ScriptedServer,
) -> None:
    with FaultProxy(server.url) as proxy:
        async with asking(proxy.url) as session:
            await echo(session, 1)
            with server.hold():
                task = asyncio.create_task(echo(session, 2))
                await comes(lambda: server.in_model == 1, "it is in the model")
                await cancel(task)
                proxy.break_off()
                await becomes(session, "lost")
            await serves_right(session)
            assert session.stats().drains == 1


@in_a_loop
async def test_a_time_limit_of_asyncio_ends_it_as_cancelling_does(
    server: ScriptedServer,
) -> None:
    async def end(limit: asyncio.Timeout) -> None:
        await comes(lambda: server.in_model == 1, "it is in the model")
        limit.reschedule(asyncio.get_running_loop().time())

    async def ask(session: AsyncSession) -> None:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:
            tasks.create_task(end(limit))
            await echo(session, 1)

    async with asking(server.url) as session:
        with server.hold():
            with pytest.raises(TimeoutError):
                await ask(session)
            assert state(session) == "late"
        await serves_right(session)


@in_a_loop
async def test_a_group_in_which_one_task_fails_leaves_no_slot_behind(
    server: ScriptedServer,
) -> None:
    async with asking(server.url, slots=4) as session:
        await session.warmup()
        server.script(Status(500, '{"error": "no"}', model_runs=False))
        with server.hold(), pytest.raises(ExceptionGroup) as caught:
            await nine_at_once(session)
        assert caught.group_contains(InferFailed)
        await serves_right(session)
        assert session.stats().late_replies == 3


@in_a_loop
async def test_the_next_step_of_a_sequence_waits_for_one_that_was_cancelled(
    server: ScriptedServer,
) -> None:
    step = RequestOptions(sequence_id=7, sequence_start=True)
    following = RequestOptions(sequence_id=7)
    async with asking(server.url, slots=2) as session:
        with server.hold():
            task = asyncio.create_task(echo(session, 1, options=step))
            await comes(lambda: server.in_model == 1, "it is in the model")
            await cancel(task)
            second = asyncio.create_task(echo(session, 2, options=following))
            await comes(lambda: session.stats().leased == 1, "the next step waits")
            await asyncio.sleep(0.02)
            assert server.in_model == 1
        await second
        await serves_right(session)


# --- before it has begun --------------------------------------------------------------


@in_a_loop
async def test_cancelled_before_it_has_begun(server: ScriptedServer) -> None:
    async with asking(server.url) as session:
        await cancel(asyncio.create_task(echo(session, 1)))
        await cancel(await session.submit({INPUT: frame(2)}))
        lease = await session.lease()
        fill(lease, 3)
        await cancel(lease.submit())
        assert state(session) == "free"
        await serves_right(session)
        assert session.stats().late_replies == 0


@in_a_loop
async def test_a_submitted_task_that_is_cancelled_in_flight(
    server: ScriptedServer,
) -> None:
    async with asking(server.url, slots=2) as session:
        with server.hold():
            copies = await session.submit({INPUT: frame(1)})
            lease = await session.lease()
            fill(lease, 2)
            owned = lease.submit()
            await comes(lambda: server.in_model == 2, "both are in the model")
            await cancel(copies)
            await cancel(owned)
            assert state(session) == "late"
        await serves_right(session)
        assert session.stats().late_replies == 2


# --- while the session opens ----------------------------------------------------------


@in_a_loop
async def test_cancelled_while_entering_it_leaves_nothing(
    server: ScriptedServer,
) -> None:
    may_go_on = threading.Event()
    server.script(Delay(may_go_on), path="/v2/models/")
    session = asking(server.url)

    async def enter() -> None:
        async with session:
            pytest.fail("it was cancelled before")

    task = asyncio.create_task(enter())
    await comes(lambda: _asked(server, "/v2/models/") > 0, "it is being opened")
    await cancel(task)
    may_go_on.set()
    await comes(lambda: "closed" in repr(session), "it is closed")
    await comes(lambda: not server.regions, "nothing is registered")
    assert _asked(server, "/unregister") == 1


@in_a_loop
async def test_a_first_user_that_is_cancelled_leaves_the_session_to_others(
    server: ScriptedServer,
) -> None:
    may_go_on = threading.Event()
    server.script(Delay(may_go_on), path="/v2/models/")
    session = asking(server.url)
    first = asyncio.create_task(echo(session, 1))
    await comes(lambda: _asked(server, "/v2/models/") > 0, "it is being opened")
    second = asyncio.create_task(echo(session, 2))
    await asyncio.sleep(0)
    await cancel(first)
    may_go_on.set()
    await second
    await serves_right(session)
    await session.close()


# --- anywhere -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(0, 24, 2))
@pytest.mark.parametrize("memory", ["system", "wire"])
@in_a_loop
async def test_cancelled_after_any_number_of_steps_of_the_loop(
    server: ScriptedServer, steps: int, memory: str
) -> None:
    """From the first use of a session that is not open, through growing, to its end."""
    session = asking(server.url, slots=2, memory=memory, rerun=True)
    for size in (8, 8, 4096):
        task = asyncio.create_task(session.infer({INPUT: frame(size, size=size)}))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await session.open()
    await serves_right(session)
    await session.close()


# --- tools ----------------------------------------------------------------------------


async def nine_at_once(session: AsyncSession) -> None:
    async with asyncio.TaskGroup() as group:
        for value in range(9):
            group.create_task(echo(session, value))


def _asked(server: ScriptedServer, part: str) -> int:
    return sum(part in each.path for each in server.requests)


def hold_connecting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From the second connection on, connecting waits until the event is set."""
    connect: Callable[..., Any] = Endpoint.connect
    may_go_on = threading.Event()
    first = iter([True])

    def slowly(endpoint: Endpoint, limit: float | None) -> Any:
        if not next(first, False):
            assert may_go_on.wait(10.0)
        return connect(endpoint, limit)

    monkeypatch.setattr(Endpoint, "connect", slowly)
    return may_go_on


async def cancelled_with_the_reply(
    server: ScriptedServer, session: AsyncSession, use: Coroutine[Any, Any, None]
) -> None:
    """Cancel a task between the reading of its reply and its next step."""
    loop = asyncio.get_running_loop()
    before = len(server.requests)
    task = asyncio.create_task(use)

    def look() -> None:
        if len(server.requests) > before and not session.stats().in_flight:
            task.cancel()
        else:
            # In each turn of the loop, before what comes with this one goes on.
            loop.call_soon(look)

    loop.call_soon(look)
    with pytest.raises(asyncio.CancelledError):
        await task
