"""Lent slots and time: homes that wait, borrowers that fork, references handed on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmlane import (
    AsyncSession,
    HandoffExpired,
    Lease,
    RequestLost,
    Session,
    SlotRef,
    Timeouts,
    UsageError,
)
from shmlane.claims import SlotLocks
from shmlane.inventory import clean_up
from shmlane.records import State
from shmlane.slots import Slot
from shmlane.testing import Close, ScriptedServer, identity_model
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import all_free, frame
from tests.unit.one_slot import INPUT, OUTPUT, fill, serving

SHAPE = (1, 1, 1, 8)
_LIMIT = 0.1
_WINDOW = 0.3


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


def opened(server: ScriptedServer, *, limit: float = 30.0) -> Session:
    return Session(
        server.url,
        "identity",
        slots=1,
        shapes={INPUT: SHAPE},
        outputs={OUTPUT: SHAPE},
        timeouts=Timeouts(handoff=limit),
    ).open()


def filled(home: Session, value: float) -> SlotRef:
    with home.lease() as lease:
        fill(lease, value)
        return lease.detach()


def adopted(home: Session, other: Session, *, after: float = 0.0) -> Lease:
    """A lease of `other` on a slot that lay there for so long.

    Again where the time for it was over: this thread may not have run meanwhile.
    """
    while True:
        ref = filled(home, 1)
        time.sleep(after)
        with contextlib.suppress(HandoffExpired):
            return other.adopt(ref)


def test_a_slot_that_stays_adopted_costs_its_home_no_time(
    server: ScriptedServer,
) -> None:
    """Also when the time in which it had to be adopted is over."""
    with opened(server, limit=_LIMIT) as home, opened(server) as other:
        with adopted(home, other) as lease:
            time.sleep(2 * _LIMIT)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            time.sleep(_WINDOW)
            waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
            assert waits < 100 * _WINDOW
            assert lease.infer()[OUTPUT].tolist() == frame(1).tolist()
        eventually(lambda: home.stats().free == 1, "it is back")


def test_a_slot_that_views_of_a_closed_session_have_costs_its_home_no_time(
    server: ScriptedServer,
) -> None:
    with opened(server, limit=_LIMIT) as home, opened(server) as other:
        # Its thread looks once, and again when the time is over: not in between.
        with adopted(home, other, after=_LIMIT / 4) as lease:
            view = lease.infer()[OUTPUT]
        other.close()
        time.sleep(2 * _LIMIT)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        time.sleep(_WINDOW)
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        assert waits < 100 * _WINDOW
        assert view.tolist() == frame(1).tolist()
        del view
        eventually(lambda: home.stats().free == 1, "it is back")


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_late_slot_is_given_up_by_a_session_that_does_not_wait_for_it(
    server: ScriptedServer, closes_first: bool
) -> None:
    with opened(server) as home, opened(server) as other:
        lease = other.adopt(filled(home, 1))
        with server.hold():
            given_up(lambda limit: lease.infer(timeout=limit), limit=0.01)
            if closes_first:
                other.close(wait=False)
                lease.release()
            else:
                lease.release()
                other.close(wait=False)
        # The closed session is not dropped meanwhile.
        all_free(home)
        assert other.stats().adopted == 0


def test_views_that_die_in_a_forked_child_return_nothing(
    server: ScriptedServer,
) -> None:
    with opened(server) as home, opened(server) as other:
        with other.adopt(filled(home, 1)) as lease:
            view = lease.infer()[OUTPUT]
        child = os.fork()
        if not child:
            del view
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert home._ensure_open().pool.slots[0].notes.state == State.ADOPTED
        np.testing.assert_array_equal(view, frame(1))
        del view
        eventually(lambda: home.stats().free == 1, "it is back")


def test_the_text_of_a_reference_is_as_good_as_the_reference(
    server: ScriptedServer,
) -> None:
    async def adopt(text: Any) -> list[float]:
        async with AsyncSession(server.url, "identity", slots=1) as session:
            with await session.adopt(text) as lease:
                return list((await lease.infer())[OUTPUT].ravel())

    with opened(server) as home, opened(server) as other:
        for adopter in (other, home):
            text: Any = str(filled(home, 1))
            with adopter.adopt(text) as lease:
                assert lease.infer()[OUTPUT].tolist() == frame(1).tolist()
        text = str(filled(home, 2))
        assert asyncio.run(adopt(text)) == list(frame(2).ravel())
        with pytest.raises(HandoffExpired):
            other.adopt(text)
        wrong: list[Any] = ["shmlane.gone", None, b"", 5]
        for each in wrong:
            with pytest.raises(UsageError, match=f"{each!r} is no reference to a slot"):
                other.adopt(each)


def is_retired(session: Session, count: int) -> bool:
    return session.stats().retired == count


def kept() -> int:
    """Slots in this process, and the locks of borrowed ones."""
    gc.collect()
    return sum(type(each) in (Slot, SlotLocks) for each in gc.get_objects())


def test_slots_that_were_given_up_are_not_kept_one_after_another() -> None:
    server = ScriptedServer([identity_model()], version="2.49.0")
    with server, opened(server) as home:
        # The one that it adopts comes to its own, with locks.
        most = kept() + 2
        for number in range(1, 4):
            home.adopt(filled(home, number)).release()
            server.script(Close())
            with pytest.raises(RequestLost):
                home.infer({INPUT: frame(number)})
            eventually(functools.partial(is_retired, home, number))
            home.adopt(filled(home, number)).release()
            # Threads that have just let go of one may hold it for a moment.
            eventually(lambda: kept() <= most, lambda: f"{kept()} of {most} are kept")
    # Memory that an old server may still write to stays until that has ended.
    clean_up(only=server.url)


class _Taken:
    """A lock that somebody else takes whenever it is let go of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def locked(self) -> bool:
        return True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_slot_that_was_handed_on_can_be_adopted_at_once(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other threads of the process that handed it on do meanwhile."""
    with opened(server) as home, opened(server) as first, opened(server) as second:
        lease = first.adopt(filled(home, 1))
        with monkeypatch.context() as patch:
            patch.setattr(first._ensure_open().borrower, "_lock", _Taken())
            ref = lease.detach()
        with second.adopt(ref) as lease:
            assert lease.infer()[OUTPUT].tolist() == frame(1).tolist()
        eventually(lambda: home.stats().free == 1, "it is back")
