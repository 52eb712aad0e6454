"""What nobody holds any more comes back at once, whatever else is in flight."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator

import pytest

from shmlane import Session
from shmlane.testing import Delay, ScriptedServer
from tests.polling import eventually
from tests.sessions import frame
from tests.unit.one_slot import INPUT, OUTPUT, files_of, fill, serving

SHAPE = (1, 1, 1, 8)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


def two_slots(server: ScriptedServer, *, memory: str = "system") -> Session:
    return Session(
        server.url,
        "identity",
        slots=2,
        memory=memory,
        shapes={INPUT: SHAPE},
        outputs={OUTPUT: SHAPE},
    )


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_dropped_result_gives_its_slot_back_while_another_future_waits(
    server: ScriptedServer, memory: str
) -> None:
    go = threading.Event()
    with two_slots(server, memory=memory) as session:
        server.script(Delay(go))
        waiting = session.submit({INPUT: frame(1)})
        # Of two connections the server may read either first.
        server.wait_for(1)
        with session.lease() as lease:
            fill(lease, 2)
            assert lease.submit().result(10)[OUTPUT].tolist() == frame(2).tolist()
        assert not waiting.done()
        eventually(lambda: session.stats().free == 1, "its slot is free", timeout=5)
        go.set()
        assert waiting.result(10)[OUTPUT].tolist() == frame(1).tolist()


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_no_thread_waits_for_what_was_cancelled(
    server: ScriptedServer, memory: str
) -> None:
    go = threading.Event()
    before = threads()
    with two_slots(server, memory=memory) as session:
        server.script(Delay(go))
        eventually(lambda: threads() <= before + 1, "nobody waits yet")
        future = session.submit({INPUT: frame(1)})
        eventually(lambda: server.in_model == 1, "it is in flight")
        assert future.cancel()
        go.set()
        eventually(lambda: session.stats().free == 2, "both slots are free")
        eventually(
            lambda: "idle" in repr(session._ensure_open().receiver),
            "the thread of the session has ended",
        )


def test_a_closed_session_is_not_told_to_be_closed(server: ScriptedServer) -> None:
    """Also if the collector finds it before the result that held its last slot."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = two_slots(server).open()
        with session.lease() as lease:
            fill(lease, 1)
            result = lease.submit().result(10)
        session.close()
        circle: list[object] = [session, result]
        circle.append(circle)
        del session, lease, result, circle
        gc.collect()
    assert not [each for each in caught if "without close" in str(each.message)]
    assert files_of(server) == []
    assert server.regions == {}
