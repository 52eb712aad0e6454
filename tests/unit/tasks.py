"""Tests whose body is a task: sessions for asyncio on a scripted server, and a pulse.

Owns running such a test in a loop of its own, waiting there for a condition, and the
state that must hold in the end. Refuses real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest

from shmlane import AsyncLease, AsyncSession, Timeouts
from tests.sessions import Array, frame
from tests.unit.one_slot import INPUT, OUTPUT, STATES

P = ParamSpec("P")
T = TypeVar("T")

SHAPE = (1, 1, 1, 8)
_LIMIT = 20.0
_PAUSE = 0.002


def in_a_loop(
    test: Callable[P, Coroutine[Any, Any, None]],
) -> Callable[P, None]:
    """The test runs as a task, in an event loop of its own, and must come to an end."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), _LIMIT))

    return run


def asking(
    url: str,
    *,
    slots: int = 1,
    memory: str = "system",
    limit: float = 10.0,
    shape: tuple[int, ...] = SHAPE,
    rerun: bool = False,
) -> AsyncSession:
    """A session for frames of eight numbers, or of another shape."""
    return AsyncSession(
        url,
        "identity",
        slots=slots,
        memory=memory,
        shapes={INPUT: shape},
        outputs={OUTPUT: shape},
        rerun=rerun,
        timeouts=Timeouts(connect=min(limit, 2.0), infer=limit, lease=limit),
    )


async def comes(condition: Callable[[], T], what: str = "the condition") -> T:
    """As `eventually`, while the loop goes on."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 10.0
    while not (value := condition()):
        if loop.time() > end:
            pytest.fail(f"not so within 10 s: {what}")
        await asyncio.sleep(_PAUSE)
    return value


def state(session: AsyncSession) -> str:
    """The states of all slots, which is one word as long as there is one slot."""
    stats = session.stats()
    return " ".join(name for name in STATES if getattr(stats, name))


async def becomes(session: AsyncSession, wanted: str) -> None:
    await comes(lambda: state(session) == wanted, f"every slot is {wanted}")


def fill(lease: AsyncLease, value: float) -> None:
    lease[INPUT][...] = frame(value)


async def echo(session: AsyncSession, value: float, **options: Any) -> None:
    """What is sent comes back."""
    sent = frame(value)
    came = await session.infer({INPUT: sent}, **options)
    np.testing.assert_array_equal(came[OUTPUT], sent)


async def serves_right(session: AsyncSession) -> None:
    """Every slot is free and can be had, and is answered right."""
    await becomes(session, "free")
    async with contextlib.AsyncExitStack() as leases:
        for number in range(session.stats().slots):
            lease = await leases.enter_async_context(session.lease(timeout=5.0))
            for value in (11.0, 12.0, 13.0):
                fill(lease, value + number)
                came: Array = (await lease.infer())[OUTPUT]
                np.testing.assert_array_equal(came, frame(value + number))
            del came
    await becomes(session, "free")


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, which must end of that."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


class Pulse:
    """Counts how often the loop had time for somebody else."""

    def __init__(self) -> None:
        self.beats = 0

    async def _beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(_PAUSE / 2)

    async def goes_on(self, count: int = 20) -> None:
        """Returns after so many beats, which it does not if the loop stands still."""
        wanted = self.beats + count
        await comes(lambda: self.beats >= wanted, "the loop goes on")


@contextlib.asynccontextmanager
async def pulse() -> AsyncIterator[Pulse]:
    made = Pulse()
    task = asyncio.create_task(made._beat())
    try:
        yield made
    finally:
        task.cancel()
