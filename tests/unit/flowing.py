"""Many requests at once on a scripted server: what is asked, and what must hold.

Owns the session that the tests of futures and streams share, and its items. Refuses
real servers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmlane import Lease, Result, Session, Timeouts, fleet, flights, passages, streams
from shmlane.engine import Engine
from shmlane.futures import OwnedResult
from shmlane.inventory import clean_up
from shmlane.receiver import Receiver
from shmlane.testing import FakeModel, ScriptedServer
from tests.polling import eventually
from tests.sessions import Array, all_free
from tests.unit.asked import session_on, slots_of

SIZE = 8
LIMIT = 10.0

Pair = tuple[ScriptedServer, Session]
Outputs = dict[str, Array]


class Gates(dict[float, threading.Event]):
    """Values that the model lets pass only when their gate is open."""

    def shut(self, value: float) -> threading.Event:
        self[value] = gate = threading.Event()
        return gate

    def pass_by(self, value: float) -> None:
        if value in self:
            assert self[value].wait(LIMIT)

    def open_all(self) -> None:
        for gate in self.values():
            gate.set()


def doubling(gates: Gates) -> FakeModel:
    """Twice what is given; it refuses what is below zero."""

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        given = inputs["X"]
        gates.pass_by(float(given[0]))
        if given[0] < 0:
            raise ValueError(f"the model takes no {given[0]:g}")
        return {"Y": 2 * given}

    return FakeModel(
        "doubling",
        inputs={"X": ("FP32", (-1,))},
        outputs={"Y": ("FP32", (-1,))},
        run=run,
    )


@contextlib.contextmanager
def flowing(
    *,
    slots: int = 2,
    memory: str = "system",
    gates: Gates | None = None,
    **options: Any,
) -> Iterator[Pair]:
    """A session whose tensors of eight numbers have their place from the start."""
    gates = Gates() if gates is None else gates
    told: dict[str, Any] = {
        "shapes": {"X": (SIZE,)},
        "outputs": {"Y": (SIZE,)},
        "timeouts": Timeouts(connect=2.0, infer=LIMIT, lease=LIMIT),
    }
    model = doubling(gates)
    with session_on(model, slots=slots, memory=memory, **told | options) as pair:
        try:
            yield pair
        finally:
            gates.open_all()
    # What a session left that was closed with requests in flight.
    clean_up(only=pair[0].url)


# --- items ----------------------------------------------------------------------------


def item(value: float) -> dict[str, Array]:
    return {"X": np.full(SIZE, value, np.float32)}


def fill(lease: Lease, value: float) -> None:
    """A `write` for streams whose items are numbers."""
    lease["X"][...] = value


def number_of(given: float, result: Result) -> float:
    """A `read` for streams whose items are numbers."""
    assert value_of(result) == given
    return given


def view_of(_given: float, result: Result) -> Array:
    """A `read` that keeps the slot."""
    return result["Y"]


def value_of(outputs: Mapping[str, Array]) -> float:
    """The value that these outputs, all of them, were made of."""
    output = outputs["Y"]
    assert output.shape == (SIZE,)
    assert (output == output[0]).all()
    return float(output[0]) / 2


def answer(future: Future[Outputs]) -> float:
    """The value that the outputs of a future were made of."""
    return value_of(future.result(LIMIT))


def owned(session: Session, number: float) -> Future[OwnedResult]:
    """A future whose result has its slot."""
    with session.lease() as lease:
        fill(lease, number)
        return lease.submit()


def outcome(stream: Iterator[Any]) -> tuple[list[Any], BaseException | None]:
    """What a stream hands out, and what it raises then."""
    values: list[Any] = []
    try:
        for value in stream:
            values.append(value)  # noqa: PERF402 - those before the error count
    except BaseException as error:
        assert list(stream) == []
        return values, error
    return values, None


# --- the state ------------------------------------------------------------------------


def is_free(session: Session) -> bool:
    stats = session.stats()
    return stats.free == stats.slots


@contextlib.contextmanager
def unharmed(pair: Pair) -> Iterator[None]:
    """However it ends: all slots, descriptors and threads come back, and serve."""
    server, session = pair
    session.warmup()
    gc.collect()
    before, threads = open_descriptors(), threading.active_count()
    yield
    server.release()
    all_free(session)
    is_idle(session)
    gc.collect()
    eventually(lambda: open_descriptors() <= before, "descriptors are closed")
    eventually(lambda: threading.active_count() <= threads, "threads have ended")
    values = list(session.stream(range(9), write=fill, read=number_of))
    assert values == list(range(9))


def all_came(session: Session) -> bool:
    """Whether there is a reply for all that is in flight."""
    flying = [slot for slot in slots_of(session) if slot.server_hold]
    return not any(slot.channel is None or slot.channel.is_quiet for slot in flying)


def ends(session: Session) -> int:
    """How many connections the server has ended, as this end knows."""
    poller = select.poll()
    for slot in slots_of(session):
        if slot.channel is not None and slot.channel.is_open:
            poller.register(slot.channel, select.POLLRDHUP)
    return len(poller.poll(0))


def engine_of(session: Session) -> Engine:
    engine = session._engine
    assert engine is not None
    return engine


def receiver_of(session: Session) -> Receiver:
    return engine_of(session).receiver


def is_idle(session: Session) -> None:
    """No thread of the session runs any more."""
    receiver = receiver_of(session)
    eventually(lambda: not receiver.is_busy, lambda: f"{receiver!r} is idle")


def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float = 2 * LIMIT) -> None:
    """As if whoever keeps the time of requests had not run for so long."""
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)
    for module in (fleet, flights, passages, streams):
        monkeypatch.setattr(module, "time", later)


# --- the process ----------------------------------------------------------------------


def in_a_child(use: Callable[[], object]) -> str:
    """What goes wrong when a forked child does this; "" if nothing does."""
    near, far = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(far, "w") as told:
            try:
                use()
            except BaseException:
                told.write(traceback.format_exc())
        os._exit(0)
    os.close(far)
    with os.fdopen(near) as heard:
        try:
            if not select.select([heard], [], [], LIMIT)[0]:
                os.kill(child, signal.SIGKILL)
                return "it hangs"
            return heard.read()
        finally:
            os.waitpid(child, 0)


def open_descriptors() -> int:
    """Those of connections and of what watches them: memory may have moved."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += not os.readlink(f"/proc/self/fd/{number}").startswith("/dev/shm")
    return count
