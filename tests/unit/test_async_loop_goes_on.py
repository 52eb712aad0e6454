"""The event loop goes on while a session waits, and no request has a thread of its own.

In each test something hangs until the loop itself lets it go on: a loop that waited for
it would wait until a time limit ends the test. The pulse counts that others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import pytest

import shmlane.testing
from shmlane import AsyncSession, AsyncStream, RequestOptions, SlotRef, Timeouts
from shmlane.endpoint import Endpoint
from shmlane.engine import Engine
from shmlane.memory import SessionMemory
from shmlane.testing import Delay, FakeModel, ScriptedServer
from tests.fault_proxy import FaultProxy
from tests.sessions import Array, frame
from tests.unit.one_slot import INPUT, OUTPUT, one_slot, serving
from tests.unit.tasks import (
    Pulse,
    asking,
    becomes,
    comes,
    echo,
    in_a_loop,
    pulse,
    serves_right,
    state,
)

T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


# --- threads --------------------------------------------------------------------------


@in_a_loop
async def test_no_request_has_a_thread_of_its_own(server: ScriptedServer) -> None:
    async with asking(server.url, slots=64) as session:
        # Every slot has made its connection, for which there are a few threads.
        await session.warmup()
        few = our_threads()
        assert few <= 6
        with server.hold():
            tasks = [asyncio.create_task(echo(session, each)) for each in range(80)]
            await comes(lambda: server.in_model == 64, "all slots are in flight")
            assert session.stats().waits == 16
            assert our_threads() <= few
        await asyncio.gather(*tasks)


@in_a_loop
async def test_late_slots_share_one_thread(server: ScriptedServer) -> None:
    async with asking(server.url, slots=16) as session:
        await session.warmup()
        few = our_threads()
        with server.hold():
            tasks = [asyncio.create_task(echo(session, each)) for each in range(16)]
            await comes(lambda: server.in_model == 16, "all slots are in flight")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await becomes(session, "late")
            assert our_threads() <= few + 1
        await serves_right(session)


# --- the server hangs -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v2/models/identity", "/register", "/unregister"])
@in_a_loop
async def test_opening_and_closing_on_a_server_that_hangs(
    server: ScriptedServer, path: str
) -> None:
    with hanging(server, path=path) as may_go_on:
        async with pulse() as others:
            using = asyncio.create_task(use(asking(server.url)))
            await comes(lambda: any(path in each.path for each in server.requests))
            await others.goes_on()
            assert not using.done()
            may_go_on.set()
            await using


@in_a_loop
async def test_a_model_that_hangs(server: ScriptedServer) -> None:
    async with asking(server.url) as session, pulse() as others:
        with server.hold():
            task = asyncio.create_task(echo(session, 1))
            await comes(lambda: server.in_model == 1, "it is in the model")
            await others.goes_on()
            assert not task.done()
        await task


@in_a_loop
async def test_a_registration_that_was_forgotten_on_a_server_that_hangs(
    server: ScriptedServer,
) -> None:
    async with asking(server.url, slots=2) as session, pulse() as others:
        await session.warmup()
        server.unregister_all()
        with hanging(server, path="/register") as may_go_on:
            asked = len(server.requests)
            task = asyncio.create_task(echo(session, 1))
            await comes(lambda: len(server.requests) > asked + 1, "it registers again")
            await others.goes_on()
            # Nor do other tasks wait for that: theirs is another slot.
            await echo(session, 2)
            assert not task.done()
            may_go_on.set()
            await task


@in_a_loop
async def test_a_session_that_is_closed_while_its_last_lease_is_out(
    server: ScriptedServer,
) -> None:
    session = asking(server.url)
    async with pulse() as others:
        async with session.lease() as lease:
            lease[INPUT][...] = 1
            await session.close()
            # Asked for when the lease is released.
            may_go_on = threading.Event()
            server.script(Delay(may_go_on), path="/unregister")
        await comes(lambda: "unregister" in server.requests[-1].path)
        await others.goes_on()
        may_go_on.set()
        await comes(lambda: not server.regions, "nothing is registered")


# --- the network is slow --------------------------------------------------------------


@in_a_loop
async def test_a_connection_that_is_made_slowly(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(server.url, slots=2) as session, pulse() as others:
        # The first slot is connected.
        await echo(session, 1)
        async with session.lease():
            with held(monkeypatch, Endpoint, "connect") as (is_asked, may_go_on):
                task = asyncio.create_task(echo(session, 2))
                await comes(is_asked.is_set, "it connects")
                await others.goes_on()
                assert not task.done()
                may_go_on.set()
                await task


@pytest.mark.parametrize("what", ["tensors", "parameters"])
@in_a_loop
async def test_a_large_request_that_nobody_reads(
    server: ScriptedServer, what: str
) -> None:
    large = np.zeros((1, 1, 2048, 2048), np.float32)
    parameters = RequestOptions(parameters={"text": "x" * large.nbytes})
    memory = "wire" if what == "tensors" else "system"
    with FaultProxy(server.url) as proxy:
        async with (
            asking(proxy.url, memory=memory, shape=large.shape) as session,
            pulse() as others,
        ):
            link = proxy.link
            link.requests.change(is_stalled=True)
            if what == "tensors":
                task = asyncio.create_task(session.infer({INPUT: large}))
            else:
                task = asyncio.create_task(
                    session.infer({INPUT: frame(1)}, options=parameters)
                )
            await comes(lambda: state(session) == "in_flight", "it is being sent")
            await others.goes_on()
            assert not task.done()
            link.requests.change(is_stalled=False)
            await task


# --- memory is made -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["infer", "submit"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("NUMBERS", np.zeros(4096, np.float32)),
        ("NUMBERS", np.zeros(4096, np.uint8)),
        ("NUMBERS", [1.0] * 4096),
        ("WORDS", np.array(["x" * 4000], object)),
        ("WORDS", np.array(["x" * 4000])),
    ],
    ids=["array", "smaller items", "list", "objects", "text"],
)
@in_a_loop
async def test_memory_that_grows_slowly(
    monkeypatch: pytest.MonkeyPatch, how: str, name: str, given: Any
) -> None:
    async with growing() as (session, others):
        use = session.infer if how == "infer" else functools.partial(submit, session)
        inputs = {"NUMBERS": [1.0], "WORDS": ["x"]}
        await use(inputs, cast=True)
        with held(monkeypatch, SessionMemory, "grow") as (is_asked, may_go_on):
            task = asyncio.create_task(use({**inputs, name: given}, cast=True))
            await comes(is_asked.is_set, "memory is made")
            await others.goes_on()
            assert not task.done()
            may_go_on.set()
            count = len(given) if name == "NUMBERS" else 1
            np.testing.assert_array_equal((await task)["COUNT"], [count])


@in_a_loop
async def test_memory_that_grows_slowly_for_an_item_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with growing() as (session, others):
        items = [
            {"NUMBERS": np.zeros(size, np.float32), "WORDS": ["x"]}
            for size in (1, 4096, 1)
        ]
        with held(monkeypatch, SessionMemory, "grow") as (is_asked, may_go_on):
            task = asyncio.create_task(collected(session.stream(items)))
            await comes(is_asked.is_set, "memory is made")
            await others.goes_on()
            assert not task.done()
            may_go_on.set()
            assert [int(each["COUNT"][0]) for each in await task] == [1, 4096, 1]


@in_a_loop
async def test_spare_slots_that_are_made_slowly(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(monkeypatch, SessionMemory, "make_slots", free=1) as (
        is_asked,
        may_go_on,
    ):
        async with asking(server.url) as session, pulse() as others:
            async with session.lease() as lease:
                lease[INPUT][...] = frame(1)
                kept = (await lease.infer())[OUTPUT]
            task = asyncio.create_task(echo(session, 2))
            await comes(is_asked.is_set, "spare slots are made")
            await others.goes_on()
            assert not task.done()
            may_go_on.set()
            await task
            np.testing.assert_array_equal(kept, frame(1))


@in_a_loop
async def test_a_slot_whose_region_somebody_wants_to_remove(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(server.url) as session, pulse() as others:
        with monkeypatch.context() as patch:
            # As a process that died leaves it.
            patch.setattr(Engine, "_clean_up", lambda *_: None)
            with one_slot(server.url) as home, home.lease() as filled:
                filled[INPUT][...] = frame(1)
                ref = filled.detach()
        with locked(ref):
            task = asyncio.create_task(session.adopt(ref))
            await others.goes_on()
            assert not task.done()
        async with await task as lease:
            np.testing.assert_array_equal((await lease.infer())[OUTPUT], frame(1))
        await serves_right(session)


# --- tools ----------------------------------------------------------------------------


@contextlib.contextmanager
def locked(ref: SlotRef) -> Iterator[None]:
    """As by who cleans up, while a server is asked to forget a dead region."""
    with open(f"/dev/shm/{ref.region}") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def use(session: AsyncSession) -> None:
    async with session:
        await echo(session, 1)


async def submit(
    session: AsyncSession, inputs: Mapping[str, Any], *, cast: bool
) -> dict[str, Array]:
    return await (await session.submit(inputs, cast=cast))


async def collected(stream: AsyncStream[T]) -> list[T]:
    return [each async for each in stream]


@contextlib.contextmanager
def hanging(server: ScriptedServer, *, path: str) -> Iterator[threading.Event]:
    """The next request with this path is answered when the event is set."""
    may_go_on = threading.Event()
    server.script(Delay(may_go_on), path=path)
    try:
        yield may_go_on
    finally:
        may_go_on.set()


@contextlib.contextmanager
def held(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, free: int = 0
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A method that takes its time: it says that it was called, and goes on when told.

    free: so many calls go on at once.
    """
    is_asked, may_go_on = threading.Event(), threading.Event()
    method: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def slowly(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > free:
            is_asked.set()
            assert may_go_on.wait(5.0)
        return method(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, slowly)
        try:
            yield is_asked, may_go_on
        finally:
            may_go_on.set()


@contextlib.asynccontextmanager
async def growing() -> AsyncIterator[tuple[AsyncSession, Pulse]]:
    """A session whose inputs have not been large so far."""
    model = FakeModel(
        "growing",
        inputs={"NUMBERS": ("FP32", (-1,)), "WORDS": ("BYTES", (-1,))},
        outputs={"COUNT": ("INT32", (1,))},
        run=lambda inputs: {"COUNT": np.array([len(inputs["NUMBERS"])], np.int32)},
    )
    with ScriptedServer([model], allow_client_shm=True) as server:
        async with (
            AsyncSession(
                server.url,
                "growing",
                slots=1,
                shapes={"NUMBERS": (1,), "WORDS": 16},
                timeouts=Timeouts(infer=10.0),
            ) as session,
            pulse() as others,
        ):
            yield session, others


def our_threads() -> int:
    """Threads beside this one that are not the scripted server's."""
    count = 0
    for number, current in sys._current_frames().items():
        packages = {
            frame.f_globals.get("__package__")
            for frame, _ in traceback.walk_stack(current)
        }
        is_ours = shmlane.testing.__name__ not in packages
        count += is_ours and number != threading.get_ident()
    return count
