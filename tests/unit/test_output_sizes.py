"""What is expected of outputs of open size, against all that was seen of them."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.sizes import MAX_KEYS, Key, OutputSizes

ONE: Key = ((1, 3), None)
OTHER: Key = ((2, 3), None)
GIVEN: Key = ((1, 3), (2,))
RERUN = pytest.mark.parametrize("rerun", [False, True])

Event = tuple[str, Key, int]
events = st.lists(
    st.tuples(
        st.sampled_from(["boxes", "scores"]),
        st.sampled_from([ONE, OTHER, GIVEN, ()]),
        st.sampled_from([0, 1, 4, 4096, 1 << 40]),
    ),
    max_size=40,
)


Past = dict[Key, list[int]]


def right_answers(past: Past) -> dict[tuple[Key, bool], int | None]:
    """The rule, told by all sizes that ever came of one output, by key."""
    varies = any(len(set(history)) > 1 for history in past.values())
    return {
        (key, rerun): None if varies and not rerun else max(history) or None
        for key, history in past.items()
        for rerun in (False, True)
    }


# --- one key --------------------------------------------------------------------------


@RERUN
def test_nothing_is_expected_of_what_was_never_seen(rerun: bool) -> None:
    sizes = OutputSizes()
    assert sizes.expected("boxes", ONE, rerun=rerun) is None
    assert sizes.largest("boxes") == 0
    assert repr(sizes) == "<OutputSizes nothing yet>"


@RERUN
def test_a_size_seen_once_is_expected_of_inputs_of_the_same_shapes(
    rerun: bool,
) -> None:
    sizes = OutputSizes()
    assert sizes.learn("boxes", ONE, 48)
    assert sizes.expected("boxes", ONE, rerun=rerun) == 48
    for output, key in [("boxes", OTHER), ("boxes", GIVEN), ("scores", ONE)]:
        assert sizes.expected(output, key, rerun=rerun) is None


def test_the_same_size_again_is_no_news() -> None:
    sizes = OutputSizes()
    sizes.learn("boxes", ONE, 48)
    assert not sizes.learn("boxes", ONE, 48)
    assert sizes.expected("boxes", ONE) == 48


@pytest.mark.parametrize("second", [0, 8, 96])
def test_two_sizes_of_one_key_are_never_expected_again(second: int) -> None:
    sizes = OutputSizes()
    sizes.learn("boxes", ONE, 48)
    assert sizes.learn("boxes", ONE, second)
    for nbytes in (48, 48, second, second):
        assert sizes.expected("boxes", ONE) is None
        assert not sizes.learn("boxes", ONE, nbytes)
    assert sizes.expected("boxes", ONE, rerun=True) == max(48, second)


@RERUN
def test_an_empty_output_is_left_to_the_wire(rerun: bool) -> None:
    sizes = OutputSizes()
    assert not sizes.learn("boxes", ONE, 0)
    assert sizes.expected("boxes", ONE, rerun=rerun) is None


def test_an_output_that_was_empty_once_depends_on_the_data() -> None:
    sizes = OutputSizes()
    sizes.learn("boxes", ONE, 0)
    # News only to those who may run the model again.
    assert sizes.learn("boxes", ONE, 48)
    assert sizes.expected("boxes", ONE) is None
    assert sizes.expected("boxes", ONE, rerun=True) == 48


# --- any history ----------------------------------------------------------------------


@given(events)
def test_expectations_follow_from_all_that_was_seen(history: list[Event]) -> None:
    sizes = OutputSizes()
    seen: dict[str, Past] = {}
    for output, key, nbytes in history:
        past = seen.setdefault(output, {})
        before = right_answers(past)
        past.setdefault(key, []).append(nbytes)
        after = right_answers(past)
        news = any(before.get(asked) != answer for asked, answer in after.items())
        assert sizes.learn(output, key, nbytes) == news
    for output, past in seen.items():
        for (key, rerun), answer in right_answers(past).items():
            expected = sizes.expected(output, key, rerun=rerun)
            assert expected == answer
            # No block is made that would have been too small before.
            assert expected is None or expected >= max(past[key])
    for output in ("boxes", "scores"):
        all_sizes = [nbytes for name, _, nbytes in history if name == output]
        assert sizes.largest(output) == max(all_sizes, default=0)


@given(events, st.randoms())
def test_the_order_of_what_is_seen_makes_no_difference(
    history: list[Event], random: Random
) -> None:
    shuffled = random.sample(history, len(history))
    one, other = OutputSizes(), OutputSizes()
    for mine, order in ((one, history), (other, shuffled)):
        for event in order:
            mine.learn(*event)
    for output, key, _ in history:
        for rerun in (False, True):
            assert one.expected(output, key, rerun=rerun) == other.expected(
                output, key, rerun=rerun
            )


# --- limits and threads ---------------------------------------------------------------


def test_only_so_many_keys_of_an_output_are_kept_and_the_oldest_go_first() -> None:
    sizes = OutputSizes()
    keys: list[Key] = [((number,),) for number in range(MAX_KEYS + 3)]
    sizes.learn("scores", keys[0], 7)
    for number, key in enumerate(keys):
        sizes.learn("boxes", key, len(keys) - number)
    for key in keys[:3]:
        assert sizes.expected("boxes", key) is None
    for number, key in enumerate(keys[3:], 3):
        assert sizes.expected("boxes", key) == len(keys) - number
    assert sizes.expected("scores", keys[0]) == 7
    # Blocks of that size may exist: it is remembered beyond its key.
    assert sizes.largest("boxes") == len(keys)
    assert f"boxes up to {len(keys)} bytes, {MAX_KEYS} keys, 0 vary" in repr(sizes)


def test_a_forgotten_key_is_learned_like_a_new_one() -> None:
    sizes = OutputSizes()
    sizes.learn("boxes", ONE, 8)
    for number in range(MAX_KEYS):
        sizes.learn("boxes", ((number,),), 8)
    assert sizes.learn("boxes", ONE, 24)
    assert sizes.expected("boxes", ONE) == 24


def test_an_output_that_varied_for_one_key_is_not_expected_with_any() -> None:
    sizes = OutputSizes()
    sizes.learn("boxes", OTHER, 8)
    sizes.learn("boxes", ONE, 8)
    assert sizes.learn("boxes", ONE, 16)
    assert sizes.expected("boxes", OTHER) is None
    assert sizes.expected("boxes", OTHER, rerun=True) == 8
    for number in range(MAX_KEYS):
        sizes.learn("boxes", ((number,),), 8)
    assert sizes.expected("boxes", ((1,),)) is None


def test_threads_that_learn_at_once_lose_nothing(
    request: pytest.FixtureRequest,
) -> None:
    # As often as Python can: what is not done under the lock then comes apart.
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    threads, keys = 8, MAX_KEYS
    sizes = OutputSizes()
    start = threading.Barrier(threads)

    def learn(thread: int) -> int:
        start.wait(timeout=30)
        news = 0
        for number in range(keys):
            news += sizes.learn("fixed", ((number,),), 64)
            sizes.learn("moody", ((number,),), 64 + thread)
        return news

    with ThreadPoolExecutor(threads) as pool:
        news = list(pool.map(learn, range(threads)))
    # Each expectation changed once, and one thread alone was told.
    assert sum(news) == keys
    for number in range(keys):
        assert sizes.expected("fixed", ((number,),)) == 64
        assert sizes.expected("moody", ((number,),)) is None
        assert sizes.expected("moody", ((number,),), rerun=True) == 64 + threads - 1
    assert sizes.largest("moody") == 64 + threads - 1
    assert f"moody up to 71 bytes, {keys} keys, {keys} vary" in repr(sizes)
