"""One process fills slots, others send them: decode here, infer there, copy nothing.

    python examples/processes.py                    # starts a server of its own
    python examples/processes.py --url localhost:8000 --frames 5000 --consumers 4

Owns a decoder that draws numbered frames straight into shared memory, consumers that
send what it has filled, and a check that each answer belongs to its frame. Between them
travels a reference of some 80 bytes for each frame, whatever its size. The decoder has
no connection to the server. Without --url it starts a tritonserver with the model
`identity`, which `shmlane serve` serves too.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shmlane
from shmlane.server import TritonServer

SHAPE = (1, 3, 360, 640)
INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"
SLOTS = 8

# A frame's number, and its slot; None after the last one.
Job = tuple[int, shmlane.SlotRef] | None
# What the server found in the frame of that number, or why it found nothing.
Answer = tuple[int, float | shmlane.ShmlaneError]


def draw_into(view: NDArray[Any], number: int) -> None:
    """What a video decoder would do: write a frame where it is told to."""
    view.fill(0)
    view[..., number % SHAPE[-1]] = number


def decode(
    handle: shmlane.SessionHandle, frames: int, consumers: int, jobs: Queue[Job]
) -> None:
    """Fill slots for as long as there are frames. Waits while all slots are out."""
    with shmlane.Session.attach(handle, slots=SLOTS) as session:
        for number in range(frames):
            with session.lease(timeout=60.0) as lease:
                draw_into(lease[INPUT], number)
                jobs.put((number, lease.detach()))
        for _ in range(consumers):
            jobs.put(None)
    # Slots that are still out are with whoever adopts them, also after this.


def consume(
    handle: shmlane.SessionHandle, jobs: Queue[Job], answers: Queue[Answer]
) -> None:
    """Send what others have filled, and read the results in place."""
    with shmlane.Session.attach(handle, slots=0) as session:
        while (job := jobs.get()) is not None:
            number, ref = job
            try:
                with session.adopt(ref) as lease:
                    answers.put((number, float(lease.infer()[OUTPUT].max())))
            except shmlane.ShmlaneError as error:
                # Such as HandoffExpired: nobody had time for it, and it was taken back.
                answers.put((number, error))


def run(url: str, frames: int, consumers: int) -> list[Answer]:
    """The number of each frame, and what the server found in it."""
    # Not forked: a child has no use for the threads and connections of its parent.
    context = multiprocessing.get_context("spawn")
    jobs: Queue[Job] = context.Queue()
    answers: Queue[Answer] = context.Queue()
    with shmlane.Session(url, "identity", slots=1, shapes={INPUT: SHAPE}) as session:
        handle = session.share(slots=SLOTS)
        processes = [
            context.Process(target=decode, args=(handle, frames, consumers, jobs)),
            *(
                context.Process(target=consume, args=(handle, jobs, answers))
                for _ in range(consumers)
            ),
        ]
        for process in processes:
            process.start()
        found = [answers.get(timeout=60.0) for _ in range(frames)]
        for process in processes:
            process.join()
    return found


@contextlib.contextmanager
def served(url: str | None) -> Iterator[str]:
    """The server that was given, or one that ends with the block."""
    if url is not None:
        yield url
        return
    with TritonServer() as server:
        yield server.http_url


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode here, infer there.")
    parser.add_argument("--url", help="a Triton server with the model identity")
    parser.add_argument(
        "--frames", type=int, default=500, help="how many (%(default)s)"
    )
    parser.add_argument(
        "--consumers", type=int, default=2, help="processes (%(default)s)"
    )
    given = parser.parse_args(arguments)
    if given.consumers < 1:
        parser.error("somebody has to send the frames: --consumers 1 or more.")
    try:
        with served(given.url) as url:
            begun = time.perf_counter()
            found = run(url, given.frames, given.consumers)
            seconds = time.perf_counter() - begun
    except shmlane.ShmlaneError as error:
        sys.exit(str(error))
    for number, value in found:
        if isinstance(value, shmlane.ShmlaneError):
            sys.exit(f"frame {number} has no answer: {value}")
    wrong = [number for number, value in found if value != number]
    assert not wrong, f"these frames have another's answer: {wrong}"
    megabytes = given.frames * np.prod(SHAPE) * 4 / 1e6
    print(  # noqa: T201
        f"{len(found)} frames, {megabytes:.0f} MB, by {given.consumers} consumers in"
        f" {seconds:.1f} s; every answer is that of its frame"
    )


if __name__ == "__main__":
    main()
