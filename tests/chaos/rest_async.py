"""The same as `rest`, in an event loop.

Owns the use of every slot of the tasks' sessions, and their end without a server.
Refuses to excuse an error, as `rest` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence

from shmlane import AsyncLease, AsyncSession, InferTimeout, OwnedResult, PoolClosed
from tests.chaos.futures import ANSWERED_WITHIN
from tests.chaos.lanes import FIRST_SHAPE, INPUT, OUTPUT, Lane
from tests.chaos.rest import (
    HARDLY_ANY,
    LIMITS,
    PATIENCE,
    fill_at_rest,
    items_at_rest,
    must_time_out,
    no_excuse,
)
from tests.chaos.tokens import fill, filled
from tests.chaos.witness import Witness

Unanswered = asyncio.Task[OwnedResult]


class AsyncRest:
    """Orders for quiet times, each a coroutine. Used by one task at a time."""

    def __init__(self, lanes: Sequence[Lane[AsyncSession]], witness: Witness) -> None:
        self._lanes = lanes
        self._witness = witness
        self._visits: list[Lane[AsyncSession]] = []
        self._departures = itertools.count()

    # --- every slot works -------------------------------------------------------------

    async def use_every_slot(self) -> None:
        for number, lane in enumerate(self._lanes):
            with no_excuse(self._witness, lane):
                if number % 2:
                    await self._stream(lane)
                await self._use_slots(lane)

    async def _use_slots(self, lane: Lane[AsyncSession]) -> None:
        """All at once, and each of them twice in a row."""
        session = lane.session
        async with contextlib.AsyncExitStack() as held:
            leases = [
                await held.enter_async_context(session.lease(timeout=PATIENCE))
                for _ in range(session.stats().slots)
            ]
            for _ in range(2):
                await asyncio.gather(*(self._ask(lane, lease) for lease in leases))

    async def _ask(self, lane: Lane[AsyncSession], lease: AsyncLease) -> None:
        view, token = fill_at_rest(self._witness, lease)
        output = (await lease.infer(timeout=PATIENCE))[OUTPUT]
        self._witness.judge(output, token, view.shape, lane)

    async def _stream(self, lane: Lane[AsyncSession]) -> None:
        session = lane.session
        tokens, items = items_at_rest(self._witness, 2 * session.stats().slots)
        async with session.stream(items, timeout=PATIENCE) as results:
            for token in tokens:
                output = (await anext(results))[OUTPUT]
                self._witness.judge(output, token, FIRST_SHAPE, lane)

    # --- sessions that end without a server -------------------------------------------

    async def visit(self) -> None:
        self._visits = [lane.visit(LIMITS) for lane in self._lanes]
        for visit in self._visits:
            with no_excuse(self._witness, visit):
                await visit.session.open(wait=PATIENCE)

    async def leave(self) -> None:
        leaving = (self._leave(each, next(self._departures)) for each in self._visits)
        await asyncio.gather(*leaving)
        self._witness.tally.add("sessions left", len(self._visits))
        self._visits = []

    async def _leave(self, visit: Lane[AsyncSession], number: int) -> None:
        session, witness = visit.session, self._witness
        with no_excuse(witness, visit):
            unanswered = await _IN_VAIN[number % len(_IN_VAIN)](witness, session)
            await session.close(wait=number // len(_IN_VAIN) % 2 == 0)
            if unanswered is not None:
                await self._await_end_of(unanswered, session)

    async def _await_end_of(self, task: Unanswered, session: AsyncSession) -> None:
        """A task that waits when its session is closed ends soon, without a reply."""
        witness = self._witness
        await asyncio.wait({task}, timeout=ANSWERED_WITHIN)
        if not task.done():
            witness.report(f"a task of {session!r} is not answered: {task!r}")
        elif not isinstance(error := task.exception(), PoolClosed | InferTimeout):
            witness.report(f"a task got {error!r} from {session!r}")
        witness.tally.add("tasks closed")


# --- what is asked in vain: a task that is still unanswered ---------------------------


async def _infer(witness: Witness, session: AsyncSession) -> None:
    with must_time_out(witness, session):
        inputs = {INPUT: filled(FIRST_SHAPE, witness.tokens.make())}
        await session.infer(inputs, timeout=HARDLY_ANY)


async def _infer_for_a_moment(witness: Witness, session: AsyncSession) -> None:
    async with session.lease() as lease:
        fill(lease[INPUT], witness.tokens.make())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HARDLY_ANY):
                await lease.infer(timeout=None)
                witness.report(f"a server that stands still has answered {session!r}")


async def _submit_and_leave(witness: Witness, session: AsyncSession) -> Unanswered:
    async with session.lease() as lease:
        fill(lease[INPUT], witness.tokens.make())
        return lease.submit()


async def _stream(witness: Witness, session: AsyncSession) -> None:
    items = [{INPUT: filled(FIRST_SHAPE, witness.tokens.make())} for _ in range(2)]
    with must_time_out(witness, session):
        async with session.stream(items, timeout=HARDLY_ANY) as results:
            await anext(results)


async def _nothing(witness: Witness, session: AsyncSession) -> None:
    """It leaves with nothing in flight."""


_IN_VAIN: tuple[
    Callable[[Witness, AsyncSession], Awaitable[Unanswered | None]], ...
] = (_submit_and_leave, _infer, _infer_for_a_moment, _stream, _nothing)
