"""Slots that go from item to item of a stream: what ends with an item, and who waits.

Nothing of one item is good for the next, and nobody else has to do without a slot.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import Lease, LeaseExpired, PoolClosed, Result, board, upcoming
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import Array, all_free
from tests.unit.asked import asked
from tests.unit.flowing import (
    LIMIT,
    Gates,
    Pair,
    all_came,
    fill,
    flowing,
    item,
    let_time_pass,
    number_of,
    outcome,
    value_of,
    view_of,
)

SLOTS = 4


@pytest.fixture
def gates() -> Gates:
    return Gates()


USES: list[Callable[[Lease], object]] = [
    lambda lease: lease["X"],
    lambda lease: lease.view("X", (2,)),
    lambda lease: lease.write("X", [1.0] * 8),
    lambda lease: lease.infer(),
    lambda lease: lease.submit(),
    lambda lease: lease.detach(),
]


def test_the_lease_of_an_item_ends_before_the_next_is_written(single: Pair) -> None:
    _, session = single
    leases: list[Lease] = []

    def write(lease: Lease, number: float) -> None:
        for earlier in leases:
            for use in USES:
                with pytest.raises(LeaseExpired):
                    use(earlier)
            # Its end is no end of the lease that has the slot now.
            earlier.release()
        leases.append(lease)
        fill(lease, number)

    stream = session.stream(range(5), write=write, read=number_of)
    assert list(stream) == list(range(5))
    assert len(set(leases)) == 5


def test_the_result_of_an_item_ends_before_the_next_is_written(single: Pair) -> None:
    _, session = single
    results: list[Result] = []

    def write(lease: Lease, number: float) -> None:
        assert [repr(each) for each in results] == ["<Result expired>"] * len(results)
        fill(lease, number)

    def read(number: float, result: Result) -> float:
        results.append(result)
        return number_of(number, result)

    assert list(session.stream(range(5), write=write, read=read)) == list(range(5))
    assert len(results) == 5


def test_what_write_infers_itself_ends_when_its_item_is_sent(single: Pair) -> None:
    _, session = single
    results: list[Result] = []

    def write(lease: Lease, number: float) -> None:
        fill(lease, number + 0.5)
        results.append(lease.infer())
        assert value_of(results[-1]) == number + 0.5
        fill(lease, number)

    def read(number: float, result: Result) -> float:
        assert repr(results[-1]) == "<Result expired>"
        return number_of(number, result)

    assert list(session.stream(range(5), write=write, read=read)) == list(range(5))


def test_who_waits_for_a_slot_gets_it_before_the_next_item(single: Pair) -> None:
    _, session = single
    served: list[int] = []
    begun = itertools.count()
    count = 0

    def take() -> None:
        with session.lease(timeout=LIMIT):
            served.append(count)

    waiting = threading.Thread(target=take)

    def write(lease: Lease, number: float) -> None:
        nonlocal count
        count = next(begun)
        if number == 3:
            waiting.start()
            eventually(lambda: session.stats().waits == 1, "somebody waits")
        fill(lease, number)

    stream = session.stream(range(30), write=write, read=number_of)
    assert list(stream) == list(range(30))
    waiting.join()
    assert served == [3]


def test_a_closed_session_begins_no_other_item(single: Pair) -> None:
    server, session = single

    def items() -> Iterator[int]:
        yield from range(5)
        session.close(wait=False)
        yield from itertools.count(5)

    with flowing(slots=1) as pair:
        server, session = pair
        values, error = outcome(session.stream(items(), write=fill, read=number_of))
        assert isinstance(error, PoolClosed)
        assert values == list(range(5))
        assert len(asked(server)) == 5
        assert server.regions == {}


def test_slots_are_kept_busy_behind_results_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However slowly results are asked for, as long as there is room for more."""
    # A busy machine makes no slow source of this one.
    monkeypatch.setattr(upcoming, "_SLOW", 60.0)
    with flowing(slots=SLOTS) as (server, session):
        stream = session.stream(itertools.count(), write=fill, read=number_of)
        for number, value in enumerate(itertools.islice(stream, 20)):
            assert value == number
            # All that may be begun before this one is handed out.
            begun = number + 2 * SLOTS if number >= SLOTS else 0
            eventually(lambda: len(asked(server)) >= begun)  # noqa: B023 - at once
            assert len(asked(server)) <= number + 2 * SLOTS
            eventually(lambda: all_came(session), "all replies have come")
        stream.close()
        all_free(session)


def test_the_next_item_has_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reply before it was found only when its time was up."""
    monkeypatch.setattr(board, "_MOST_AT_ONCE", 1)
    with flowing(slots=SLOTS) as (_, session):
        stream = session.stream(range(40), write=fill, read=number_of, timeout=LIMIT)
        assert next(stream) == 0
        eventually(lambda: all_came(session), "all replies have come")
        let_time_pass(monkeypatch)
        assert list(stream) == list(range(1, 40))


# --- while the next item is looked for ------------------------------------------------


def test_a_source_may_take_the_slot_itself(single: Pair) -> None:
    _, session = single

    def items() -> Iterator[float]:
        for number in range(9):
            yield value_of(session.infer(item(number), timeout=LIMIT))

    stream = session.stream(items(), write=fill, read=number_of)
    assert list(stream) == list(range(9))


@pytest.mark.parametrize("slots", [1, SLOTS])
def test_a_source_may_wait_for_who_needs_a_slot(slots: int) -> None:
    """As the second stage of a pipeline does for the first."""
    with flowing(slots=slots) as (_, session), ThreadPoolExecutor(1) as pool:

        def items() -> Iterator[float]:
            yield from range(2 * SLOTS)
            found = pool.submit(session.infer, item(2 * SLOTS), timeout=LIMIT)
            yield value_of(found.result(LIMIT))

        stream = session.stream(items(), write=fill, read=number_of)
        assert list(stream) == list(range(2 * SLOTS + 1))
        all_free(session)


def test_what_the_source_raises_holds_no_view_of_the_item_before() -> None:

    class Source:
        """Not a generator, whose frame would not know of the stream's."""

        def __init__(self) -> None:
            self.count = 0

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.count += 1
            if self.count == 3:
                raise ValueError("no more")
            return self.count

    views: list[Array] = []
    with flowing(slots=1) as (_, session):
        stream = session.stream(Source(), write=fill, read=view_of)
        with pytest.raises(ValueError, match="no more") as raised:
            views.extend(stream)
        assert len(views) == 2
        views.clear()
        assert session.stats().pinned == 0
        assert raised.value is not None


def test_an_item_may_be_sent_once_more_and_given_up(gates: Gates) -> None:
    """By its `read`: the slot is late then, and the next item takes another turn."""
    leases: list[Lease] = []

    def write(lease: Lease, number: float) -> None:
        leases.append(lease)
        fill(lease, number)

    def read(number: float, result: Result) -> float:
        value = number_of(number, result)
        if number == 2:
            fill(leases[2], 2.5)
            given_up(lambda limit: leases[2].infer(timeout=limit))
            gate.set()
        return value

    with flowing(slots=1, gates=gates) as (_, session):
        gate = gates.shut(2.5)
        stream = session.stream(range(6), write=write, read=read)
        assert list(stream) == list(range(6))
        assert session.stats().late == 0
        all_free(session)
