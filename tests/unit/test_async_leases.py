"""Leases of tasks: begun once, one task at a time, and never pulled from under one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import (
    AsyncLease,
    InputMissing,
    LeaseBusy,
    LeaseExpired,
    LeaseTimeout,
    Result,
    UsageError,
)
from shmlane.testing import Delay, ScriptedServer, Status
from tests.sessions import frame
from tests.unit.one_slot import INPUT, OUTPUT, serving
from tests.unit.tasks import (
    asking,
    becomes,
    cancel,
    comes,
    fill,
    in_a_loop,
    serves_right,
    state,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


# --- beginning and ending -------------------------------------------------------------


@in_a_loop
async def test_a_lease_that_was_not_waited_for_says_how_to(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        lease = session.lease()
        assert repr(lease) == "<AsyncLease not begun>"
        with pytest.raises(LeaseExpired, match="async with"):
            lease[INPUT]
        with pytest.raises(LeaseExpired, match="async with"):
            await lease.infer()
        with pytest.raises(LeaseExpired, match="async with"), lease:
            pytest.fail("it has no slot")
        async with lease:
            fill(lease, 1)
        await serves_right(session)


@in_a_loop
async def test_a_lease_is_begun_once(server: ScriptedServer) -> None:
    async with asking(server.url, slots=2) as session:
        lease = session.lease()
        async with lease:
            with pytest.raises(UsageError, match="begun before"):
                await lease
        with pytest.raises(UsageError, match="begun before"):
            async with lease:
                pytest.fail("it has ended")
        lease.release()
        unused = session.lease()
        unused.release()
        with pytest.raises(UsageError, match="begun before"):
            await unused
        await serves_right(session)


@in_a_loop
async def test_two_tasks_that_begin_one_lease_get_one_slot(
    server: ScriptedServer,
) -> None:
    async with asking(server.url, slots=2) as session:
        both = [await session.lease(), await session.lease()]
        lease = session.lease()
        first = asyncio.ensure_future(lease)
        await comes(lambda: session.stats().waits == 1, "a task waits for it")
        with pytest.raises(UsageError, match="begun before"):
            await lease
        for each in both:
            each.release()
        assert await first is lease
        assert session.stats().leased == 1
        lease.release()
        await serves_right(session)


@in_a_loop
async def test_a_lease_that_waited_in_vain_can_wait_again(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        lease = session.lease(timeout=0.02)
        async with session.lease():
            with pytest.raises(LeaseTimeout, match="1 leased"):
                await lease
        async with lease:
            fill(lease, 1)
            await lease.infer()
        await serves_right(session)


@in_a_loop
async def test_a_lease_that_is_released_while_its_task_waits_for_it(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        async with session.lease():
            lease = session.lease()
            waiting = asyncio.ensure_future(lease)
            await comes(lambda: session.stats().waits == 1, "a task waits for it")
            lease.release()
        with pytest.raises(LeaseExpired):
            await waiting
        await serves_right(session)


@in_a_loop
async def test_waiting_tasks_are_served_in_turn(server: ScriptedServer) -> None:
    async with asking(server.url) as session:
        served: list[int] = []

        async def take(number: int) -> None:
            async with session.lease():
                served.append(number)
                await asyncio.sleep(0)

        async with session.lease():
            tasks = []
            for number in range(8):
                tasks.append(asyncio.create_task(take(number)))
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert served == list(range(8))


@pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
@in_a_loop
async def test_a_lease_that_is_dropped_gives_its_slot_back(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        lease = await session.lease()
        del lease
        await serves_right(session)


# --- one task at a time ---------------------------------------------------------------


@pytest.mark.parametrize("when", ["registering", "in flight"])
@in_a_loop
async def test_another_task_is_refused_while_one_infers(
    server: ScriptedServer, when: str
) -> None:
    async with asking(server.url) as session, session.lease() as lease:
        with held(server, when):
            task = await inferring(server, lease, when)
            with pytest.raises(LeaseBusy):
                await lease.infer()
            with pytest.raises(LeaseBusy):
                lease.submit()
            with pytest.raises(LeaseBusy):
                lease.write(INPUT, frame(2))
            with pytest.raises(LeaseBusy):
                lease.view(INPUT, (1, 1, 1, 4))
        np.testing.assert_array_equal((await task)[OUTPUT], frame(1))
        fill(lease, 3)
        np.testing.assert_array_equal((await lease.infer())[OUTPUT], frame(3))


@pytest.mark.parametrize("when", ["registering", "in flight"])
@in_a_loop
async def test_a_lease_that_ends_while_another_task_infers_with_it(
    server: ScriptedServer, when: str
) -> None:
    """The slot goes back when that has ended, and not before."""
    async with asking(server.url) as session:
        with held(server, when):
            async with session.lease() as lease:
                task = await inferring(server, lease, when)
            with pytest.raises(LeaseExpired):
                lease[INPUT]
            with pytest.raises(LeaseTimeout):
                await session.lease(timeout=0.02)
        with pytest.raises(LeaseExpired):
            await task
        await serves_right(session)
        assert session.stats().late_replies == 0


@in_a_loop
async def test_a_warmup_that_fails_ends_when_all_of_it_has(
    server: ScriptedServer,
) -> None:
    async with asking(server.url, slots=3) as session:
        server.script(Status(500, '{"error": "no"}', model_runs=False))
        with server.hold():
            task = asyncio.create_task(session.warmup())
            await comes(lambda: server.in_model == 2, "two slots are in the model")
            await asyncio.wait([task])
            assert state(session) == "free in_flight"
        assert "no" in str(task.exception())
        await serves_right(session)


@in_a_loop
async def test_a_lease_whose_task_gave_up_can_only_be_released(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session, session.lease() as lease:
        fill(lease, 1)
        with server.hold():
            task = asyncio.create_task(lease.infer())
            await comes(lambda: server.in_model == 1, "it is in the model")
            await cancel(task)
            with pytest.raises(LeaseBusy):
                await lease.infer()
        lease.release()
        await becomes(session, "free")


# --- submitting -----------------------------------------------------------------------


@in_a_loop
async def test_a_submitted_lease_is_gone_and_its_result_has_the_slot(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        lease = await session.lease()
        with pytest.raises(InputMissing):
            lease.submit()
        fill(lease, 1)
        task = lease.submit()
        with pytest.raises(LeaseExpired):
            lease[INPUT]
        with await task as result:
            assert session.stats().leased == 1
            np.testing.assert_array_equal(result[OUTPUT], frame(1))
        with pytest.raises(LeaseExpired):
            result[OUTPUT]
        await serves_right(session)


@in_a_loop
async def test_a_submitted_result_that_is_dropped_gives_its_slot_back(
    server: ScriptedServer,
) -> None:
    async with asking(server.url) as session:
        lease = await session.lease()
        fill(lease, 1)
        task = lease.submit()
        await asyncio.wait([task])
        assert session.stats().leased == 1
        del task
        await serves_right(session)


# --- tools ----------------------------------------------------------------------------


@contextlib.contextmanager
def held(server: ScriptedServer, when: str) -> Iterator[None]:
    """An inference comes so far in this block, and no further."""
    if when == "in flight":
        with server.hold():
            yield
        return
    may_go_on = threading.Event()
    server.unregister_all()
    server.script(Delay(may_go_on), path="/register")
    try:
        yield
    finally:
        may_go_on.set()


async def inferring(
    server: ScriptedServer, lease: AsyncLease, when: str
) -> asyncio.Task[Result]:
    """A task that has come so far."""
    before = len(server.requests)
    fill(lease, 1)
    task = asyncio.create_task(lease.infer())
    if when == "in flight":
        await comes(lambda: server.in_model == 1, "it is in the model")
    else:
        # The inference that was refused, and the registration that it led to.
        await comes(lambda: len(server.requests) > before + 1, "it is registered again")
    return task
