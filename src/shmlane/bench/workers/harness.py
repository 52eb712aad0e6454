"""The loop inside a contender's process: take orders, send requests, time each one.

Owns the clock, the threads and the JSON lines on stdin and stdout. Uses NumPy and the
standard library only, because it also runs where shmlane is not installed. Refuses to
know any client: those give a `Lane` for each request in flight.

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
from collections.abc import Callable, Sequence
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


class Client(Protocol):
    """What the lanes of one worker share."""

    def lane(self, index: int) -> Lane:
        """A lane, made in the thread that will use it."""

    def close(self) -> None:
        """Take back what was made, after the lanes have closed."""


@dataclass
class Turn:
    """What one lane did in one round."""

    began_ns: int
    ended_ns: int
    requests: int
    wrong: int


class Lanes:
    """One thread for each request in flight; a single one uses the main thread."""

    def __init__(self, client: Client, count: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self._is_alone = count == 1
        self._markers = [float(i * _MARKERS_PER_LANE) for i in range(count)]
        self._times = [array("q") for _ in range(count)]
        self._lanes: list[Lane] = []
        self._lanes = self._each(client.lane)

    def prepare(self, settle_s: float) -> None:
        """Let every lane register again, then send a little traffic."""
        self._each(lambda index: self._lanes[index].prepare())
        self._run(settle_s, _LEAST_SETTLING)

    def run(self, seconds: float) -> dict[str, Any]:
        """Send requests for a while and say what came of it."""
        cpu: list[int] = []
        turns = self._run(seconds, 1, lambda: cpu.append(time.process_time_ns()))
        cpu.append(time.process_time_ns())
        times = np.concatenate(
            [
                np.frombuffer(room, np.int64, turn.requests)
                for room, turn in zip(self._times, turns, strict=True)
            ]
        )
        began = min(turn.began_ns for turn in turns)
        return {
            "requests": sum(turn.requests for turn in turns),
            "wrong": sum(turn.wrong for turn in turns),
            "window_ns": max(turn.ended_ns for turn in turns) - began,
            "cpu_ns": cpu[1] - cpu[0],
            **percentiles_us(times),
        }

    def close(self) -> None:
        """Close all lanes, each in its own thread."""
        self._each(lambda index: self._lanes[index].close())
        for thread in self._threads:
            thread.shutdown()

    def _run(
        self, seconds: float, least: int, at_start: Callable[[], None] = lambda: None
    ) -> list[Turn]:
        room = int(seconds * _MOST_PER_S) + least
        for times in self._times:
            if len(times) < room:
                times.frombytes(bytes(8 * (room - len(times))))
        line = threading.Barrier(len(self._lanes), at_start)

        def one(index: int) -> Turn:
            line.wait()
            return _run_lane(
                self._lanes[index].call,
                window_ns=int(seconds * 1e9),
                least=least,
                first_marker=self._markers[index],
                times=self._times[index],
            )

        return self._each(one)

    def _each(self, work: Callable[[int], T]) -> list[T]:
        if self._is_alone:
            return [work(0)]
        futures: Sequence[Future[T]] = [
            thread.submit(work, index) for index, thread in enumerate(self._threads)
        ]
        return [future.result() for future in futures]


def _run_lane(
    call: Callable[[float], bool],
    *,
    window_ns: int,
    least: int,
    first_marker: float,
    times: array[int],
) -> Turn:
    clock = time.perf_counter_ns
    marker, wrong, count, room = first_marker, 0, 0, len(times)
    began = now = clock()
    until = began + window_ns
    while (now < until or count < least) and count < room:
        marker += 1.0
        if not call(marker):
            wrong += 1
        done = clock()
        times[count] = done - now
        now = done
        count += 1
    return Turn(began, now, count, wrong)


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
    spec = Spec.from_argument()
    client = make_client(spec)
    try:
        lanes = Lanes(client, spec.concurrency)
        try:
            _answer(lanes, say)
        finally:
            lanes.close()
    finally:
        client.close()


def _answer(lanes: Lanes, say: Callable[..., None]) -> None:
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "prepare":
            lanes.prepare(order["seconds"])
            gc.collect()
            gc.freeze()
            say(ready=True)
        else:
            say(**lanes.run(order["seconds"]))
