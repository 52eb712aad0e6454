"""Streams: every item's own result, in order, and never more begun than is needed."""

from __future__ import annotations

import io
import itertools
import operator
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import rich.console
import rich.progress

from shmlane import LeaseTimeout, RequestOptions, Session, Timeouts, UsageError
from shmlane.upcoming import _SLOW
from tests.polling import eventually
from tests.sessions import Array, all_free
from tests.unit.asked import asked, session_on, words
from tests.unit.flowing import (
    LIMIT,
    Gates,
    Pair,
    all_came,
    fill,
    flowing,
    is_idle,
    item,
    number_of,
    open_descriptors,
    value_of,
    view_of,
)

SLOTS = 4


@pytest.fixture(params=["system", "wire"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with flowing(slots=SLOTS, memory=request.param) as pair:
        yield pair
        all_free(pair[1])
        is_idle(pair[1])


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
def shared(gates: Gates) -> Iterator[Pair]:
    with flowing(slots=SLOTS, gates=gates) as pair:
        yield pair
        all_free(pair[1])


class Source:
    """Numbers without an end, and how many of them were fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.fetched += 1
            yield self.fetched - 1


# --- results --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("ordered", [True, False])
def test_each_item_has_its_own_result(pair: Pair, ordered: bool, workers: int) -> None:
    _, session = pair
    stream = session.stream(map(item, range(50)), ordered=ordered, workers=workers)
    values = [value_of(outputs) for outputs in stream]
    assert (values if ordered else sorted(values)) == list(range(50))
    assert session.stats().connections <= SLOTS


def test_any_number_of_items_at_any_width(shared: Pair) -> None:
    server, session = shared
    sent = 0
    for count in (0, 1, SLOTS, 4 * SLOTS + 1):
        for width in (1, 2, SLOTS):
            items = range(count)
            stream = session.stream(items, write=fill, read=number_of, in_flight=width)
            assert list(stream) == list(items)
            assert list(stream) == []
            sent += count
            assert len(asked(server)) == sent


def test_a_slow_item_holds_up_others_only_where_order_matters(
    shared: Pair, gates: Gates
) -> None:
    _, session = shared
    for ordered in (True, False):
        go = gates.shut(0)
        stream = session.stream(
            range(SLOTS), write=fill, read=number_of, ordered=ordered
        )
        if ordered:
            threading.Timer(0.03, go.set).start()
            assert list(stream) == list(range(SLOTS))
        else:
            assert sorted(itertools.islice(stream, SLOTS - 1)) == [1, 2, 3]
            go.set()
            assert list(stream) == [0]


def test_results_are_copies_unless_read_says_otherwise(shared: Pair) -> None:
    _, session = shared
    kept = list(session.stream(map(item, range(6 * SLOTS))))
    assert session.stats().spare_slots == 0
    assert [value_of(each) for each in kept] == list(range(6 * SLOTS))


@pytest.mark.parametrize(("count", "slots"), [(SLOTS - 1, SLOTS), (6, 2 * SLOTS)])
def test_views_that_read_hands_out_keep_their_slots(
    shared: Pair, count: int, slots: int
) -> None:
    _, session = shared

    def keep_the_last() -> None:
        kept: list[Array] = []
        for view in session.stream(range(30), write=fill, read=view_of):
            kept = [*kept[1 - count :], view]
            newest = kept[-1][0]
            for age, each in enumerate(reversed(kept)):
                assert (each == newest - 2 * age).all()
        assert newest == 58

    keep_the_last()
    assert session.stats().slots == slots


def test_slots_that_are_all_kept_are_told_of() -> None:
    limits = Timeouts(connect=2.0, infer=LIMIT, lease=0.05)
    with flowing(slots=2, timeouts=limits) as (_, session):
        kept: list[Array] = []
        stream = session.stream(range(9), write=fill, read=view_of)
        with pytest.raises(LeaseTimeout, match="4 pinned"):
            kept.extend(stream)
        # Not one result is lost that there was room for.
        assert [float(each[0]) for each in kept] == [0, 2, 4, 6]
        kept.clear()
        all_free(session)


def test_a_result_expires_with_its_read(shared: Pair) -> None:
    _, session = shared
    kept = list(session.stream(range(3), write=fill, read=lambda _, result: result))
    assert [repr(each) for each in kept] == ["<Result expired>"] * 3


def test_items_of_bytes() -> None:
    with session_on(words(), slots=2, rerun=True) as (_, session):
        given = [[b"a"] * n + [b"long " * n] for n in range(1, 9)]
        stream = session.stream({"W": each} for each in given)
        assert [each["W_OUT"].tolist() for each in stream] == given
        all_free(session)


def test_items_that_grow() -> None:
    with flowing(slots=2, shapes=None, outputs=None) as (_, session):
        sizes = [1, 5000, 3, 9000, 2]
        stream = session.stream(
            {"X": np.full(size, size, np.float32)} for size in sizes
        )
        for size, outputs in zip(sizes, stream, strict=True):
            assert outputs["Y"].tolist() == [2 * size] * size


# --- laziness -------------------------------------------------------------------------


def test_nothing_happens_before_the_first_result_is_asked_for(shared: Pair) -> None:
    server, session = shared
    source = Source()
    before = open_descriptors()
    stream = session.stream(source, write=fill, workers=2)
    assert (source.fetched, asked(server)) == (0, [])
    # There may be fewer: what earlier tests had may end only now.
    assert open_descriptors() <= before
    stream.close()
    assert list(stream) == []
    assert (source.fetched, asked(server)) == (0, [])
    # Also one that is only dropped.
    session.stream(source, write=fill)
    assert open_descriptors() <= before


def test_no_more_items_are_fetched_than_may_wait(shared: Pair) -> None:
    _, session = shared
    for width, workers, ordered in itertools.product(
        (1, 3, SLOTS), (0, 2), (True, False)
    ):
        source = Source()
        stream = session.stream(
            source,
            write=fill,
            read=number_of,
            in_flight=width,
            workers=workers,
            ordered=ordered,
        )
        for count, _ in enumerate(itertools.islice(stream, 40), 1):
            assert count <= source.fetched <= count + 2 * width
        stream.close()


def test_the_bound_is_reached_behind_a_slow_item_and_kept(
    shared: Pair, gates: Gates
) -> None:
    _, session = shared
    source = Source()
    go = gates.shut(1)
    stream = session.stream(source, write=fill, read=number_of, in_flight=3)
    assert next(stream) == 0
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(next, stream)
        eventually(lambda: source.fetched == 1 + 2 * 3)
        eventually(lambda: session.stats().in_flight == 1)
        assert source.fetched == 1 + 2 * 3
        go.set()
        assert second.result(LIMIT) == 1
    stream.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_slow_source_keeps_no_result_that_is_there(
    shared: Pair, ordered: bool
) -> None:
    _, session = shared
    handed: list[float] = []
    seen: list[int] = []

    def slow() -> Iterator[int]:
        for number in range(12):
            # As the next frame of a camera does.
            time.sleep(2 * _SLOW)
            eventually(lambda: all_came(session))
            seen.append(len(handed))
            yield number

    stream = session.stream(slow(), write=fill, read=number_of, ordered=ordered)
    for result in stream:
        handed.append(result)  # noqa: PERF402 - the source looks at it meanwhile
    assert sorted(handed) == list(range(12))
    # When item n is fetched, those before n - 1 have been handed out.
    assert all(count >= number - 1 for number, count in enumerate(seen))


def test_a_slow_consumer_finds_the_next_results_ready(shared: Pair) -> None:
    server, session = shared
    stream = session.stream(range(12), write=fill, read=number_of)
    for result in stream:
        eventually(lambda: all_came(session))
        assert result == stream.done - 1
    assert len(asked(server)) == 12


# --- what a stream tells --------------------------------------------------------------


def test_a_stream_knows_how_many_results_there_will_be(shared: Pair) -> None:
    _, session = shared
    stream = session.stream([item(n) for n in range(5)])
    assert (len(stream), operator.length_hint(stream), bool(stream)) == (5, 5, True)
    assert repr(stream) == "<Stream 0 of 5 done>"
    next(stream)
    assert (len(stream), stream.done, repr(stream)) == (5, 1, "<Stream 1 of 5 done>")
    assert len(list(stream)) == 4
    assert (len(stream), stream.done, stream.failed) == (5, 5, 0)
    assert len(session.stream([])) == 0
    assert bool(session.stream([]))


def test_without_a_length_there_is_none_to_tell(shared: Pair) -> None:
    _, session = shared
    stream = session.stream(map(item, range(3)))
    with pytest.raises(TypeError, match="no length"):
        len(stream)
    assert operator.length_hint(stream, 7) == 7
    assert repr(stream) == "<Stream 0 done>"
    assert len(list(stream)) == 3


def test_a_stream_of_a_stream(shared: Pair) -> None:
    """What says by an error that it has no length is like what has none."""
    _, session = shared
    first = session.stream(range(9), write=fill, read=number_of, in_flight=2)
    second = session.stream(first, write=fill, read=number_of, in_flight=2)
    assert len(second) == 9
    assert list(second) == list(range(9))
    endless = session.stream(Source(), write=fill, read=number_of, in_flight=2)
    third = session.stream(endless, write=fill, read=number_of, in_flight=2)
    assert list(itertools.islice(third, 5)) == list(range(5))
    third.close()
    endless.close()


def test_progress_is_told_of_every_result(shared: Pair) -> None:
    _, session = shared
    told: list[tuple[int, int | None]] = []
    stream = session.stream(
        [item(1)] * 4, progress=lambda done, total: told.append((done, total))
    )
    for count, _ in enumerate(stream, 1):
        assert told[-1] == (count, 4)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    told.clear()
    list(session.stream(iter([item(1)]), progress=lambda *seen: told.append(seen)))
    assert told == [(1, None)]


@pytest.mark.parametrize("has_length", [True, False])
def test_progress_bars_take_it_as_it_is(shared: Pair, has_length: bool) -> None:
    _, session = shared
    items = [item(n) for n in range(6)]
    stream = session.stream(items if has_length else iter(items))
    console = rich.console.Console(file=io.StringIO(), force_terminal=True)
    with rich.progress.Progress(console=console) as bars:
        values = [value_of(each) for each in bars.track(stream)]
        assert bars.tasks[0].total == (6 if has_length else None)
        assert bars.tasks[0].completed == 6
    assert values == list(range(6))


# --- what cannot be -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"in_flight": SLOTS + 1}, rf"in_flight={SLOTS + 1}: .* has {SLOTS} slots"),
        ({"in_flight": 0}, "in_flight=0: give a whole number, 1 or more"),
        ({"in_flight": 1.5}, "in_flight=1.5"),
        ({"workers": -1}, "workers=-1: give a whole number, 0 or more"),
        ({"workers": "all"}, "workers='all'"),
        ({"options": RequestOptions(sequence_id=3)}, "cannot be a stream"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(
    arguments: dict[str, Any], words: str
) -> None:
    session = Session("127.0.0.1:1", "absent", slots=SLOTS)
    with pytest.raises(UsageError, match=words):
        session.stream([], **arguments)


def test_an_item_that_nobody_can_write_says_so(shared: Pair) -> None:
    _, session = shared
    with pytest.raises(UsageError, match=r"is a int, not \{name: array\}"):
        list(session.stream([1, 2, 3]))


def test_a_stream_opens_its_session() -> None:
    with flowing() as (server, _):
        with Session(server.url, "doubling", slots=2) as session:
            session.close()
        fresh = Session(server.url, "doubling", slots=2, shapes={"X": (8,)})
        assert [value_of(each) for each in fresh.stream([item(3)])] == [3]
        fresh.close()
