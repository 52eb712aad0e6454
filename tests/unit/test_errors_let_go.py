"""An error that was handled holds nothing: views that its frames had let go of a slot.

Otherwise the slot would stay pinned until the collector of circles comes by.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from shmlane import (
    AsyncLease,
    AsyncSession,
    InferFailed,
    InferTimeout,
    Lease,
    RequestLost,
    ServerUnreachable,
    Session,
    ShmlaneError,
)
from shmlane.testing import Close, Delay, ScriptedServer, Status
from tests.sessions import frame
from tests.unit.one_slot import INPUT, one_slot, serving
from tests.unit.one_slot import becomes as is_seen_to_be
from tests.unit.tasks import asking, becomes, cancel, comes, in_a_loop

_LIMIT = 0.1


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def refuse(server: ScriptedServer) -> None:
    server.script(Status(500, '{"error": "no"}', model_runs=False))


def lose(server: ScriptedServer) -> None:
    server.script(Close())


def be_late(server: ScriptedServer) -> None:
    server.script(Delay(2 * _LIMIT))


def be_away(server: ScriptedServer) -> None:
    server.stop()


FAULTS: Mapping[str, tuple[Callable[[ScriptedServer], None], type[ShmlaneError]]] = {
    "refused": (refuse, InferFailed),
    "lost": (lose, RequestLost),
    "late": (be_late, InferTimeout),
    "away": (be_away, ServerUnreachable),
}


@contextlib.contextmanager
def at_fault(
    server: ScriptedServer, fault: str
) -> Iterator[tuple[type[ShmlaneError], ...]]:
    """What is sent meanwhile fails in this way."""
    begin, error = FAULTS[fault]
    begin(server)
    yield (error,)
    if fault == "away":
        server.start()


async def infer(session: AsyncSession) -> None:
    async with session.lease() as lease:
        view = lease[INPUT]
        view[...] = 1
        await lease.infer(timeout=_LIMIT)


async def await_submitted(session: AsyncSession) -> None:
    lease = await session.lease()
    view = lease[INPUT]
    view[...] = 1
    await lease.submit(timeout=_LIMIT)


async def stream(session: AsyncSession) -> None:
    def write(lease: AsyncLease, value: float) -> None:
        lease[INPUT][...] = value

    async for _ in session.stream([1.0], write=write, timeout=_LIMIT):
        pass


@pytest.mark.parametrize("use", [infer, await_submitted, stream])
@pytest.mark.parametrize("fault", FAULTS)
@in_a_loop
async def test_in_a_task(server: ScriptedServer, fault: str, use: Any) -> None:
    async with asking(server.url) as session:
        for _ in range(2):
            with at_fault(server, fault) as errors:
                try:
                    await use(session)
                except errors:
                    pass
                else:
                    pytest.fail("it did not fail")
            await becomes(session, "free")


@pytest.mark.parametrize("workers", [0, 1])
@in_a_loop
async def test_in_what_fills_the_slots_of_a_task(
    server: ScriptedServer, workers: int
) -> None:
    def write(lease: AsyncLease, value: float) -> None:
        view = lease[INPUT]
        view[...] = value
        raise ArithmeticError

    async with asking(server.url) as session:
        with contextlib.suppress(ArithmeticError):
            async for _ in session.stream([1.0], write=write, workers=workers):
                pass
        await becomes(session, "free")


@in_a_loop
async def test_in_what_went_on_when_its_stream_was_closed(
    server: ScriptedServer,
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def write(lease: AsyncLease, value: float) -> None:
        view = lease[INPUT]
        view[...] = value
        has_begun.set()
        assert may_go_on.wait(10)
        raise ArithmeticError

    async with asking(server.url) as session:
        stream = session.stream([1.0], write=write, workers=1)
        task = asyncio.ensure_future(anext(stream))
        await comes(has_begun.is_set, "the thread has begun")
        await cancel(task)
        await stream.close()
        may_go_on.set()
        await becomes(session, "free")


def blocking_infer(session: Session) -> None:
    with session.lease() as lease:
        view = lease[INPUT]
        view[...] = 1
        lease.infer(timeout=_LIMIT)


def result_of_future(session: Session) -> None:
    with session.lease() as lease:
        view = lease[INPUT]
        view[...] = 1
        lease.submit(timeout=_LIMIT).result(10)


def blocking_stream(session: Session) -> None:
    for _ in session.stream([{INPUT: frame(1)}], timeout=_LIMIT):
        pass


@pytest.mark.parametrize("use", [blocking_infer, result_of_future, blocking_stream])
@pytest.mark.parametrize("fault", FAULTS)
def test_in_a_thread(
    server: ScriptedServer, fault: str, use: Callable[[Session], None]
) -> None:
    with one_slot(server.url) as session:
        for _ in range(2):
            with at_fault(server, fault) as errors:
                try:
                    use(session)
                except errors:
                    pass
                else:
                    pytest.fail("it did not fail")
            is_seen_to_be(session, "free")


@pytest.mark.parametrize("workers", [0, 1])
def test_in_what_fills_the_slots_of_a_thread(
    server: ScriptedServer, workers: int
) -> None:
    def write(lease: Lease, value: float) -> None:
        view = lease[INPUT]
        view[...] = value
        raise ArithmeticError

    with one_slot(server.url) as session:
        with contextlib.suppress(ArithmeticError):
            list(session.stream([1.0], write=write, workers=workers))
        is_seen_to_be(session, "free")


def infer_of_session(session: Session) -> None:
    session.infer({INPUT: frame(1)}, timeout=_LIMIT)


def future_of_copies(session: Session) -> None:
    session.submit({INPUT: frame(1)}, timeout=_LIMIT).result(10)


@pytest.mark.parametrize("use", [infer_of_session, future_of_copies, blocking_stream])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_that_somebody_keeps(
    server: ScriptedServer, fault: str, use: Callable[[Session], None]
) -> None:
    """Its frames are the caller's from then on, and no slot hangs on them."""
    with one_slot(server.url) as session:
        kept: list[ShmlaneError] = []
        with at_fault(server, fault) as errors:
            try:
                use(session)
            except errors as error:
                kept.append(error)
        is_seen_to_be(session, "free")
        assert len(kept) == 1
