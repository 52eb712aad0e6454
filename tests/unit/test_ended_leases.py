"""Leases and sessions that have ended: what was done with them, and what to do now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shmlane import (
    AsyncLease,
    Lease,
    LeaseExpired,
    PoolClosed,
    TensorMismatch,
)
from shmlane.testing import ScriptedServer
from tests.sessions import frame
from tests.unit.one_slot import INPUT, fill, one_slot, serving
from tests.unit.tasks import asking

DETACHED = "this lease was detached: its slot is for whoever adopts it"
SUBMITTED = "this lease was submitted: its slot went along with its future or task"
USES: list[Callable[[Lease | AsyncLease], object]] = [
    lambda lease: lease[INPUT],
    lambda lease: lease.write(INPUT, frame(1)),
    lambda lease: lease.submit(),
    lambda lease: lease.detach(),
]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


def is_told(lease: Lease | AsyncLease, words: str) -> None:
    for use in USES:
        with pytest.raises(LeaseExpired, match=words) as caught:
            use(lease)
        assert "session.lease()" in caught.value.hint


def test_a_lease_that_gave_its_slot_away_says_where_it_went(
    server: ScriptedServer,
) -> None:
    with one_slot(server.url) as session:
        with session.lease() as lease:
            fill(lease, 1)
            future = lease.submit()
            is_told(lease, SUBMITTED)
        future.result(5.0).release()
        with session.lease() as lease:
            fill(lease, 1)
            ref = lease.detach()
            is_told(lease, DETACHED)
        session.adopt(ref).release()
        with session.lease() as lease:
            pass
        is_told(lease, "this lease was released")


def test_a_lease_of_a_task_says_so_too(server: ScriptedServer) -> None:
    async def run() -> None:
        async with asking(server.url) as session:
            async with session.lease() as lease:
                lease.write(INPUT, frame(1))
                task = lease.submit()
                is_told(lease, SUBMITTED)
            (await task).release()
            async with session.lease() as lease:
                lease.write(INPUT, frame(1))
                ref = lease.detach()
                is_told(lease, DETACHED)
            (await session.adopt(ref)).release()

    asyncio.run(run())


def test_every_use_of_a_closed_session_says_what_to_do(server: ScriptedServer) -> None:
    session = one_slot(server.url).open()
    lease = session.lease()
    fill(lease, 1)
    session.close()
    uses: list[Callable[[], object]] = [
        session.open,
        session.lease,
        lambda: session.infer({INPUT: frame(1)}),
        lease.infer,
    ]
    for use in uses:
        with pytest.raises(PoolClosed) as caught:
            use()
        assert "Open a new one" in caught.value.hint
    lease.release()


@pytest.mark.parametrize(
    ("shape", "words"), [((8,), "has 1 dimension,"), ((8, 8), "has 2 dimensions,")]
)
def test_one_dimension_is_not_several(
    server: ScriptedServer, shape: tuple[int, ...], words: str
) -> None:
    with (
        one_slot(server.url) as session,
        session.lease() as lease,
        pytest.raises(TensorMismatch, match=words),
    ):
        lease.write(INPUT, np.zeros(shape, np.float32))
