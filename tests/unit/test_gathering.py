"""Streams that wait for several replies together: when, and what that never costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmlane import gathering
from shmlane.gathering import Gathering
from tests.sessions import all_free
from tests.unit.flowing import (
    Gates,
    Pair,
    fill,
    flowing,
    number_of,
    unharmed,
)

SLOTS = 8
# Seconds, as on a machine that has been up for a day.
NOW, AT_ONCE, LATER = 86_400.0, 1e-5, 1e-2


# --- the choice -----------------------------------------------------------------------


def test_replies_that_come_quickly_are_waited_for_together() -> None:
    choice = Gathering(16)
    assert choice.count == 1
    choice.note(1, NOW, NOW + AT_ONCE)
    assert choice.count == 5
    assert repr(choice) == "<Gathering 5 of at most 5>"
    choice.note(1, NOW, NOW + LATER)
    assert choice.count == 1
    # As many together in that time are quick as well.
    choice.note(1000, NOW, NOW + LATER)
    assert choice.count == 5


def test_one_pause_counts_for_little_after_a_while() -> None:
    choice = Gathering(16)
    choice.note(3, NOW, NOW + AT_ONCE)
    now = NOW + 0.1
    choice.note(0, NOW + AT_ONCE, now)
    assert choice.count == 1
    counts = []
    for _ in range(1000):
        choice.note(1, now, now + AT_ONCE)
        now += AT_ONCE
        counts.append(choice.count)
    assert 5 in counts


@pytest.mark.parametrize(
    ("in_flight", "count"), [(1, 1), (4, 1), (15, 1), (16, 5), (64, 21), (65, 21)]
)
def test_few_of_those_in_flight_are_waited_for(in_flight: int, count: int) -> None:
    choice = Gathering(in_flight)
    choice.note(1, NOW, NOW + AT_ONCE)
    assert choice.count == count


def share(choice: Gathering, *, together: float, alone: float, since: float) -> float:
    """The part of ten seconds in which several are waited for.

    together, alone: seconds for each reply, where several are and where each is.
    """
    now, spent = since, 0.0
    while now < since + 10:
        several = choice.count > 1
        lasts = choice.count * (together if several else alone)
        choice.note(choice.count, now, now + lasts)
        spent += lasts if several else 0.0
        now += lasts
    return spent / 10


@pytest.mark.parametrize("together", [1e-5, 2e-5, 2.2e-5])
def test_where_it_takes_no_longer_several_are_waited_for(together: float) -> None:
    choice = Gathering(16)
    assert share(choice, together=together, alone=2e-5, since=NOW) > 0.85


@pytest.mark.parametrize("together", [2.5e-5, 4e-5, 9e-5])
def test_where_it_takes_longer_it_is_only_tried(together: float) -> None:
    choice = Gathering(16)
    share(choice, together=together, alone=2e-5, since=NOW)
    assert share(choice, together=together, alone=2e-5, since=NOW + 10) < 0.05
    # And again, once it does not.
    share(choice, together=2e-5, alone=2e-5, since=NOW + 20)
    assert share(choice, together=2e-5, alone=2e-5, since=NOW + 30) > 0.85


def test_slow_replies_are_never_waited_for_together() -> None:
    assert share(Gathering(16), together=2e-4, alone=2e-4, since=NOW) == 0


def test_a_wait_in_vain_ends_the_turn() -> None:
    choice = Gathering(16)
    choice.note(1, NOW, NOW + AT_ONCE)
    assert choice.count == 5
    choice.note_failure(NOW + 2 * AT_ONCE)
    choice.note(1, NOW + 2 * AT_ONCE, NOW + 3 * AT_ONCE)
    assert choice.count == 1


# --- streams --------------------------------------------------------------------------


@pytest.fixture
def gathers_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow replies are, and in whatever order they come."""
    monkeypatch.setattr(gathering, "_LEAST_IN_FLIGHT", SLOTS)
    monkeypatch.setattr(gathering, "_QUICK", 1e9)
    monkeypatch.setattr(gathering, "_TURNS_TOGETHER", (1e9, 0.0))
    monkeypatch.setattr(gathering, "_TURNS_ALONE", (1e9, 0.0))


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture(params=["system", "wire"])
def pair(
    request: pytest.FixtureRequest, gates: Gates, gathers_always: None
) -> Iterator[Pair]:
    with flowing(slots=SLOTS, memory=request.param, gates=gates) as pair:
        with unharmed(pair):
            yield pair
        all_free(pair[1])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_item_has_its_own_result(pair: Pair, ordered: bool, workers: int) -> None:
    _, session = pair
    values = session.stream(
        range(200), write=fill, read=number_of, ordered=ordered, workers=workers
    )
    assert sorted(values) == list(range(200))


@pytest.mark.parametrize("stuck", range(1, SLOTS))
def test_what_does_not_come_keeps_no_other(
    pair: Pair, gates: Gates, stuck: int
) -> None:
    _, session = pair
    opens = [gates.shut(float(number)) for number in range(stuck)]
    stream = session.stream(range(60), write=fill, read=number_of, ordered=False)
    # While the oldest are stuck.
    others = [next(stream) for _ in range(40)]
    assert min(others) == stuck
    for gate in opens:
        gate.set()
    assert sorted([*others, *stream]) == list(range(60))
