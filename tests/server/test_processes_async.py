"""Slots of other processes in an event loop: the same words, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shmlane import (
    AsyncSession,
    HandoffExpired,
    LeaseExpired,
    Session,
    SlotRef,
    UsageError,
)
from shmlane.server import TritonServer
from tests.others import other
from tests.sessions import all_free, fill, open_sink

pytestmark = pytest.mark.usefixtures("no_leftovers")

SHAPES = {"INPUT__0": (1, 1, 1, 8)}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@asynccontextmanager
async def open_async(server: TritonServer) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(server.http_url, "sink", slots=2, shapes=SHAPES) as session:
        yield session


async def filled(session: AsyncSession, value: float) -> SlotRef:
    async with session.lease() as lease:
        lease["INPUT__0"].fill(value)
        return lease.detach()


def test_tasks_adopt_what_others_have_filled(server: TritonServer) -> None:
    async def main() -> None:
        async with open_async(server) as session:

            async def answer(ref: SlotRef) -> float:
                async with await session.adopt(ref) as lease:
                    return float((await lease.infer())["OUTPUT__0"][0])

            for turn in range(3):
                refs = []
                for value in range(4):
                    with home.lease() as lease:
                        fill(lease, turn * 10 + value)
                        refs.append(lease.detach())
                answers = await asyncio.gather(*map(answer, refs))
                assert answers == [turn * 10 + value for value in range(4)]
            with pytest.raises(HandoffExpired):
                await session.adopt(refs[0])
            assert session.stats().adopted == 0

    with open_sink(server, slots=4) as home:
        run(main())
        all_free(home)


def test_tasks_lend_and_wait_for_what_comes_back(server: TritonServer) -> None:
    async def main() -> None:
        async with open_async(server) as home:
            with other() as consumer:
                consumer.ask(
                    f"session = Session({server.http_url!r}, 'sink', slots=1).open()"
                )
                for value in range(8):
                    # Two slots: the third waits for one of the first.
                    ref = await filled(home, value)
                    consumer.tell(f"infer(session, {str(ref)!r})")
                answers = [await asyncio.to_thread(consumer.hear) for _ in range(8)]
                assert answers == list(range(8))
                consumer.ask("session.close()")
                consumer.end()
            assert home.stats().lent == 0
            assert home.stats().free == 2

    run(main())


def test_an_event_loop_shares_and_attaches(server: TritonServer) -> None:
    async def main() -> None:
        async with open_async(server) as sharer:
            handle = await sharer.share(slots=2)
            async with AsyncSession.attach(handle) as session:
                async with session.lease() as lease:
                    lease["INPUT__0"].fill(3)
                    assert (await lease.infer())["OUTPUT__0"] == [3]
                with Session.attach(handle) as blocking, blocking.lease() as one:
                    fill(one, 4)
                    assert one.infer()["OUTPUT__0"] == [4]
                assert session.stats().registrations == 0

    run(main())


def test_a_lease_ends_with_detach(server: TritonServer) -> None:
    async def main() -> None:
        async with open_async(server) as session:
            lease = await session.lease()
            lease["INPUT__0"].fill(1)
            view = lease["INPUT__0"]
            with pytest.raises(UsageError, match="alive"):
                lease.detach()
            del view
            ref = lease.detach()
            with pytest.raises(LeaseExpired):
                await lease.infer()
            lease.release()
            async with await session.adopt(ref) as lease:
                assert (await lease.infer())["OUTPUT__0"] == [1]
            with pytest.raises(UsageError):
                session.lease().detach()

    run(main())
