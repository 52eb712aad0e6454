"""Whoever judges the chaos must see what is wrong: tokens, views, counts, growth."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmlane import InferTimeout, LeaseExpired, Session
from tests.chaos.examination import untold
from tests.chaos.faults import FAULTS
from tests.chaos.flows import Flow, Item, Reading
from tests.chaos.gate import Gate
from tests.chaos.lanes import SLOTS, Lane
from tests.chaos.letters import Letter, Letterbox
from tests.chaos.machine import Usage
from tests.chaos.tally import Tally
from tests.chaos.tokens import Array, Kept, Shelf, Tokens, complaint, filled
from tests.chaos.verdict import (
    DESCRIPTOR_GROWTH,
    MEMORY_GROWTH,
    NORMAL_LENGTH,
    OUTCOMES,
    THREAD_GROWTH,
    Calm,
    Run,
)
from tests.chaos.witness import Clumsy, Witness
from tests.polling import eventually

SHAPE = (1, 1, 2, 3)


# --- tokens and views -----------------------------------------------------------------


def test_tokens_are_unique_among_clients_and_requests() -> None:
    clients = [Tokens(number) for number in (0, 1, 2, 300)]
    made = [tokens.make() for tokens in clients for _ in range(100)]
    assert len(set(made)) == len(made)
    assert 0 not in made


def test_an_array_full_of_its_token_is_right() -> None:
    token = Tokens(7).make()
    assert complaint(filled(SHAPE, token), token, SHAPE) == ""


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 0, 1, 2)])
def test_one_foreign_element_is_found_and_named(place: tuple[int, ...]) -> None:
    mine, theirs = Tokens(1).make(), Tokens(2).make()
    array = filled(SHAPE, mine)
    array.view(np.uint32)[place] = theirs
    told = complaint(array, mine, SHAPE)
    assert told == "should be #1 of client 1; 1 of 6 elements are #1 of client 2"


def test_a_stale_reply_and_an_empty_one_are_found() -> None:
    tokens = Tokens(1)
    before, now = tokens.make(), tokens.make()
    assert "#1 of client 1" in complaint(filled(SHAPE, before), now, SHAPE)
    assert "no token (0)" in complaint(filled(SHAPE, 0), now, SHAPE)


def test_a_reply_of_another_shape_is_found() -> None:
    token = Tokens(1).make()
    assert "has shape" in complaint(filled(SHAPE, token), token, (1, 1, 3, 2))


def shelf_with_a_view(*, limit: int = 2) -> tuple[Shelf, Array, list[str]]:
    told: list[str] = []
    shelf = Shelf(limit, told.append)
    array = filled(SHAPE, 5)
    shelf.put(Kept(array, 5, "a reply"))
    return shelf, array, told


def test_a_kept_view_that_stays_as_it_is_is_right() -> None:
    shelf, _, told = shelf_with_a_view()
    assert shelf.look(random.Random(1), drop=False)
    shelf.clear()
    assert not shelf.look(random.Random(1), drop=False)
    assert told == []


@pytest.mark.parametrize("drop", [False, True])
def test_a_kept_view_that_changes_is_found(drop: bool) -> None:
    shelf, array, told = shelf_with_a_view()
    array[...] = 1
    shelf.look(random.Random(1), drop=drop)
    assert len(told) == 1
    assert "a kept view of a reply changed" in told[0]


def test_a_changed_view_is_found_also_when_it_makes_room_or_at_the_end() -> None:
    shelf, array, told = shelf_with_a_view(limit=1)
    array[...] = 1
    shelf.put(Kept(filled(SHAPE, 6), 6, "another"))
    assert len(told) == 1
    shelf, array, told = shelf_with_a_view()
    array[...] = 1
    shelf.clear()
    assert len(told) == 1


# --- what is left ---------------------------------------------------------------------


def test_a_registration_is_told_of_by_its_file_however_its_key_is_spelt() -> None:
    registered = {
        "shmlane.1.0.0": "/shmlane.1",
        "shmlane.1.1.0": "//shmlane.1",
        "shmlane.2.0.3": "/shmlane.2",
        "stranger-1": "/stranger-1",
    }
    assert untold(registered, {"shmlane.1", "shmlane.2"}) == []
    assert untold(registered, {"shmlane.1"}) == ["shmlane.2.0.3"]
    assert len(untold(registered, ())) == 3


# --- the gate -------------------------------------------------------------------------


def test_a_gate_closes_only_once_everybody_is_out() -> None:
    gate, go = Gate(), threading.Event()
    gate.open()
    inside = threading.Thread(target=gate.run, args=[go.wait])
    inside.start()
    eventually(lambda: "1 inside" in repr(gate))
    assert not gate.close(timeout=0.01)
    assert gate.longest > 0
    go.set()
    assert gate.close(timeout=10)
    inside.join()
    late: list[int] = []
    gate.run(lambda: late.append(1))
    assert late == []


def test_a_gate_lets_tasks_in_and_out_as_it_does_threads() -> None:
    gate = Gate()
    came: list[str] = []

    async def wait_for(go: asyncio.Event) -> None:
        came.append("in")
        await go.wait()

    async def pass_gate() -> None:
        go = asyncio.Event()
        await gate.run_task(lambda: wait_for(go))
        assert came == []
        gate.open()
        inside = asyncio.create_task(gate.run_task(lambda: wait_for(go)))
        await asyncio.sleep(0)
        assert came == ["in"]
        assert not gate.close(timeout=0)
        go.set()
        await inside
        assert gate.close(timeout=0)

    asyncio.run(pass_gate())


# --- what callers get -----------------------------------------------------------------


class Watch:
    """A witness, and what it tells."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.tally = Tally()
        self.witness = Witness(
            tokens=Tokens(1),
            tally=self.tally,
            shelf=Shelf(2, self.told.append),
            report=self.told.append,
        )
        session = Session("localhost:1", "identity", slots=SLOTS)
        self.lane = Lane(session, frozenset({InferTimeout}))


@pytest.mark.parametrize("error", [InferTimeout("slow"), Clumsy("by itself")])
def test_an_error_that_a_fault_or_the_caller_explains_is_counted(
    error: Exception,
) -> None:
    watch = Watch()
    with watch.witness.excusing(watch.lane):
        raise error
    assert watch.told == []
    assert watch.tally.copy()[type(error).__name__] == 1


@pytest.mark.parametrize("error", [LeaseExpired("over"), KeyError("x")])
def test_an_error_that_nothing_explains_is_told(error: Exception) -> None:
    watch = Watch()
    with watch.witness.excusing(watch.lane):
        raise error
    assert len(watch.told) == 1


def a_flow(watch: Watch, *, ordered: bool) -> tuple[Flow, list[Item]]:
    """One that ends by itself, and its items."""
    for number in range(1000):
        flow = Flow(watch.witness, watch.lane, random.Random(number))
        if flow.manner["ordered"] == ordered and flow.enough is None:
            items = list(flow.items())
            if len(items) > 3:
                return flow, items
    raise AssertionError("no such flow among so many")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda turns: turns, ""),
        (lambda turns: [*turns[:2], *turns[3:]], "it ends after"),
        (lambda turns: [*turns, turns[0]], "item 0 comes twice"),
        (lambda turns: [turns[1], turns[0], *turns[2:]], "comes in the place of"),
    ],
)
def test_what_is_wrong_with_the_order_of_a_stream_is_told(
    change: Callable[[list[Reading]], list[Reading]], told: str
) -> None:
    watch = Watch()
    flow, items = a_flow(watch, ordered=True)
    came = change([Reading(item.number, None) for item in items])
    for each in came:
        flow.take(each)
    flow.ended(len(came))
    assert told in " ".join(watch.told)
    assert bool(watch.told) == bool(told)


def test_a_stream_without_order_may_hand_out_any_item_once() -> None:
    watch = Watch()
    flow, items = a_flow(watch, ordered=False)
    for item in reversed(items):
        flow.take(Reading(item.number, None))
    flow.ended(len(items))
    assert watch.told == []


# --- letters --------------------------------------------------------------------------


def test_a_letter_is_for_whoever_has_such_a_session_and_a_reference_is_good_once(
    tmp_path: Path,
) -> None:
    here, there = Letterbox(tmp_path), Letterbox(tmp_path)
    lane = Watch().lane
    other = Lane(Session("localhost:1", "slow"), lane.expected)
    letter = Letter("shmlane.0123456789abcdef:0:1", 7, SHAPE)
    here.put(letter, lane)
    assert there.take(other, random.Random(1)) is None
    assert there.take(lane, random.Random(1)) == letter
    assert there.note_adopted(letter.ref)
    assert not here.note_adopted(letter.ref)


def test_only_the_newest_letters_and_handles_in_use_are_kept(tmp_path: Path) -> None:
    letters, lane, dice = Letterbox(tmp_path), Watch().lane, random.Random(1)
    for token in range(20):
        letters.put(Letter("shmlane.0123456789abcdef:0:1", token, SHAPE), lane)
    taken = [letters.take(lane, dice) for _ in range(30)]
    assert 0 < len({letter.token for letter in taken if letter is not None}) <= 5
    letters.publish("shmlane.1")
    assert letters.some_handle(dice) == "shmlane.1"
    letters.forget("shmlane.1")
    assert letters.some_handle(dice) is None


# --- the verdict ----------------------------------------------------------------------

USAGE = Usage(pid=1, memory=30 << 20, descriptors=100, threads=9)
GOOD = Run(
    seconds=NORMAL_LENGTH,
    faults=Counter(dict.fromkeys(FAULTS, 1)),
    outcomes=Counter(dict.fromkeys(OUTCOMES, 1)),
    calms=[Calm(number, client=USAGE, server=USAGE) for number in range(3)],
)


def test_a_run_in_which_everything_happened_and_nothing_grew_is_good() -> None:
    assert GOOD.complaints() == []
    assert "after 2 requests: client 30.0 MiB, 100 descriptors, 9 threads" in str(GOOD)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_was_never_caused_is_told(fault: str) -> None:
    run = replace(GOOD, faults=GOOD.faults - Counter([fault]))
    assert run.complaints() == [f"fault never caused: {fault}"]
    assert replace(run, seconds=1).complaints() == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_that_was_never_seen_is_told(outcome: str) -> None:
    run = replace(GOOD, outcomes=GOOD.outcomes - Counter([outcome]))
    assert run.complaints() == [f"outcome never seen: {outcome}"]


@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": USAGE.memory + MEMORY_GROWTH + 1}, "memory"),
        ({"descriptors": USAGE.descriptors + DESCRIPTOR_GROWTH + 1}, "descriptors"),
        ({"threads": USAGE.threads + THREAD_GROWTH + 1}, "threads"),
        ({"pid": 2}, "cannot be compared"),
    ],
)
def test_what_grew_is_told(who: str, change: dict[str, int], words: str) -> None:
    late = replace(GOOD.calms[2], **{who: replace(USAGE, **change)})  # type: ignore[arg-type]  # one field, by name
    (told,) = replace(GOOD, calms=[*GOOD.calms[:2], late]).complaints()
    assert who in told
    assert words in told
