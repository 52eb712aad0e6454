"""One large reply does not keep its memory for as long as the connection lasts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shmlane import buffers
from shmlane.buffers import Inbox
from tests.unit.asked import Repeat, count_of, session_on, slots_of

MIB = 1 << 20
ROOM = 8 * MIB
BODIES = 16

pytestmark = pytest.mark.skipif(
    not buffers._COUNTS_ARE_EXACT, reason="memory is used again with the GIL only"
)


def kept(inbox: Inbox) -> int:
    return int(repr(inbox).split()[2])


def filled(nbytes: int) -> Inbox:
    inbox = Inbox()
    inbox.take(nbytes)
    return inbox


@pytest.mark.parametrize(
    "come", [Inbox.weigh, lambda inbox, nbytes: inbox.take(nbytes)]
)
def test_memory_far_larger_than_many_bodies_in_a_row_is_let_go_of(
    come: Callable[[Inbox, int], object],
) -> None:
    inbox = filled(ROOM)
    for _ in range(BODIES - 1):
        come(inbox, 1000)
        assert kept(inbox) >= ROOM
    come(inbox, 1000)
    assert kept(inbox) < 2000
    assert len(inbox.take(ROOM)) == ROOM


@pytest.mark.parametrize(
    ("nbytes", "room"), [(ROOM // 4, ROOM), (ROOM // 2, ROOM), (100, MIB // 2)]
)
def test_memory_that_is_of_use_or_small_is_kept(nbytes: int, room: int) -> None:
    inbox = filled(room)
    for _ in range(3 * BODIES):
        inbox.take(nbytes)
    assert kept(inbox) >= room


def test_one_large_body_among_small_ones_keeps_its_memory() -> None:
    inbox = filled(ROOM)
    for _ in range(4):
        for _ in range(BODIES - 1):
            inbox.weigh(1000)
        inbox.take(ROOM)
        assert kept(inbox) >= ROOM


def test_a_view_outlives_memory_that_was_let_go_of() -> None:
    inbox = Inbox()
    view = inbox.take(ROOM)
    view[:3] = b"old"
    for _ in range(BODIES):
        inbox.weigh(1)
    assert kept(inbox) == 0
    inbox.take(ROOM)[:3] = b"new"
    assert bytes(view[:3]) == b"old"


def test_small_replies_after_a_large_one_end_its_memory() -> None:
    repeat = Repeat()
    with session_on(repeat.model, memory="wire") as (_, session):
        count_of(session, MIB)
        (slot,) = slots_of(session)
        inbox = slot.channel._inbox  # type: ignore[union-attr]
        assert kept(inbox) >= np.dtype(np.float32).itemsize * MIB
        for _ in range(BODIES):
            count_of(session, 1)
        assert kept(inbox) == 0
        assert count_of(session, MIB) == MIB
