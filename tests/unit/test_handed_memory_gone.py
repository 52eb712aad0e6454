"""A slot whose tensors lie in memory that was removed with a dead process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import HandoffExpired, InferFailed, Session, SlotRef, Timeouts
from shmlane.inventory import clean_up
from shmlane.testing import ScriptedServer
from tests.others import Other, other
from tests.sessions import all_free, frame, regions_open
from tests.unit.one_slot import INPUT, OUTPUT, echo, fill, one_slot, serving

LARGER = (1, 1, 1, 1000)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server
        clean_up(only=server.url)


def start_home(process: Other, server: ScriptedServer) -> None:
    process.ask(
        f"session = Session({server.url!r}, 'identity', slots=2,"
        f" shapes={{{INPUT!r}: (1, 1, 1, 8)}}).open()"
    )


def filled(process: Other, size: int) -> SlotRef:
    process.ask("lease = session.lease()")
    process.ask(f"lease.write({INPUT!r}, np.zeros((1, 1, 1, {size}), np.float32))")
    return SlotRef.parse(process.ask("str(lease.detach())"))


def test_a_dead_home_took_along_what_a_tensor_had_moved_to(
    server: ScriptedServer,
) -> None:
    with other() as home, one_slot(server.url) as consumer:
        start_home(home, server)
        first, moved = filled(home, 8), filled(home, LARGER[-1])
        # The region of the slots stays as long as the consumer uses one of them.
        lease = consumer.adopt(first)
        home.kill()
        clean_up(only=server.url)
        with pytest.raises(HandoffExpired, match="the process that had it has ended"):
            consumer.adopt(moved)
        assert consumer.stats().adopted == 1
        fill(lease, 3)
        assert lease.infer()["OUTPUT__0"].tolist() == frame(3).tolist()
        lease.release()
        all_free(consumer)


def test_a_dead_borrower_took_along_what_it_had_made_and_handed_on(
    server: ScriptedServer,
) -> None:
    quickly = Timeouts(handoff=0.2)
    with Session(server.url, "identity", slots=1, timeouts=quickly) as home:
        with other() as borrower:
            borrower.ask(f"session = Session({server.url!r}, 'identity').open()")

            def detach() -> SlotRef:
                with home.lease() as lease:
                    return lease.detach()

            borrower.adopt(detach)
            borrower.ask(f"lease.write({INPUT!r}, np.zeros({LARGER}, np.float32))")
            handed_on = SlotRef.parse(borrower.ask("str(lease.detach())"))
            borrower.kill()
        clean_up(only=server.url)
        with pytest.raises(HandoffExpired):
            home.adopt(handed_on)
        all_free(home)
        echo(home, 5)


def test_a_slot_that_cannot_be_adopted_goes_home_and_keeps_nothing_open(
    server: ScriptedServer,
) -> None:
    values = np.full(LARGER, 3, np.float32)
    with one_slot(server.url) as home, one_slot(server.url) as consumer:
        with home.lease() as lease:
            consumer.adopt(lease.detach()).release()
        with contextlib.suppress(InferFailed):
            # From now on there is room for it, in memory of its own.
            home.infer({INPUT: values})
        home.infer({INPUT: values})
        lease = home.lease()
        lease.write(INPUT, values)
        (slot,) = home._ensure_open().pool.slots
        output = slot.outputs[OUTPUT].registration.region
        ref = lease.detach()
        os.unlink(output.path)
        before = regions_open()
        with pytest.raises(HandoffExpired, match=f"{output.name} was removed"):
            consumer.adopt(ref)
        assert regions_open() == before
        assert (home.infer({INPUT: values})[OUTPUT] == 3).all()
