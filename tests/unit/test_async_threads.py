"""A thread that fills the lease of a task: nobody else gets at its slot meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmlane import AsyncLease, LeaseBusy, LeaseTimeout
from shmlane.testing import ScriptedServer
from tests.sessions import Array, frame
from tests.unit.one_slot import INPUT, OUTPUT, serving
from tests.unit.tasks import (
    SHAPE,
    asking,
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


class Slow:
    """An array, or a shape, that somebody has begun to read and cannot read on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_go_on = threading.Event()

    def _wait(self) -> None:
        self.begun.set()
        assert self.may_go_on.wait(10)

    def __array__(self, *_: Any, **__: Any) -> Array:
        self._wait()
        return frame(1)

    def __iter__(self) -> Iterator[int]:
        self._wait()
        return iter(SHAPE)


def writing(lease: AsyncLease, slow: Slow) -> None:
    lease.write(INPUT, slow)


def viewing(lease: AsyncLease, slow: Slow) -> None:
    lease.view(INPUT, slow)


@contextlib.asynccontextmanager
async def in_a_thread(
    use: Callable[[AsyncLease, Slow], None], lease: AsyncLease
) -> AsyncIterator[tuple[asyncio.Task[None], Slow]]:
    """The thread is in the middle of it for as long as this lasts."""
    slow = Slow()
    task = asyncio.create_task(asyncio.to_thread(use, lease, slow))
    try:
        await comes(slow.begun.is_set, "the thread has begun")
        yield task, slow
    finally:
        slow.may_go_on.set()


@pytest.mark.parametrize("use", [writing, viewing])
@in_a_loop
async def test_a_lease_that_ends_meanwhile_keeps_its_slot_until_the_thread_has_ended(
    server: ScriptedServer, use: Callable[[AsyncLease, Slow], None]
) -> None:
    """Otherwise the thread would write over what the next caller has filled in."""
    async with asking(server.url) as session:
        lease = await session.lease()
        async with in_a_thread(use, lease) as (task, _):
            await cancel(task)
            lease.release()
            assert state(session) == "leased"
            with pytest.raises(LeaseTimeout):
                await session.lease(timeout=0.02)
        await serves_right(session)


@pytest.mark.parametrize("use", [writing, viewing])
@in_a_loop
async def test_a_task_that_gave_up_waiting_for_a_thread_sends_nothing_half_written(
    server: ScriptedServer, use: Callable[[AsyncLease, Slow], None]
) -> None:
    async with asking(server.url) as session, session.lease() as lease:
        fill(lease, 1)
        async with in_a_thread(use, lease) as (task, slow):
            await cancel(task)
            for refused in (lease.infer, lambda: asyncio.to_thread(fill, lease, 2)):
                with pytest.raises(LeaseBusy):
                    await refused()
            with pytest.raises(LeaseBusy):
                lease.detach()
            slow.may_go_on.set()
            await comes(lambda: lease._slot is not None, "the lease can be used again")
        fill(lease, 3)
        np.testing.assert_array_equal((await lease.infer())[OUTPUT], frame(3))
