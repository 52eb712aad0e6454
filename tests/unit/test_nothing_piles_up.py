"""What is done again and again leaves no more behind than what is done once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane import (
    AsyncSession,
    InferTimeout,
    RequestLost,
    Session,
    SlotRef,
    Timeouts,
    borrowing,
)
from shmlane.testing import Close, ScriptedServer
from tests.polling import eventually
from tests.sessions import all_free, frame, regions_open
from tests.unit.one_slot import INPUT, OUTPUT, files_of, one_slot, serving

SHAPE = (1, 1, 1, 8)
LARGER = np.full((1, 1, 1, 2000), 5, np.float32)
_ROUNDS = 15
_MOST_IDLE = 4


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.fixture
def few_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer regions of others stay open than a test opens to get there."""
    monkeypatch.setattr(borrowing, "MOST_IDLE", _MOST_IDLE)


def held(server: ScriptedServer) -> Counter[str]:
    """What there is in this process, by kind."""
    # It remembers every request, as it should.
    server._requests.clear()
    gc.collect()
    objects = gc.get_objects()
    counts = Counter(type(each).__qualname__ for each in objects)
    containers = [each for each in objects if type(each) in (list, set, dict, deque)]
    counts["items"] = sum(map(len, containers))
    counts["descriptors"] = len(os.listdir("/proc/self/fd"))
    counts["mappings"] = len(Path("/proc/self/maps").read_text().splitlines())
    return counts


def again_and_again(server: ScriptedServer, act: Callable[[], object]) -> None:
    """Fail if there is one more of anything, or several, for each time of `act`."""
    for _ in range(_ROUNDS):
        act()
    before = held(server)
    for _ in range(_ROUNDS):
        act()

    def piled_up() -> dict[str, int]:
        more = held(server) - before
        return {kind: count for kind, count in more.items() if count >= _ROUNDS}

    # Threads of what has ended may be about to end, too.
    eventually(
        lambda: not piled_up(),
        lambda: f"nothing piles up, but there is more of {piled_up()}",
    )


def opened(server: ScriptedServer, *, handoff: float = 30.0) -> Session:
    return Session(
        server.url,
        "identity",
        slots=1,
        shapes={INPUT: SHAPE},
        timeouts=Timeouts(handoff=handoff),
    ).open()


def lent(home: Session) -> SlotRef:
    """A slot whose tensor lies in a region of its own."""
    with home.lease() as lease:
        lease.write(INPUT, LARGER)
        return lease.detach()


# --- one session ----------------------------------------------------------------------


def test_sessions_that_were_closed_or_dropped(server: ScriptedServer) -> None:
    def use_two() -> None:
        with opened(server) as session:
            session.infer({INPUT: LARGER})
        with warnings.catch_warnings(action="ignore"):
            dropped = opened(server)
            dropped.infer({INPUT: frame(1)})
            del dropped

    again_and_again(server, use_two)


def test_leases_futures_and_streams_that_nobody_sees_to_their_end(
    server: ScriptedServer,
) -> None:
    items = [{INPUT: frame(value)} for value in range(5)]
    with Session(server.url, "identity", slots=3) as session:

        def leave() -> None:
            with warnings.catch_warnings(action="ignore"):
                lease = session.lease()
                lease.write(INPUT, frame(1))
                del lease
            session.submit(items[0])
            session.submit(items[1]).cancel()
            for workers in (0, 1):
                for _ in session.stream(items, workers=workers):
                    break
            all_free(session)

        again_and_again(server, leave)


def test_requests_that_were_late_or_lost(server: ScriptedServer) -> None:
    with one_slot(server.url) as session:

        def fail() -> None:
            with server.hold(), pytest.raises(InferTimeout):
                session.infer({INPUT: frame(1)}, timeout=0.001)
            all_free(session)
            server.script(Close())
            with pytest.raises(RequestLost):
                session.infer({INPUT: frame(1)})
            all_free(session)

        again_and_again(server, fail)


def test_asynchronous_sessions_of_one_loop(server: ScriptedServer) -> None:
    async def use() -> None:
        async with AsyncSession(server.url, "identity", slots=1) as session:
            task = await session.submit({INPUT: frame(1)})
            task.cancel()
            await asyncio.wait([task])
            await session.infer({INPUT: frame(1)})
            async with session.stream([{INPUT: frame(2)}] * 3) as results:
                async for _ in results:
                    break

    with asyncio.Runner() as runner:

        def use_one() -> None:
            runner.run(use())
            # A thread may be about to do so.
            eventually(lambda: not server.regions, "it is unregistered")

        again_and_again(server, use_one)


# --- between sessions -----------------------------------------------------------------


def test_a_slot_that_comes_back_to_its_home(server: ScriptedServer) -> None:
    with opened(server) as home, opened(server) as other:

        def lend() -> None:
            other.adopt(lent(home)).release()
            home.adopt(lent(home)).release()

        again_and_again(server, lend)


def test_a_slot_that_nobody_adopts_in_time(server: ScriptedServer) -> None:
    with opened(server, handoff=0) as home:

        def lend() -> None:
            lent(home)
            all_free(home)

        again_and_again(server, lend)


@pytest.mark.usefixtures("few_idle")
def test_slots_of_ever_other_homes(server: ScriptedServer) -> None:
    with opened(server) as consumer:

        def adopt() -> None:
            with opened(server) as home:
                consumer.adopt(lent(home)).release()

        again_and_again(server, adopt)


def test_claims_on_shared_slots(server: ScriptedServer) -> None:
    with opened(server) as main:
        handle = main.share(slots=2)

        def claim() -> None:
            with Session.attach(handle, slots=2) as session:
                session.infer({INPUT: frame(1)})

        again_and_again(server, claim)


# --- regions of others ----------------------------------------------------------------


def test_a_region_of_another_process_takes_two_descriptors(
    server: ScriptedServer,
) -> None:
    with opened(server) as home, opened(server) as consumer:
        ref = lent(home)
        before = regions_open()
        lease = consumer.adopt(ref)
        # That of the slots, and that of the tensor.
        assert list((regions_open() - before).values()) == [2, 2]
        lease.release()


@pytest.mark.usefixtures("few_idle")
def test_few_regions_stay_open_of_many_that_were_used_at_once(
    server: ScriptedServer,
) -> None:
    with opened(server) as consumer, contextlib.ExitStack() as homes:
        refs = [
            lent(homes.enter_context(opened(server))) for _ in range(2 * _MOST_IDLE)
        ]
        before = regions_open()
        leases = [consumer.adopt(ref) for ref in refs]
        for lease in leases:
            lease.release()
        # Beside those of the last one.
        assert len(regions_open() - before) == _MOST_IDLE + 2


@pytest.mark.usefixtures("few_idle")
def test_what_was_used_last_stays_open(server: ScriptedServer) -> None:
    with opened(server) as consumer, contextlib.ExitStack() as homes:
        kept, *others = [
            homes.enter_context(opened(server)) for _ in range(2 * _MOST_IDLE)
        ]
        consumer.adopt(lent(kept)).release()
        before = regions_open()
        for other in others:
            consumer.adopt(lent(other)).release()
            assert before <= regions_open()
            consumer.adopt(lent(kept)).release()


def test_a_closed_session_has_no_region_open(server: ScriptedServer) -> None:
    before = regions_open()
    with opened(server) as home, opened(server) as consumer:
        consumer.adopt(lent(home)).release()
    # The thread that looked after the loan may be about to end.
    eventually(lambda: regions_open() <= before, lambda: f"open: {regions_open()}")


def test_what_a_home_lends_again_outlives_the_home(server: ScriptedServer) -> None:
    """Also the region of a tensor that had come back to it before."""
    with opened(server) as first, opened(server) as second:
        home = opened(server)
        for _ in range(2):
            first.adopt(lent(home)).release()
            all_free(home)
        lease = first.adopt(lent(home))
        home.close()
        del home
        gc.collect()
        ref = lease.detach()
        with second.adopt(ref) as lease:
            output = lease.infer()[OUTPUT]
            assert (output == 5).all()
            del output
    assert files_of(server) == []
