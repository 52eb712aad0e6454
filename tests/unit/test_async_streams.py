"""Streams of tasks: asked for again after a cancelled call, left early, dropped."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from shmlane import AsyncLease, AsyncSession, InferFailed, RegionOptions, Result
from shmlane.testing import Delay, Status
from tests.sessions import frame
from tests.unit.one_slot import INPUT, OUTPUT, serving
from tests.unit.tasks import (
    SHAPE,
    asking,
    cancel,
    comes,
    fill,
    in_a_loop,
    serves_right,
)

SLOTS = 3


def write(lease: AsyncLease, item: int) -> None:
    fill(lease, float(item))


def read(item: int, result: Result) -> int:
    np.testing.assert_array_equal(result[OUTPUT], frame(float(item)))
    return item


def streams() -> int:
    """How many tasks beside this one there are."""
    return len(asyncio.all_tasks()) - 1


@in_a_loop
async def test_a_call_that_was_cancelled_is_asked_again_and_loses_nothing() -> None:
    arrived = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        for number in range(10):
            if number == 5:
                await arrived.wait()
            yield number

    with serving() as server:
        async with asking(server.url, slots=SLOTS) as session:
            stream = session.stream(source(), write=write, read=read)
            found = [await anext(stream) for _ in range(5)]
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            arrived.set()
            found += [each async for each in stream]
            assert found == [*range(10)]
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await serves_right(session)


@in_a_loop
async def test_an_error_that_is_raised_is_the_end_of_the_stream() -> None:
    with serving() as server:
        async with asking(server.url, slots=SLOTS) as session:
            before = streams()
            stream = session.stream(itertools.count(), write=write, read=read)
            await anext(stream)
            server.script(Status(500, '{"error": "no"}', model_runs=False))
            with pytest.raises(InferFailed, match="no"):
                async for _ in stream:
                    pass
            assert [each async for each in stream] == []
            assert streams() == before
            await serves_right(session)


@pytest.mark.parametrize("workers", [0, 1])
@in_a_loop
async def test_a_view_that_was_let_go_of_pins_no_slot_while_the_stream_goes_on(
    workers: int,
) -> None:
    # No room for spare slots.
    region = RegionOptions(max_bytes=8192)
    whole = {INPUT: SHAPE}, {OUTPUT: SHAPE}
    with serving() as server:
        async with AsyncSession(
            server.url,
            "identity",
            slots=1,
            shapes=whole[0],
            outputs=whole[1],
            region=region,
        ) as session:
            stream = session.stream(
                range(9),
                write=write,
                read=lambda _, result: result[OUTPUT],
                workers=workers,
            )
            async for view in stream:
                number = stream.done - 1
                np.testing.assert_array_equal(view, frame(float(number)))
                del view
            await serves_right(session)


@pytest.mark.parametrize("how", ["close", "with", "dropped"])
@in_a_loop
async def test_a_stream_that_is_left_early_leaves_no_task_and_no_slot(how: str) -> None:
    with serving() as server:
        async with asking(server.url, slots=SLOTS) as session:
            before = streams()
            stream = session.stream(itertools.count(), write=write, read=read)
            if how == "with":
                async with stream:
                    await anext(stream)
            else:
                await anext(stream)
            if how == "close":
                await stream.close()
            if how != "dropped":
                assert streams() == before
                assert [each async for each in stream] == []
            del stream
            await comes(lambda: streams() == before, "no task goes on")
            await serves_right(session)


@in_a_loop
async def test_a_stream_can_be_dropped_while_its_requests_are_unanswered() -> None:
    with serving() as server:
        async with asking(server.url, slots=SLOTS) as session:
            await session.warmup()
            before = streams()
            may_go_on = threading.Event()
            server.script(*[Delay(may_go_on)] * SLOTS)
            stream = session.stream(itertools.count(), write=write, read=read)
            asked_for = asyncio.ensure_future(anext(stream))
            await comes(lambda: server.in_model == SLOTS, "all slots are in flight")
            await cancel(asked_for)
            del stream, asked_for
            await comes(lambda: streams() == before, "no task goes on")
            await comes(lambda: session.stats().late == SLOTS, "all slots are late")
            may_go_on.set()
            await serves_right(session)
