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
    assert choice.count == 4
    assert repr(choice) == "<Gathering 4 of at most 4>"
    choice.note(1, NOW, NOW + LATER)
    assert choice.count == 1
    # As many together in that time are quick as well.
    choice.note(1000, NOW, NOW + LATER)
    assert choice.count == 4


def test_one_pause_counts_for_little_after_a_while() -> None:
    choice = Gathering(16)
    for _ in range(3):
        choice.note(1, NOW, NOW + AT_ONCE)
    choice.note(0, NOW, NOW + 0.1)
    assert choice.count == 1
    for _ in range(100):
        choice.note(1, NOW, NOW + AT_ONCE)
    assert choice.count == 4
    # Replies that are now slow and now quick are what they are on average.
    counts = set()
    for _ in range(100):
        choice.note(1, NOW, NOW + 6 * AT_ONCE)
        choice.note(1, NOW, NOW + AT_ONCE)
        counts.add(choice.count)
    assert counts == {4}


@pytest.mark.parametrize(
    ("in_flight", "count"), [(1, 1), (4, 1), (15, 1), (16, 4), (64, 16), (65, 16)]
)
def test_few_of_those_in_flight_are_waited_for(in_flight: int, count: int) -> None:
    choice = Gathering(in_flight)
    choice.note(1, NOW, NOW + AT_ONCE)
    assert choice.count == count


def rest_of(choice: Gathering, now: float) -> float:
    """Seconds, to a hundredth, from a failure until it waits for several again."""
    choice.note_failure(now)
    for hundredths in range(1000):
        later = now + hundredths / 100 + AT_ONCE
        choice.note(1, later - AT_ONCE, later)
        if choice.count > 1:
            return hundredths / 100
    pytest.fail("it rests for ever")


def test_after_a_wait_in_vain_it_rests_and_longer_each_time() -> None:
    choice = Gathering(16)
    now, rests = NOW, []
    for _ in range(9):
        rests.append(rest_of(choice, now))
        now += rests[-1] + LATER
    assert rests == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert rest_of(choice, now + 2.0 + 1.1) == 0.05


# --- streams --------------------------------------------------------------------------


@pytest.fixture
def gathers_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow replies are, and in whatever order they come."""
    monkeypatch.setattr(gathering, "_LEAST_IN_FLIGHT", SLOTS)
    monkeypatch.setattr(gathering, "_QUICK", 1e9)
    monkeypatch.setattr(gathering, "_SHORT_REST", 0.0)


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
