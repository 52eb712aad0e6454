"""Slots that go from item to item of a stream: what ends with an item, and who waits.

Nothing of one item is good for the next, and nobody else has to do without a slot.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shmlane import Lease, LeaseExpired, PoolClosed, Result, board
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.asked import asked
from tests.unit.flowing import (
    LIMIT,
    Pair,
    all_came,
    fill,
    flowing,
    number_of,
    outcome,
    unharmed,
    value_of,
)

SLOTS = 4


@pytest.fixture(params=["system", "wire"])
def single(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """All items are on the same slot."""
    with flowing(slots=1, memory=request.param) as pair, unharmed(pair):
        yield pair
        all_free(pair[1])


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


def test_a_connection_that_ends_while_an_item_is_written_costs_nothing(
    single: Pair,
) -> None:
    server, session = single

    def write(lease: Lease, number: float) -> None:
        fill(lease, number)
        if number == 3:
            server.restart()

    stream = session.stream(range(6), write=write, read=number_of)
    assert list(stream) == list(range(6))


def test_slots_are_kept_busy_behind_results_that_wait() -> None:
    """However slowly results are asked for, as long as there is room for more."""
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
        stream = session.stream(range(40), write=fill, read=number_of, timeout=0.3)
        assert next(stream) == 0
        eventually(lambda: all_came(session), "all replies have come")
        until = time.monotonic() + 0.4
        eventually(lambda: time.monotonic() > until)
        assert list(stream) == list(range(1, 40))
