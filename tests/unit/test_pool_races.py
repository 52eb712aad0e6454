"""The pool when something comes in between, at any of its instructions or lines."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from shmlane.metadata import Array
from shmlane.slots import Slot
from shmlane.waiters import Waiter
from tests.unit.interleaving import CtrlC, Halt, Intrusion, every
from tests.unit.pools import (
    WITH_AND_WITHOUT_GIL,
    Caller,
    Pool,
    assert_whole,
    at_once,
    find_views_by,
    held,
    input_of,
)
from tests.unit.scripted import view_of


@pytest.fixture(params=WITH_AND_WITHOUT_GIL, autouse=True)
def views_are_found_by(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    return find_views_by(request.param, monkeypatch)


def test_nobody_overtakes_a_caller_that_waits() -> None:
    def released_by_halves(line: int) -> Halt[None]:
        pool = Pool(1)
        (slot,) = pool.all()
        caller = Caller(pool)
        with Halt(lambda: pool.put_back(slot), line) as release:
            assert pool.get_at_once() is None
        assert caller.end() is slot
        return release

    for _ in every(released_by_halves):
        pass


def test_a_release_at_any_moment_of_a_call_is_not_overlooked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[Waiter] = []
    wait = Waiter.wait

    def note(waiter: Waiter, timeout: float | None) -> None:
        wait(waiter, timeout)
        waited.append(waiter)

    monkeypatch.setattr(Waiter, "wait", note)

    def released_at(instruction: int) -> Intrusion[Slot | None]:
        pool = Pool(1)
        (slot,) = pool.all()
        waited.clear()
        came_in_time = []

        def release() -> None:
            # As a finaliser does: in the same thread, which may hold the lock.
            came_in_time.append(not waited)
            pool.put_back(slot)

        call = Intrusion(lambda: at_once(pool), release, instruction)
        if call.was_reached:
            assert call.result is slot or not all(came_in_time)
            assert_whole(pool, held(call.result))
        return call

    assert None in {call.result for call in every(released_at)}


def test_a_release_at_any_line_of_another_is_not_overlooked() -> None:
    def released_at(line: int) -> Halt[None]:
        pool = Pool(2)
        first, second = pool.all()
        callers = [Caller(pool), Caller(pool)]
        with Halt(lambda: pool.put_back(first), line) as release:
            pool.put_back(second)
        assert {caller.end() for caller in callers} == {first, second}
        return release

    for _ in every(released_at):
        pass


def test_a_view_that_dies_at_any_moment_of_a_call_frees_its_slot() -> None:
    def died_at(instruction: int) -> Intrusion[Slot | None]:
        pool = Pool(1, has_spare=False)
        (slot,) = pool.all()
        views = [input_of(slot), view_of(slot.outputs["Y"])]
        pool.put_back(slot)
        call = Intrusion(lambda: at_once(pool), views.clear, instruction)
        views.clear()
        assert_whole(pool, held(call.result))
        return call

    assert len({type(call.result) for call in every(died_at)}) == 2


def test_a_view_that_dies_at_any_moment_of_a_release_frees_its_slot() -> None:
    def died_at(instruction: int) -> Intrusion[None]:
        pool = Pool(1)
        (slot,) = pool.all()
        caller = Caller(pool)
        views = [input_of(slot), view_of(slot.outputs["Y"])]
        release = Intrusion(lambda: pool.put_back(slot), views.clear, instruction)
        views.clear()
        assert caller.end() is not None
        assert_whole(pool, held(caller.slot))
        return release

    for _ in every(died_at):
        pass


def test_a_slot_taken_at_any_moment_of_a_call_is_not_given_twice() -> None:
    def taken_at(instruction: int) -> Intrusion[Slot | None]:
        pool = Pool(1)
        taken: list[Slot | None] = []
        call = Intrusion(
            lambda: at_once(pool), lambda: taken.append(pool.get_at_once()), instruction
        )
        assert_whole(pool, held(call.result, *taken))
        return call

    assert len({type(call.result) for call in every(taken_at)}) == 2


def test_a_slot_taken_while_another_is_given_is_neither_lost_nor_given_twice() -> None:
    def meet(line_of_take: int, line_of_release: int) -> tuple[bool, bool]:
        pool = Pool(1)
        (slot,) = pool.all()
        # Begins before anybody waits, and goes on in the middle of the release.
        with Halt(pool.get_at_once, line_of_take) as take:
            caller = Caller(pool)
            with Halt(lambda: pool.put_back(slot), line_of_release) as release:
                taken = take.end()
        if taken is not None:
            pool.put_back(taken)
        assert caller.end() is slot
        assert_whole(pool, [slot])
        return take.was_reached, release.was_reached

    for line_of_take in itertools.count():
        for line_of_release in itertools.count():
            more_of_take, more_of_release = meet(line_of_take, line_of_release)
            if not more_of_release:
                break
        if not more_of_take:
            break


def test_a_caller_that_comes_during_a_look_at_views_gets_the_slot() -> None:
    def comes_at(line: int) -> Halt[Slot | None]:
        pool = Pool(1, has_spare=False)
        (slot,) = pool.all()
        views = [input_of(slot)]
        pool.put_back(slot)
        with Halt(pool.get_at_once, line) as look:
            caller = Caller(pool)
        views.clear()
        assert caller.end() is slot
        return look

    for _ in every(comes_at):
        pass


# Elsewhere a release ends arrays, and Python drops what is raised at their end.
@pytest.mark.parametrize("views_are_found_by", ["exact counts"], indirect=True)
def test_ctrl_c_at_any_moment_of_a_release_leaves_a_pool_that_works() -> None:
    def pressed_at(moment: int) -> CtrlC:
        pool = Pool(2)
        first, second = pool.all()
        caller = Caller(pool)
        press = CtrlC(lambda: pool.put_back(first), moment)
        pool.put_back(second)
        had = held(caller.end())
        assert had in ([first], [second])
        # Interrupted early, it was never taken back.
        if first not in (*had, *pool._free):
            had.append(first)
        assert_whole(pool, had)
        return press

    assert len(list(every(pressed_at))) > 10


# --- everything at once ---------------------------------------------------------------


class Shelf:
    """Keeps a few views with what was written to them, and looks at them again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._views: list[tuple[Array, float]] = []
        self._lock = threading.Lock()

    def put(self, view: Array, value: float) -> None:
        with self._lock:
            self._views.append((view, value))
            gone = []
            while len(self._views) > self.size:
                gone.append(self._views.pop(random.randrange(len(self._views))))
        for kept, expected in gone:
            assert kept.tolist() == [[expected] * 4], "a slot was used under a view"

    def clear(self) -> None:
        self.size = 0
        while self._views:
            self.put(*self._views.pop())


def test_no_slot_is_had_by_two_or_lost_when_many_threads_hammer() -> None:
    pool = Pool(8)
    shelf = Shelf(6)
    owners: dict[Slot, int] = {}
    failures: list[BaseException] = []

    def hammer(number: int) -> None:
        try:
            for round_ in range(60):
                slot = pool.get(60)
                assert owners.setdefault(slot, number) == number
                value = float(100 * number + round_)
                view = input_of(slot)
                view[...] = value
                if (number + round_) % 3 == 0:
                    shelf.put(view[...], value)
                assert view.tolist() == [[value] * 4]
                del view, owners[slot]
                pool.put_back(slot)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=hammer, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    shelf.clear()
    assert_whole(pool)
