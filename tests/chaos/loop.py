"""The event loop of a client: tasks that call, and are cancelled at any moment.

Owns the thread in which it runs, when tasks are cancelled, and what goes wrong in the
loop where no task sees it. Refuses to know the calls.
"""

from __future__ import annotations

import asyncio
import random
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tests.chaos.gate import Gate
from tests.chaos.tally import Tally

T = TypeVar("T")
Act = Callable[[random.Random], Coroutine[Any, Any, None]]

_MEAN_THOUGHT = 0.008
_IMPATIENCE = 0.05
_SOON = 0.002


class Loop:
    """Runs `act` again and again in so many tasks, one for each of `dice`.

    patience: how many seconds an order may take. report: called with whatever nobody
    could catch.
    """

    def __init__(
        self,
        act: Act,
        dice: Sequence[random.Random],
        gate: Gate,
        tally: Tally,
        *,
        patience: float,
        report: Callable[[str], None],
    ) -> None:
        self._act = act
        self._dice = dice
        self._gate = gate
        self._tally = tally
        self._patience = patience
        self._report = report
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._loop: asyncio.AbstractEventLoop
        self._ending: asyncio.Event

    # --- from other threads -----------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._begun.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do something, and wait for it."""
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(self._patience)

    def end(self) -> None:
        """Return when all tasks have ended, and nothing is left in the loop."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(self._patience)

    # --- in the loop ------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._tell)
        self._ending = asyncio.Event()
        self._begun.set()
        await asyncio.gather(*map(self._call_on, self._dice))
        await self._ending.wait()

    async def _call_on(self, dice: random.Random) -> None:
        while not self._ending.is_set():
            # How far a task came must not decide what the next one does.
            own = random.Random(dice.getrandbits(64))
            await self._gate.run_task(lambda own=own: self._call_once(own))  # type: ignore[misc]
            await asyncio.sleep(dice.expovariate(1 / _MEAN_THOUGHT))

    async def _call_once(self, dice: random.Random) -> None:
        """One call in a task of its own, which half the time is cancelled."""
        task = asyncio.create_task(self._act(dice))
        # Others than those of the task: its choices must not depend on the moment.
        own = random.Random(dice.getrandbits(64))
        if own.random() < 0.5:
            await asyncio.wait({task}, timeout=own.uniform(0, _IMPATIENCE))
            while task.cancel():
                self._tally.add("tasks cancelled")
                # What it does in the end is cancelled as well, at times.
                if own.random() < 0.7:
                    break
                await asyncio.wait({task}, timeout=own.uniform(0, _SOON))
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            trace = "".join(traceback.format_exception(error))
            self._report(f"a task ended with what it should have caught:\n{trace}")

    def _tell(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        trace = "" if error is None else "".join(traceback.format_exception(error))
        self._report(f"in the event loop: {context['message']}: {context}\n{trace}")

    def __repr__(self) -> str:
        return f"<Loop of {len(self._dice)} tasks, {self._gate!r}>"
