"""Pinned slots: spare ones made for them, once, and what they cost."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import pytest

from shmlane.errors import LeaseTimeout, OutOfSharedMemory
from shmlane.waiters import Waiter
from tests.unit.pools import (
    WITH_AND_WITHOUT_GIL,
    Caller,
    Pool,
    assert_whole,
    find_views_by,
    input_of,
    pinned,
)


@pytest.fixture(params=WITH_AND_WITHOUT_GIL, autouse=True)
def views_are_found_by(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    return find_views_by(request.param, monkeypatch)


def test_spare_slots_are_added_once_when_views_hold_all() -> None:
    pool = Pool(2)
    views = pinned(pool, 2)
    spare = [pool.get(0), pool.get(0)]
    assert {slot.index for slot in spare} == {0, 1}
    assert pool.spare.calls == 1
    assert (pool.spare_slots, len(pool.slots), pool.waits) == (2, 4, 0)
    with pytest.raises(LeaseTimeout, match="slots: 2 free, 2 pinned"):
        pool.get(0)
    assert pool.spare.calls == 1
    views.clear()
    assert_whole(pool, spare)


def test_one_pinned_slot_is_reason_enough_for_spare_ones() -> None:
    pool = Pool(3)
    views = pinned(pool, 1)
    slots = [pool.get(0) for _ in range(5)]
    assert pool.spare.calls == 1
    views.clear()
    assert_whole(pool, slots)


def test_without_views_in_the_way_there_are_no_spare_slots() -> None:
    pool = Pool(2)
    slots = pool.all()
    with pytest.raises(LeaseTimeout):
        pool.get(0)
    assert pool.spare.calls == 0
    assert_whole(pool, slots)


def test_spare_slots_are_asked_for_again_when_there_was_no_room() -> None:
    pool = Pool(1)
    views = pinned(pool, 1)
    pool.spare.has_room = False
    for _ in range(2):
        with pytest.raises(LeaseTimeout) as caught:
            pool.get(0)
        assert isinstance(caught.value.__cause__, OutOfSharedMemory)
    pool.spare.has_room = True
    slot = pool.get(0)
    assert (pool.spare.calls, pool.spare_slots) == (3, 1)
    views.clear()
    assert_whole(pool, [slot])


def test_a_caller_that_waits_gets_a_spare_slot_for_one_that_comes_back_pinned() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    first, second = Caller(pool), Caller(pool)
    view = input_of(slot)
    pool.put_back(slot)
    spare = first.end()
    assert spare is not None
    assert spare is not slot
    assert second.is_alive()
    pool.put_back(spare)
    assert second.end() is spare
    del view
    assert_whole(pool, [spare])


def test_a_spare_slot_goes_to_who_waited_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    early = Caller(pool)
    views = [input_of(slot)]
    # The newcomer is the first to see the pinned slot.
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_settle", lambda: None)
        pool.put_back(slot)
    late = Caller(pool)
    spare = early.end()
    assert spare is not None
    assert late.is_alive()
    views.clear()
    assert late.end() is slot
    assert_whole(pool, [slot, spare])


def test_an_interrupted_caller_leaves_the_making_of_spare_slots_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    views = [input_of(slot)]
    wait = Waiter.wait
    callers: list[Caller] = []

    def asked_and_interrupted(waiter: Waiter, timeout: float | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            wait(waiter, timeout)
            return
        pool.put_back(slot)
        callers.append(Caller(pool))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Waiter, "wait", asked_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.get(None)
    spare = callers[0].end()
    assert spare is not None
    assert pool.spare.calls == 1
    views.clear()
    assert_whole(pool, [spare])


# --- cost -----------------------------------------------------------------------------


def calls_of(operation: Callable[[], object]) -> int:
    """How many functions are called, in Python or in C."""
    # What the collector would end does not belong to the operation.
    gc.collect()
    gc.disable()
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        operation()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def round_of(pool: Pool) -> None:
    pool.put_back(pool.get(0))


def dearest_round(pool: Pool) -> int:
    return max(calls_of(lambda: round_of(pool)) for _ in range(20))


@pytest.mark.parametrize("count", [0, 1, 990])
def test_the_cost_of_a_round_does_not_depend_on_the_number_of_slots(
    count: int, views_are_found_by: str
) -> None:
    small, large = Pool(10), Pool(1000)
    views = [pinned(small, min(count, 9)), pinned(large, count)]
    # A release without exact counts makes all arrays of the slot anew.
    limit = 40 if views_are_found_by == "exact counts" else 95
    assert dearest_round(large) <= dearest_round(small) <= limit
    views.clear()


def test_pinning_costs_each_slot_a_few_steps_however_many_there_are() -> None:
    def cost_per_slot(count: int) -> float:
        pool = Pool(count, has_spare=False)
        views: list[object] = []
        total = calls_of(lambda: views.extend(pinned(pool, count)))
        assert pool.get_at_once() is None
        # Whoever waits makes every pinned slot come back by itself.
        caller = Caller(pool)
        total += calls_of(views.clear)
        caller.end()
        return total / count

    assert cost_per_slot(1000) <= 1.1 * cost_per_slot(100) < 125
