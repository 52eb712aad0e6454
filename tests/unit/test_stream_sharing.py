"""Streams beside other callers of the same session: everybody gets slots."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, Self

import pytest

from shmlane import Lease, streams
from shmlane.fairness import Fairness, Sharer
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.flowing import (
    LIMIT,
    Gates,
    Pair,
    engine_of,
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


class Flows:
    """Two streams in threads of their own, whose items pass when they are told to."""

    def __init__(self, *numbers: range, slots: int) -> None:
        self.numbers = numbers
        self.slots = slots
        self._gates = Gates()
        self._written: list[list[int]] = [[] for _ in numbers]

    def __enter__(self) -> Self:
        for number in itertools.chain(*self.numbers):
            self._gates.shut(number)
        with contextlib.ExitStack() as opened:
            self._pool = opened.enter_context(ThreadPoolExecutor(len(self.numbers)))
            flow = flowing(slots=self.slots, gates=self._gates)
            _, self.session = opened.enter_context(flow)
            # Whatever fails: the threads end.
            opened.callback(self._gates.open_all)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def begin(
        self, which: int, *, until: int | None = None, in_flight: int | None = None
    ) -> Future[list[float]]:
        def write(lease: Lease, number: int) -> None:
            fill(lease, number)
            self._written[which].append(number)

        def run() -> list[float]:
            items = self.numbers[which]
            with self.session.stream(
                items, write=write, read=number_of, in_flight=in_flight
            ) as stream:
                return list(itertools.islice(stream, until))

        return self._pool.submit(run)

    def begin_both(
        self, *, until: int | None = None, in_flight: int | None = None
    ) -> list[Future[list[float]]]:
        """The second has the first slot that the first one lets go of.

        until: so many results the first one takes. in_flight: of the second.
        """
        running = [self.begin(0, until=until)]
        self.have_written(self.slots, 0)
        running.append(self.begin(1, in_flight=in_flight))
        eventually(lambda: self.session.stats().waits == 1, "the second waits in turn")
        self.let_pass(0)
        self.have_written(self.slots, 1)
        return running

    def have_written(self, *counts: int) -> None:
        eventually(
            lambda: [len(each) for each in self._written] == list(counts),
            lambda: f"{counts} items are written, not {self._written}",
        )

    def let_pass(self, *numbers: int) -> None:
        for number in numbers:
            self._gates[number].set()

    def end(self, running: list[Future[list[float]]]) -> None:
        self._gates.open_all()
        found = [each.result(LIMIT) for each in running]
        assert found == [list(each) for each in self.numbers]
        all_free(self.session)


def test_a_stream_that_begins_later_gets_its_part_and_leaves_it_in_the_end() -> None:
    with Flows(range(40), range(1000, 1010), slots=SLOTS) as flows:
        first, second = flows.begin_both()
        # Three and one are in flight. The next slot goes on, and no more than that.
        flows.let_pass(1)
        flows.have_written(4, 2)
        flows.let_pass(2, 3)
        flows.have_written(6, 2)
        # Whoever has its part keeps it.
        flows.let_pass(1000)
        flows.have_written(6, 3)
        flows.let_pass(*flows.numbers[1])
        assert second.result(LIMIT) == list(flows.numbers[1])
        flows.let_pass(4)
        flows.have_written(9, 10)
        flows.end([first, second])


def test_a_stream_that_has_all_it_asked_for_leaves_others_more_than_it_has() -> None:
    with Flows(range(40), range(1000, 1010), slots=6) as flows:
        running = flows.begin_both(in_flight=2)
        flows.let_pass(1)
        flows.have_written(6, 2)
        for number in range(2, 6):
            flows.let_pass(number)
            flows.have_written(5 + number, 2)
        flows.end(running)


def test_a_stream_gets_what_another_leaves_that_has_nothing_more_to_send() -> None:
    """Before any of its own replies comes."""
    with Flows(range(3), range(1000, 1003), slots=3) as flows:
        running = flows.begin_both()
        flows.let_pass(1)
        flows.have_written(3, 2)
        flows.let_pass(2)
        flows.have_written(3, 3)
        flows.end(running)


def test_a_stream_gets_what_another_left_when_its_late_replies_have_come() -> None:
    with Flows(range(3), range(1000, 1003), slots=3) as flows:
        first, second = flows.begin_both(until=1)
        assert first.result(LIMIT) == [0]
        eventually(lambda: flows.session.stats().late == 2, "the others are late")
        flows.let_pass(1)
        flows.have_written(3, 2)
        flows.let_pass(2)
        flows.have_written(3, 3)
        flows.let_pass(*flows.numbers[1])
        assert second.result(LIMIT) == list(flows.numbers[1])
        all_free(flows.session)


def test_a_stream_gets_what_the_workers_of_another_have_when_that_is_left() -> None:
    written = threading.Event()

    def write(lease: Lease, number: int) -> None:
        fill(lease, number)
        if number == 1:
            assert written.wait(LIMIT)

    with Flows(range(1000, 1003), slots=2) as flows:
        left = flows.session.stream(range(2), write=write, read=number_of, workers=2)
        assert next(left) == 0
        running = [flows.begin(0)]
        flows.have_written(1)
        lacking = engine_of(flows.session).fairness.lacking
        eventually(lambda: lacking, "it waits for more")
        written.set()
        left.close()
        flows.have_written(2)
        flows.end(running)


def test_a_stream_that_has_ended_has_no_part() -> None:
    """Not even one whose error is kept, and which had work in hand when it ended."""

    def refuse(_lease: Lease, number: int) -> None:
        raise ValueError(f"refused: {number}")

    kept: list[BaseException] = []
    with Flows(range(9), range(1000, 1009), slots=SLOTS) as flows:
        for _ in range(2):
            stream = flows.session.stream(range(9), write=refuse, workers=1)
            with pytest.raises(ValueError, match="refused") as raised:
                list(stream)
            kept.append(raised.value)
        running = flows.begin_both()
        flows.let_pass(1)
        flows.have_written(4, 2)
        flows.end(running)


def test_a_stream_gets_what_comes_free_just_before_it_waits_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = Fairness.ask

    def ask_late(self: Fairness, stream: Sharer) -> None:
        lease.release()
        ask(self, stream)

    monkeypatch.setattr(Fairness, "ask", ask_late)
    with Flows(range(2), slots=2) as flows, flows.session.lease() as lease:
        running = [flows.begin(0)]
        flows.have_written(2)
        flows.end(running)


def test_a_stream_that_is_just_being_made_counts_for_others(shared: Pair) -> None:
    """In other threads, at any moment."""
    _, session = shared
    fairness, parts = engine_of(session).fairness, []

    def count(frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename == streams.__file__:
            parts.append(fairness.part)
        return count

    sys.settrace(count)
    try:
        stream = session.stream(range(9), write=fill, read=number_of)
    finally:
        sys.settrace(None)
    assert parts
    assert set(parts) == {SLOTS}
    assert list(stream) == list(range(9))


def test_a_stream_with_nothing_on_its_way_waits_in_turn_for_what_others_have(
    shared: Pair,
) -> None:
    _, session = shared
    leases = [session.lease() for _ in range(SLOTS)]
    assert engine_of(session).fairness.part == 1
    for lease in leases:
        lease.release()


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
