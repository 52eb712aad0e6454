"""Streams beside other callers of the same session: everybody gets slots."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import Lease
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.flowing import (
    LIMIT,
    Gates,
    Pair,
    fill,
    flowing,
    item,
    number_of,
    value_of,
)

SLOTS = 4


@pytest.fixture(params=["system", "wire"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with flowing(slots=SLOTS, memory=request.param) as pair:
        yield pair
        all_free(pair[1])


@pytest.fixture
def shared() -> Iterator[Pair]:
    with flowing(slots=SLOTS) as pair:
        yield pair
        all_free(pair[1])


def test_two_streams_share_the_slots_of_a_session(pair: Pair) -> None:
    _, session = pair

    def run(first: int) -> list[float]:
        numbers = range(first, first + 60)
        return [value_of(each) for each in session.stream(map(item, numbers))]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, (0, 1000)))
    assert found == [list(range(60)), list(range(1000, 1060))]


def test_a_stream_that_begins_later_gets_its_part_and_leaves_it_in_the_end() -> None:
    gates = Gates()
    numbers = {"first": range(40), "second": range(1000, 1010)}
    for number in itertools.chain(*numbers.values()):
        gates.shut(number)
    written: dict[str, list[int]] = {name: [] for name in numbers}
    with (
        flowing(slots=SLOTS, gates=gates) as (_, session),
        ThreadPoolExecutor(2) as pool,
    ):

        def flow(name: str) -> list[float]:
            def write(lease: Lease, number: int) -> None:
                fill(lease, number)
                written[name].append(number)

            return list(session.stream(numbers[name], write=write, read=number_of))

        def has_written(first: int, second: int) -> None:
            eventually(
                lambda: [len(each) for each in written.values()] == [first, second],
                lambda: f"{first} and {second} items are written, not {written}",
            )

        def let_pass(*items: int) -> None:
            for number in items:
                gates[number].set()

        running = [pool.submit(flow, "first")]
        has_written(4, 0)
        running.append(pool.submit(flow, "second"))
        eventually(lambda: session.stats().waits == 1, "the second waits in turn")
        let_pass(0)
        has_written(4, 1)
        # Three and one are in flight. The next slot goes on, and no more than that.
        let_pass(1)
        has_written(4, 2)
        let_pass(2, 3)
        has_written(6, 2)
        # Whoever has its part keeps it.
        let_pass(1000)
        has_written(6, 3)
        let_pass(*numbers["second"])
        assert running[1].result(LIMIT) == list(numbers["second"])
        let_pass(4)
        has_written(9, 10)
        let_pass(*numbers["first"])
        assert running[0].result(LIMIT) == list(numbers["first"])
        all_free(session)


def test_others_get_slots_while_a_stream_uses_all(shared: Pair) -> None:
    _, session = shared
    stop = threading.Event()
    source = itertools.takewhile(lambda _: not stop.is_set(), itertools.count())

    def flow() -> int:
        return sum(1 for _ in session.stream(source, write=fill, read=number_of))

    with ThreadPoolExecutor(3) as pool:
        flowing_on = pool.submit(flow)
        eventually(lambda: session.stats().in_flight > 0)

        def ask(first: int) -> None:
            for number in range(first, first + 30):
                assert value_of(session.infer(item(number))) == number

        for asking in [pool.submit(ask, first) for first in (0, 500)]:
            asking.result(LIMIT)
        stop.set()
        assert flowing_on.result(LIMIT) > 0


def test_a_result_in_hand_waits_for_nobodys_slot() -> None:
    with flowing(slots=1) as (_, session):
        stream = session.stream(range(3), write=fill, read=number_of)
        with ThreadPoolExecutor(1) as pool:
            assert next(stream) == 0
            # The next one may be in flight: it is left to end.
            eventually(lambda: session.stats().free + session.stats().in_flight == 1)
            assert next(stream) == 1
            taking = pool.submit(session.lease)
            last = next(stream)
            assert last == 2
            lease = taking.result(LIMIT)
            lease.release()
        assert list(stream) == []


def test_a_stream_lives_on_the_slots_that_others_leave(shared: Pair) -> None:
    _, session = shared
    leases = [session.lease() for _ in range(SLOTS - 1)]
    assert list(session.stream(range(20), write=fill, read=number_of)) == list(
        range(20)
    )
    assert session.stats().waits == 0
    for lease in leases:
        lease.release()


def test_the_items_of_one_stream_may_come_from_another_of_the_session(
    shared: Pair,
) -> None:
    _, session = shared
    first = session.stream(range(30), write=fill, read=number_of, in_flight=2)
    second = session.stream(first, write=fill, read=number_of, in_flight=2)
    assert list(second) == list(range(30))


def test_streams_of_one_thread_may_take_turns(shared: Pair) -> None:
    """As long as they leave each other slots."""
    _, session = shared
    streams = [
        session.stream(range(20), write=fill, read=number_of, in_flight=2)
        for _ in range(2)
    ]
    assert list(zip(*streams, strict=True)) == [(n, n) for n in range(20)]


def test_the_body_of_a_loop_may_use_a_slot_that_the_stream_leaves(
    shared: Pair,
) -> None:
    _, session = shared
    for number in session.stream(
        range(20), write=fill, read=number_of, in_flight=SLOTS - 1
    ):
        assert value_of(session.infer(item(100 + number))) == 100 + number
        assert value_of(session.submit(item(number)).result(LIMIT)) == number
