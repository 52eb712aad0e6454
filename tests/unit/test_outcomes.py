"""Results in the order in which they are to leave, and how many may wait to."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from shmlane.outcomes import Outcomes


def outcomes(in_flight: int = 2, **told: Any) -> Outcomes[str]:
    options: dict[str, Any] = {
        "ordered": True,
        "return_exceptions": False,
        "progress": None,
        "total": None,
    }
    return Outcomes(in_flight, **options | told)


def begun(count: int, **told: Any) -> Outcomes[str]:
    made = outcomes(count, **told)
    assert [made.begin() for _ in range(count)] == list(range(count))
    return made


def taken(made: Outcomes[str]) -> list[str]:
    found = []
    while made.ready:
        outcome = made.take()
        assert isinstance(outcome, str)
        found.append(outcome)
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_in_whatever_order_results_come_they_leave_in_that_of_the_items(
    order: tuple[int, ...],
) -> None:
    made = begun(4)
    left: list[str] = []
    for place, number in enumerate(order):
        made.finish(number, str(number))
        left += taken(made)
        # All that can leave by now has left.
        came = set(order[: place + 1])
        assert len(left) == next(n for n in range(5) if n not in came)
    assert left == ["0", "1", "2", "3"]


def test_without_an_order_results_leave_as_they_come() -> None:
    made = begun(6, ordered=False)
    order = random.sample(range(6), 6)
    for number in order:
        made.finish(number, str(number))
    assert taken(made) == [str(number) for number in order]


@pytest.mark.parametrize("ordered", [True, False])
def test_as_many_may_wait_as_are_in_flight_beside_those(ordered: bool) -> None:
    made = outcomes(3, ordered=ordered)
    numbers = []
    while made.room:
        numbers.append(made.begin())
    assert numbers == [0, 1, 2, 3, 4, 5]
    # To have come is not enough: it must have left.
    for number in (1, 2, 3, 4, 5):
        made.finish(number, str(number))
    assert made.room == 0
    assert bool(made.ready) != ordered
    made.finish(0, "0")
    for count in range(6):
        made.take()
        assert int(made.room) == 1
        assert made.begin() == 6 + count
        assert made.room == 0


def test_an_error_is_raised_when_its_turn_comes() -> None:
    made = begun(3)
    error = ValueError("no")
    made.fail(1, error)
    made.finish(2, "c")
    assert not made.ready
    assert made.failed == 1
    made.finish(0, "a")
    assert made.take() == "a"
    with pytest.raises(ValueError, match="no") as caught:
        made.take()
    assert caught.value is error
    assert caught.value.__notes__ == ["This is what became of item 1 of the stream."]
    assert made.take() == "c"
    assert (made.taken, made.failed) == (3, 1)


def test_an_error_leaves_like_a_result_if_that_was_asked_for() -> None:
    made = begun(2, return_exceptions=True)
    error = ValueError("no")
    made.fail(0, error)
    made.finish(1, "b")
    assert made.take() is error
    assert made.take() == "b"


def test_an_error_that_is_a_result_is_no_failure() -> None:
    made = begun(1)
    result: Any = ValueError("found")
    made.finish(0, result)
    assert made.take() is result
    assert made.failed == 0


def test_progress_is_told_of_each_result() -> None:
    told: list[tuple[int, int | None]] = []
    made = begun(3, progress=lambda *seen: told.append(seen), total=7)
    made.fail(1, ValueError())
    for number in (2, 0):
        made.finish(number, "")
    assert told == []
    made.take()
    assert told == [(1, 7)]
    with pytest.raises(ValueError):  # noqa: PT011 - the one above
        made.take()
    made.take()
    assert told == [(1, 7), (2, 7), (3, 7)]


def test_how_many_there_will_be_is_known_where_items_have_a_length() -> None:
    assert outcomes(total=7).length == 7
    assert outcomes(total=0).length == 0
    with pytest.raises(TypeError, match="no length"):
        _ = outcomes().length


def test_it_tells_how_far_it_is() -> None:
    made = begun(2, total=5)
    assert repr(made) == "0 of 5 done"
    made.finish(0, "a")
    made.fail(1, ValueError())
    made.take()
    assert repr(made) == "1 of 5 done, 1 failed"
    assert repr(outcomes()) == "0 done"
