"""The loop inside a contender's process: take orders, send requests, time each one.

Owns the clock, the threads and the JSON lines on stdin and stdout. Uses NumPy and the
standard library only, because it also runs where shmlane is not installed. Refuses to
know any client: those give their `Traffic`, which mostly is `Lanes`, with a `Lane` for
each request in flight.

What is timed is everything that a caller does for one answer, from taking the memory to
having read the value, loop included: one reading of the clock ends a request and begins
the next.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0}
_MOST_PER_S = 100_000
# Lanes never send the same value at the same time, and float32 holds each exactly.
_MARKERS_PER_LANE = 1 << 18
_LEAST_SETTLING = 3


@dataclass(frozen=True)
class Spec:
    """What one worker measures, as its first argument tells it."""

    contender: str
    url: str
    model: str
    shape: tuple[int, ...]
    concurrency: int
    fill: bool
    way: str
    flow: str

    @classmethod
    def from_argument(cls) -> Spec:
        """Read it from the command line."""
        facts = json.loads(sys.argv[1])
        return cls(**{**facts, "shape": tuple(facts["shape"])})

    @property
    def last(self) -> tuple[int, ...]:
        """Index of the last element: what the model answers with."""
        return (-1,) * len(self.shape)

    def source(self) -> Array:
        """An input of a lane's own, as a decoded picture would be."""
        size = int(np.prod(self.shape))
        return np.linspace(0.0, 1.0, size, dtype=np.float32).reshape(self.shape)


class Lane(Protocol):
    """One request at a time, from one thread."""

    def prepare(self) -> None:
        """Make good what the server may have forgotten since the last round."""

    def call(self, marker: float) -> bool:
        """Send one request whose last element is `marker`; whether the reply is it."""

    def close(self) -> None:
        """Take back everything that this lane made."""


class Traffic(Protocol):
    """As many requests in flight as the specification says, for a while."""

    def prepare(self) -> None:
        """Make good what the server may have forgotten since the last round."""

    def send(
        self, seconds: float, least: int, at_start: Callable[[], None]
    ) -> Sequence[Turn]:
        """Send for so long, and at least so many in each turn.

        at_start: called when everybody is ready, right before the first request.
        """

    def close(self) -> None:
        """Take back what was made for it."""


class Client(Protocol):
    """What one worker measures."""

    def traffic(self) -> Traffic:
        """What sends its requests."""

    def close(self) -> None:
        """Take back what was made, after the traffic has closed."""


class Turn:
    """The requests of one lane in one round.

    Iterating gives the value for each request, and times what is done with it.
    """

    def __init__(self, log: Log, seconds: float, least: int) -> None:
        self._times = log.times_for(seconds, least)
        self._first_marker = log.first_marker
        self._window_ns = int(seconds * 1e9)
        self._least = least
        self.began_ns = self.ended_ns = 0
        self.requests = self.wrong = 0

    def __iter__(self) -> Iterator[float]:
        clock, times, least = time.perf_counter_ns, self._times, self._least
        marker, count, room = self._first_marker, 0, len(self._times)
        self.began_ns = now = clock()
        until = now + self._window_ns
        while (now < until or count < least) and count < room:
            marker += 1.0
            yield marker
            done = clock()
            times[count] = done - now
            now = done
            count += 1
        self.ended_ns, self.requests = now, count

    @property
    def times_ns(self) -> Array:
        """How long each request took, once all are over."""
        return np.frombuffer(self._times, np.int64, self.requests)


class Log:
    """What a lane keeps between its turns: room for its times, and its own values."""

    def __init__(self, index: int) -> None:
        self.first_marker = float(index * _MARKERS_PER_LANE)
        self._times = array("q")

    def times_for(self, seconds: float, least: int) -> array[int]:
        """Room that was touched before, so that no page fault is timed."""
        missing = int(seconds * _MOST_PER_S) + least - len(self._times)
        if missing > 0:
            self._times.frombytes(bytes(8 * missing))
        return self._times


class Lanes:
    """One thread for each request in flight; a single one uses the main thread."""

    def __init__(self, make_lane: Callable[[int], Lane], count: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self._is_alone = count == 1
        self._logs = [Log(index) for index in range(count)]
        self._lanes: list[Lane] = []
        self._lanes = self._each(make_lane)

    def prepare(self) -> None:
        """Let every lane register again."""
        self._each(lambda index: self._lanes[index].prepare())

    def send(
        self, seconds: float, least: int, at_start: Callable[[], None]
    ) -> Sequence[Turn]:
        """All lanes at once, each in its own thread."""
        turns = [Turn(log, seconds, least) for log in self._logs]
        line = threading.Barrier(len(turns), at_start)

        def one(index: int) -> Turn:
            turn, call = turns[index], self._lanes[index].call
            line.wait()
            for marker in turn:
                if not call(marker):
                    turn.wrong += 1
            return turn

        return self._each(one)

    def close(self) -> None:
        """Close all lanes, each in its own thread."""
        self._each(lambda index: self._lanes[index].close())
        for thread in self._threads:
            thread.shutdown()

    def _each(self, work: Callable[[int], T]) -> list[T]:
        if self._is_alone:
            return [work(0)]
        futures: Sequence[Future[T]] = [
            thread.submit(work, index) for index, thread in enumerate(self._threads)
        ]
        return [future.result() for future in futures]


def prepare(traffic: Traffic, settle_s: float) -> None:
    """Before a round: let everything register again, then send a little."""
    traffic.prepare()
    traffic.send(settle_s, _LEAST_SETTLING, lambda: None)


def measure(traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Send requests for a while and say what came of it."""
    cpu: list[int] = []
    turns = traffic.send(seconds, 1, lambda: cpu.append(time.process_time_ns()))
    cpu.append(time.process_time_ns())
    return {
        "requests": sum(turn.requests for turn in turns),
        "wrong": sum(turn.wrong for turn in turns),
        "began_ns": min(turn.began_ns for turn in turns),
        "ended_ns": max(turn.ended_ns for turn in turns),
        "cpu_ns": cpu[1] - cpu[0],
        **percentiles_us(np.concatenate([turn.times_ns for turn in turns])),
    }


def percentiles_us(times_ns: Array) -> dict[str, float]:
    """The percentiles that reports have, from the latency of every request."""
    values = np.percentile(times_ns, list(PERCENTILES.values())) / 1e3
    return dict(zip(PERCENTILES, map(float, values), strict=True))


def serve(make_client: Callable[[Spec], Client]) -> None:
    """Run one worker until its stdin ends, then take everything back."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not pass for a reply

    def say(**facts: Any) -> None:
        replies.write(json.dumps(facts) + "\n")
        replies.flush()

    try:
        _serve(make_client, say)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise


def _serve(make_client: Callable[[Spec], Client], say: Callable[..., None]) -> None:
    client = make_client(Spec.from_argument())
    try:
        traffic = client.traffic()
        try:
            _answer(traffic, say)
        finally:
            traffic.close()
    finally:
        client.close()


def _answer(traffic: Traffic, say: Callable[..., None]) -> None:
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "prepare":
            prepare(traffic, order["seconds"])
            gc.collect()
            gc.freeze()
            say(ready=True)
        else:
            _wait_until(order.get("at_ns", 0))
            say(**measure(traffic, order["seconds"]))


def _wait_until(at_ns: int) -> None:
    """Several workers that shall begin at once are told when."""
    time.sleep(max(0, at_ns - time.perf_counter_ns()) / 1e9)
