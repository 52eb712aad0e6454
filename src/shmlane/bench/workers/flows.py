"""Many requests in flight from one thread: the tasks of an event loop, and a stream.

Owns keeping them in flight and timing each, from taking the memory to having read the
value, as for threads. Refuses to know anything behind the public API.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

import shmlane

from .harness import Log, Spec, Traffic, Turn


def session_options(spec: Spec) -> dict[str, Any]:
    """How a worker makes its session: a slot for each request in flight."""
    return {
        "slots": spec.concurrency,
        "shapes": {"INPUT__0": spec.shape},
        "memory": "wire" if spec.way == "in the request" else "system",
    }


class TasksClient:
    """One asynchronous session in an event loop that lasts as long as the worker."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._runner = asyncio.Runner()
        self._session = shmlane.AsyncSession(
            spec.url, spec.model, **session_options(spec)
        )
        self._runner.run(self._session.open())

    def traffic(self) -> Traffic:
        """One task for each request in flight."""
        return Tasks(self._runner, self._session, self._spec)

    def close(self) -> None:
        """Unregister and remove the session's memory, and end the loop."""
        self._runner.run(self._session.close())
        self._runner.close()


class Tasks:
    """Tasks that send one request after the other, each its own."""

    def __init__(
        self, runner: asyncio.Runner, session: shmlane.AsyncSession, spec: Spec
    ) -> None:
        self._runner = runner
        self._session = session
        self._last = spec.last
        self._source = spec.source() if spec.fill else None
        self._logs = [Log(index) for index in range(spec.concurrency)]

    def prepare(self) -> None:
        """Run each slot once: a session notices lost registrations by itself."""
        self._runner.run(self._session.warmup())

    def send(
        self, seconds: float, least: int, at_start: Callable[[], None]
    ) -> Sequence[Turn]:
        """All tasks at once."""
        turns = [Turn(log, seconds, least) for log in self._logs]
        self._runner.run(self._send(turns, at_start))
        return turns

    async def _send(self, turns: Sequence[Turn], at_start: Callable[[], None]) -> None:
        at_start()
        await asyncio.gather(*map(self._one, turns))

    async def _one(self, turn: Turn) -> None:
        for marker in turn:
            if not await self.call(marker):
                turn.wrong += 1

    async def call(self, marker: float) -> bool:
        """Lease, view, write in place, infer, read in place."""
        async with self._session.lease() as lease:
            view = lease["INPUT__0"]
            if self._source is not None:
                np.copyto(view, self._source)
            view[self._last] = marker
            result = await lease.infer()
            return float(result["OUTPUT__0"][0]) == marker

    def close(self) -> None:
        """The session is the client's to close."""


class BlockingClient:
    """One session, opened as long as the worker lasts."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.session = shmlane.Session(spec.url, spec.model, **session_options(spec))
        self.session.open()

    def close(self) -> None:
        """Unregister and remove the session's memory."""
        self.session.close()


class StreamClient(BlockingClient):
    """Keeps the slots busy from one thread."""

    def traffic(self) -> Traffic:
        """One stream a round."""
        return Stream(self.session, self.spec)


class Overlapping(Turn):
    """A turn whose requests overlap: they end in the order in which they began.

    Iterating gives values while there is time; `finish` takes what came of them.
    """

    def __init__(self, log: Log, seconds: float, least: int) -> None:
        super().__init__(log, seconds, least)
        self._begun: deque[int] = deque()

    def __iter__(self) -> Iterator[float]:
        clock, least, room = time.perf_counter_ns, self._least, len(self._times)
        marker, count, begin = self._first_marker, 0, self._begun.append
        self.began_ns = now = clock()
        until = now + self._window_ns
        while (now < until or count < least) and count < room:
            marker += 1.0
            count += 1
            # Right before its memory is taken.
            begin(now)
            yield marker
            now = clock()

    def finish(self, values: Iterable[float]) -> None:
        """Time each of `values` as it comes; it has to be the oldest that was sent."""
        clock, times, begun = time.perf_counter_ns, self._times, self._begun.popleft
        expected, count, wrong = self._first_marker, 0, 0
        for value in values:
            now = clock()
            times[count] = now - begun()
            expected += 1.0
            count += 1
            if value != expected:
                wrong += 1
        self.ended_ns, self.requests, self.wrong = clock(), count, wrong


class Stream:
    """`Session.stream`, with as many in flight as there are slots."""

    def __init__(self, session: shmlane.Session, spec: Spec) -> None:
        self._session = session
        self._in_flight = spec.concurrency
        self._last = spec.last
        self._source = spec.source() if spec.fill else None
        self._log = Log(0)

    def prepare(self) -> None:
        """Run each slot once: a session notices lost registrations by itself."""
        self._session.warmup()

    def send(
        self, seconds: float, least: int, at_start: Callable[[], None]
    ) -> Sequence[Turn]:
        """One stream of all requests; results come in order."""
        turn = Overlapping(self._log, seconds, least)

        last, source = self._last, self._source

        def write(lease: shmlane.Lease, marker: float) -> None:
            view = lease["INPUT__0"]
            if source is not None:
                np.copyto(view, source)
            view[last] = marker

        def read(marker: float, result: shmlane.Result) -> float:
            return float(result["OUTPUT__0"][0])

        at_start()
        turn.finish(
            self._session.stream(
                turn, write=write, read=read, in_flight=self._in_flight
            )
        )
        return [turn]

    def close(self) -> None:
        """The session is the client's to close."""
