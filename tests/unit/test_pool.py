"""The pool: in turn, in time, never twice, never lost."""

from __future__ import annotations

import signal
import threading

import pytest

from shmlane.errors import LeaseTimeout, PoolClosed
from shmlane.waiters import Waiter
from tests.polling import eventually
from tests.unit.pools import (
    WITH_AND_WITHOUT_GIL,
    Caller,
    Pool,
    assert_whole,
    find_views_by,
    input_of,
    labels,
    pinned,
)
from tests.unit.scripted import ScriptedChannel


@pytest.fixture(params=WITH_AND_WITHOUT_GIL, autouse=True)
def views_are_found_by(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    return find_views_by(request.param, monkeypatch)


# --- taking and giving back -----------------------------------------------------------


def test_the_first_slot_goes_first() -> None:
    assert [slot.index for slot in Pool(3).all()] == [0, 1, 2]


def test_the_last_slot_released_is_the_first_handed_out() -> None:
    pool = Pool(3)
    first, second, third = pool.all()
    for slot in (second, third, first):
        pool.put_back(slot)
    assert pool.all() == [first, third, second]


def test_taking_never_waits() -> None:
    pool = Pool(1)
    slot = pool.get_at_once()
    assert slot is not None
    assert pool.get_at_once() is None
    pool.put_back(slot)
    assert pool.get_at_once() is slot
    assert pool.waits == 0


def test_a_slot_with_views_is_not_handed_out_until_they_die() -> None:
    pool = Pool(2)
    slot = pool.get(0)
    view = input_of(slot)
    pool.put_back(slot)
    other = pool.get(0)
    assert other is not slot
    assert pool.get_at_once() is None
    del view
    assert pool.get(0) is slot
    assert pool.spare.calls == 0


# --- waiting --------------------------------------------------------------------------


def test_callers_are_served_in_the_order_they_came() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    callers = [Caller(pool) for _ in range(4)]
    for number, caller in enumerate(callers):
        pool.put_back(slot)
        assert caller.end() is slot
        assert all(later.is_alive() for later in callers[number + 1 :])
    assert pool.waits == 4


def test_a_caller_without_time_gives_up_at_once() -> None:
    pool = Pool(1)
    pool.all()
    with pytest.raises(LeaseTimeout):
        pool.get(0)


def test_the_error_of_a_timeout_counts_the_slots() -> None:
    pool = Pool(3)
    first, second, _ = pool.all()
    first.leased = second.leased = True
    second.server_hold = True
    with pytest.raises(LeaseTimeout) as caught:
        pool.get(0.001)
    counts = {"free": 1, "leased": 1, "lost": 1}
    assert str(caught.value) == (
        "no slot became free within 0.001 s; slots: 1 free, 1 leased, 1 lost."
        " Connections broke with requests in flight; these slots come back when the"
        " server answers again. Is it running?"
    )
    assert caught.value.context == {"slots": 3, "counts": counts}
    assert caught.value.retryable


def test_the_error_of_a_timeout_blames_the_load_if_nothing_else() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    slot.leased = True
    with pytest.raises(LeaseTimeout) as caught:
        pool.get(0)
    assert caught.value.hint == "Release leases sooner, raise slots= or the timeout."


def test_the_error_of_a_timeout_tells_of_a_slow_server() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    slot.channel = ScriptedChannel()
    slot.server_hold = True
    with pytest.raises(LeaseTimeout, match=r"slots: 1 late\. Late slots wait for"):
        pool.get(0)


def test_the_error_of_a_timeout_tells_how_to_unpin() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    kept = [input_of(slot)]
    pool.put_back(slot)
    slot = pool.get(0)
    slot.leased = True
    with pytest.raises(LeaseTimeout) as caught:
        pool.get(0)
    assert "slots: 1 leased, 1 pinned" in str(caught.value)
    assert ".copy()" in caught.value.hint
    del kept


def test_a_caller_that_gave_up_swallows_no_slot() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    for _ in range(3):
        with pytest.raises(LeaseTimeout):
            pool.get(0)
    pool.put_back(slot)
    assert_whole(pool)


def test_callers_that_gave_up_leave_nothing_behind() -> None:
    pool = Pool(1)
    pool.all()
    patient = Caller(pool)
    for _ in range(20):
        with pytest.raises(LeaseTimeout):
            pool.get(0)
    assert len(pool._waiters) == 1
    pool.close()
    patient.end()


def test_a_slot_given_at_the_last_moment_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    with monkeypatch.context() as patch:
        patch.setattr(Waiter, "wait", lambda *_: pool.put_back(slot))
        assert pool.get(0) is slot
    assert_whole(pool, [slot])


def test_a_slot_given_to_a_caller_that_is_interrupted_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(1)
    (slot,) = pool.all()

    def given_and_interrupted(*_: object) -> None:
        pool.put_back(slot)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Waiter, "wait", given_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.get(None)
    assert_whole(pool)


def test_ctrl_c_ends_a_wait_and_loses_no_slot() -> None:
    pool = Pool(1)
    (slot,) = pool.all()
    main = threading.main_thread().ident
    assert main is not None

    def press_when_waiting() -> None:
        eventually(lambda: pool.waits == 1)
        signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=press_when_waiting)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        pool.get(30)
    presser.join()
    assert pool.get_at_once() is None
    pool.put_back(slot)
    assert_whole(pool)


def test_a_slot_that_is_given_up_has_another_in_its_place() -> None:
    pool = Pool(2)
    lost, other = pool.all()
    lost.server_hold = True
    caller = Caller(pool)
    (new,) = pool.spare.shared.make_slots(1)
    pool.replace(lost, new)
    assert caller.end() is new
    assert labels(pool) == {"free": 2}
    assert_whole(pool, [other, new])


# --- the end --------------------------------------------------------------------------


def test_closing_ends_every_wait() -> None:
    pool = Pool(1)
    pool.all()
    callers = [Caller(pool, None) for _ in range(3)]
    pool.close()
    for caller in callers:
        assert caller.end() is None
        assert isinstance(caller.error, PoolClosed)


def test_a_closed_pool_hands_out_nothing() -> None:
    pool = Pool(2)
    pool.get(0)
    pool.close()
    with pytest.raises(PoolClosed, match="the session is closed"):
        pool.get(0)
    pool.close()


def test_a_closed_pool_tells_all_slots_that_came_back() -> None:
    pool = Pool(4)
    out, pinned, watched, _ = pool.all()
    views = [input_of(slot) for slot in (out, pinned, watched)]
    pool.put_back(watched)
    pool.get(0)
    pool.put_back(pinned)
    pool.close()
    given_up = pool.take_all()
    assert {watched, pinned} <= set(given_up)
    assert out not in given_up
    assert pool.take_all() == given_up
    pool.put_back(out)
    assert pool.take_all() == (*given_up, out)
    views.clear()
    assert pool.take_all() == (*given_up, out)
    with pytest.raises(PoolClosed):
        pool.get(0)


def test_views_that_die_after_the_end_do_no_harm() -> None:
    pool = Pool(1)
    views = pinned(pool, 1)
    # Watched from here on.
    slot = pool.get(0)
    pool.close()
    for each in pool.slots:
        each.close()
    pool.spare.shared.close()
    views.clear()
    pool.put_back(slot)


# --- telling --------------------------------------------------------------------------


def test_a_pool_tells_its_state() -> None:
    pool = Pool(3)
    assert repr(pool) == "<SlotPool 3 slots: 3 free>"
    first, second, third = pool.all()
    first.leased = True
    second.server_hold = True
    kept = input_of(third)
    pool.put_back(third)
    assert repr(pool) == "<SlotPool 3 slots: 1 leased, 1 lost, 1 pinned>"
    assert labels(pool) == {"leased": 1, "lost": 1, "pinned": 1}
    del kept
