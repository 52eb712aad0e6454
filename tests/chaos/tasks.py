"""What the tasks of a client's event loop do: every way to ask without a thread.

Owns the choice of a way, and each of them. Refuses to catch a cancellation: whoever
runs these cancels them at any moment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from shmlane import (
    AsyncLease,
    AsyncSession,
    LeaseBusy,
    LeaseExpired,
    OwnedResult,
    ShmlaneError,
)
from tests.chaos.flows import Flow, Item
from tests.chaos.habits import (
    Asked,
    limits_of_a_visit,
    some_limit,
    some_shape,
    some_view,
    some_wait,
    what_is_kept,
)
from tests.chaos.handing import AsyncHanding
from tests.chaos.lanes import INPUT, OUTPUT, SLOTS, Lane
from tests.chaos.letters import Letterbox
from tests.chaos.tokens import filled
from tests.chaos.witness import Witness

T = TypeVar("T")
Way = Callable[[Witness, Lane[AsyncSession], random.Random], Awaitable[None]]

_IMPATIENCE = 0.03


class AsyncCaller:
    """Calls at random, from any number of tasks of one event loop."""

    def __init__(
        self,
        lanes: Sequence[Lane[AsyncSession]],
        witness: Witness,
        letters: Letterbox,
    ) -> None:
        self._lanes = lanes
        self._witness = witness
        handing = AsyncHanding(letters)
        self._ways: list[Way] = [*_WAYS, handing.give, handing.take]

    async def act(self, dice: random.Random) -> None:
        """One call, and a look at a kept view. Raises nothing but cancellation."""
        (way,), lane = dice.choices(self._ways, _WEIGHTS), dice.choice(self._lanes)
        with self._witness.excusing(lane):
            await way(self._witness, lane, dice)
        self._witness.glance(dice)


async def ask_by_copy(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    token, shape = witness.tokens.make(), some_shape(dice)
    inputs = {INPUT: filled(shape, token)}
    witness.tally.add("requests")
    outputs = await lane.session.infer(inputs, timeout=some_limit(dice))
    witness.tally.add("successes")
    witness.judge(outputs[OUTPUT], token, shape, lane)


async def ask_in_place(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    async with lane.session.lease(timeout=some_wait(dice)) as lease:
        while dice.random() < 0.3:
            await _infer(lease, witness, lane, dice)
        await _infer(lease, witness, lane, dice, keep=what_is_kept(dice))


async def ask_impatiently(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    """Whoever gave up and asks again too early is told so, or gets the right reply."""
    async with lane.session.lease() as lease:
        try:
            async with asyncio.timeout(dice.uniform(0, _IMPATIENCE)) as limit:
                await _infer(lease, witness, lane, dice)
        except TimeoutError as error:
            if isinstance(error, ShmlaneError):
                raise
        if not limit.expired():
            return
        witness.tally.add("timeouts of asyncio")
        if dice.random() < 0.5:
            try:
                await _infer(lease, witness, lane, dice)
            except (LeaseBusy, LeaseExpired):
                witness.tally.add("leases found busy")


async def gather(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    """Several at once; one that fails by itself does not take the others along."""
    calls = (ask_by_copy(witness, lane, dice) for _ in range(dice.randint(2, SLOTS)))
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(error, Exception):
            witness.excuse(lane, error)


async def submit_copies(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    token, shape = witness.tokens.make(), some_shape(dice)
    array = filled(shape, token)
    witness.tally.add("requests")
    task = await lane.session.submit({INPUT: array}, timeout=some_limit(dice))
    array[...] = -1.0
    outputs = await _settle(task, witness, dice)
    if outputs is not None:
        witness.tally.add("successes")
        witness.judge(outputs[OUTPUT], token, shape, lane)


async def submit_lease(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    async with lane.session.lease(timeout=some_wait(dice)) as lease:
        asked = Asked(witness, lane, some_view(lease, dice), keep=what_is_kept(dice))
        task: asyncio.Task[OwnedResult] = lease.submit(timeout=some_limit(dice))
    result = await _settle(task, witness, dice)
    if result is not None:
        output = result[OUTPUT]
        await asyncio.sleep(asked.answered(output, dice))
        asked.used(output)
        if dice.random() < 0.5:
            result.release()


async def stream(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    """As `flows.stream`, with an end of its own for each kind of `async for`."""
    flow = Flow(witness, lane, dice)
    session, manner = lane.session, flow.manner
    if flow.is_plain:
        results: Any = session.stream(flow.plain_items(), **manner)
    elif dice.random() < 0.5:
        items = _slowly(flow, dice)
        results = session.stream(items, write=flow.write, read=flow.read, **manner)
    else:
        results = session.stream(
            flow.items(), write=flow.write, read=flow.read, **manner
        )
    async with results:
        async for outcome in results:
            flow.take(outcome)
            if flow.has_enough:
                flow.left()
                return
            await asyncio.sleep(flow.pause)
    flow.ended(results.done)


async def drop_the_lease(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    """A finaliser gives it back."""
    lease = await lane.session.lease()
    witness.tally.add("leases dropped")
    await _infer(lease, witness, lane, dice, keep=what_is_kept(dice))


async def visit(
    witness: Witness, lane: Lane[AsyncSession], dice: random.Random
) -> None:
    """A session for a single way to ask, opened and closed amid the faults."""
    visit = lane.visit(limits_of_a_visit(dice))
    witness.tally.add("visits of tasks")
    (way,) = dice.choices(*_WAYS_OF_A_VISIT)
    async with visit.session as session:
        try:
            await way(witness, visit, dice)
        finally:
            witness.tally.add_stats(session.stats())


async def _infer(
    lease: AsyncLease,
    witness: Witness,
    lane: Lane[AsyncSession],
    dice: random.Random,
    *,
    keep: str = "",
) -> None:
    """One inference; the last one of a lease may `keep` a view beyond it."""
    view = some_view(lease, dice)
    asked = Asked(witness, lane, view, keep=keep)
    output = (await lease.infer(timeout=some_limit(dice)))[OUTPUT]
    await asyncio.sleep(asked.answered(output, dice, view=view))
    asked.used(output)


async def _settle(
    task: asyncio.Task[T], witness: Witness, dice: random.Random
) -> T | None:
    """Await a task of the session's, cancel it, or leave it to itself."""
    # Whoever awaits it may be cancelled, and then nobody looks.
    task.add_done_callback(_look_at)
    fate = dice.random()
    if fate < 0.1:
        witness.tally.add("tasks forgotten")
        return None
    if fate < 0.4:
        await asyncio.wait({task}, timeout=dice.uniform(0, _IMPATIENCE))
        if task.cancel():
            witness.tally.add("submitted tasks cancelled")
            await asyncio.wait({task})
        if task.cancelled():
            return None
    return await task


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _slowly(flow: Flow, dice: random.Random) -> AsyncIterator[Item]:
    for item in flow.items():
        await asyncio.sleep(dice.choice((0.0, flow.pause)))
        yield item


_WAYS: tuple[Way, ...] = (
    ask_in_place,
    ask_by_copy,
    ask_impatiently,
    gather,
    submit_copies,
    submit_lease,
    stream,
    drop_the_lease,
    visit,
)
# Of these, and of giving and taking.
_WEIGHTS = (26, 14, 14, 6, 8, 10, 12, 3, 1, 3, 6)
_WAYS_OF_A_VISIT: tuple[list[Way], list[int]] = (
    [ask_in_place, submit_lease, stream],
    [50, 30, 20],
)
