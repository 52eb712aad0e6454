"""The receiver's thread: there when needed, gone when not, and nothing overlooked."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from shmlane.board import Board
from shmlane.slots import Label, Slot
from tests.polling import eventually
from tests.unit.interleaving import Halt, every
from tests.unit.receiving import (
    IN_USE,
    ControlServer,
    Desk,
    control_in_place,
    read_by_the_other_end,
)

pytestmark = pytest.mark.usefixtures("counted_ids")


@pytest.fixture
def control_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlServer]:
    with control_in_place(monkeypatch) as server:
        yield server


@pytest.fixture
def desk(control_server: ControlServer) -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def test_there_is_no_thread_before_the_first_slot_and_after_the_last(
    desk: Desk,
) -> None:
    assert not desk.receiver.is_busy
    for _ in range(3):
        first, last = desk.late(2)
        desk.watch(first, last)
        desk.reply(first)
        eventually(lambda: desk.returned == [first])  # noqa: B023 - read at once
        assert desk.receiver.is_busy
        desk.reply(last)
        desk.came_back(first, last)
    assert desk.receiver.late_replies == 6


def test_many_slots_come_back_in_any_order(desk: Desk) -> None:
    slots = desk.late(60)
    desk.watch(*slots)
    for slot in random.sample(slots, len(slots)):
        desk.reply(slot)
    desk.came_back(*slots)
    assert desk.receiver.late_replies == 60


def test_late_and_lost_slots_come_back_together(desk: Desk) -> None:
    late, lost = desk.late(20), desk.lost(20)
    desk.watch(*(slot for pair in zip(late, lost, strict=True) for slot in pair))
    for slot in late[:10]:
        desk.far[slot].close()
    for slot in late[10:]:
        desk.reply(slot)
    desk.came_back(*late, *lost)
    assert (desk.receiver.late_replies, desk.receiver.drains) == (10, 30)


@pytest.mark.parametrize("how", ["late", "lost"])
def test_a_slot_that_comes_at_any_line_of_the_thread_is_not_overlooked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    starts: list[Callable[[], None]] = []
    monkeypatch.setattr(
        _thread, "start_new_thread", lambda run, _args: starts.append(run)
    )

    def comes_at(line: int) -> Halt[None]:
        slots = first, second = desk.late(2) if how == "late" else desk.lost(2)
        for slot in slots if how == "late" else ():
            desk.reply(slot)
        desk.watch(first)
        with Halt(starts.pop(), line) as thread:
            desk.watch(second)
        while starts:
            starts.pop()()
        desk.came_back(*slots)
        return thread

    assert len(list(every(comes_at))) > 30


def test_a_sleeping_thread_is_woken(desk: Desk) -> None:
    first, second = desk.late(2)
    desk.watch(first)
    for _ in range(20):
        # Once this is read the thread goes back to sleep.
        desk.reply(first, b"HTTP/1.1 100 Go on\r\n\r\n")
        eventually(lambda: read_by_the_other_end(desk.far[first]))
    desk.reply(second)
    desk.watch(second)
    eventually(lambda: desk.returned == [second])
    desk.receiver.stop()
    desk.is_idle()
    assert first.label is Label.LATE


def test_slots_may_come_from_many_threads(desk: Desk) -> None:
    slots = desk.late(32)
    threads = [threading.Thread(target=desk.watch, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for slot in slots:
        desk.reply(slot)
    for thread in threads:
        thread.join()
    desk.came_back(*slots)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_stopping_ends_the_thread_and_closes_what_is_its_own(
    desk: Desk, control_server: ControlServer
) -> None:
    (late,), (lost,) = desk.late(), desk.lost()
    gc.collect()
    before = open_descriptors()
    control_server.answer = lambda line: IN_USE
    desk.watch(late, lost)
    eventually(lambda: control_server.asked)
    desk.receiver.stop()
    desk.is_idle()
    eventually(lambda: open_descriptors() <= before, "its descriptors are closed")
    assert desk.returned == []
    assert late.label is Label.LATE
    assert lost.label is Label.LOST


def test_a_stopped_receiver_starts_nothing(desk: Desk) -> None:
    desk.receiver.stop()
    (slot,) = desk.late()
    desk.reply(slot)
    desk.watch(slot)
    assert not desk.receiver.is_busy
    assert slot.label is Label.LATE


@pytest.mark.parametrize("how", ["late", "lost", "unknown", "old"])
def test_once_stopped_at_any_line_no_slot_changes_hands(
    control_server: ControlServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The session then looks where its slots are: none may be on the way."""
    starts: list[Callable[[], None]] = []
    monkeypatch.setattr(
        _thread, "start_new_thread", lambda run, _args: starts.append(run)
    )
    control_server.knows_nothing = how == "unknown"
    control_server.version = "2.49.0" if how == "old" else "2.51.0"

    def place(desk: Desk, slot: Slot) -> object:
        region = slot.tensors[-1].registration.region
        return slot.server_hold, region, list(desk.returned), list(desk.retired)

    def stops_at(line: int) -> Halt[None]:
        desk = Desk()
        (slot,) = desk.late() if how == "late" else desk.lost()
        if how == "late":
            desk.reply(slot)
        desk.watch(slot)
        places: list[object] = []

        def stop() -> None:
            desk.receiver.stop()
            places.append(place(desk, slot))

        stopping = threading.Thread(target=stop)
        with Halt(starts.pop(), line) as thread:
            stopping.start()
            # Unless it has to wait for what happens at that line.
            stopping.join(0.02)
        stopping.join()
        assert places == [place(desk, slot)]
        given = [*desk.returned, *desk.retired]
        assert slot.server_hold == (given in ([], desk.retired))
        assert starts == []
        desk.close()
        return thread

    assert len(list(every(stops_at))) > 30


def test_no_slot_is_given_back_to_a_session_that_is_gone(desk: Desk) -> None:
    slots = desk.late(2)
    desk.session = None
    for slot in slots:
        desk.reply(slot)
    desk.watch(*slots)
    desk.is_idle()
    assert desk.returned == []
    assert {slot.label for slot in slots} == {Label.LATE}


def test_a_slot_that_is_closed_under_the_thread_does_no_harm(
    control_server: ControlServer,
) -> None:
    desk = Desk()
    slots = desk.late(8)
    for slot in slots:
        desk.reply(slot)

    def close_all(_slot: Slot) -> None:
        # As a session does that closes when several replies come at once.
        desk.receiver.stop()
        for each in slots:
            each.close()

    desk.give_back = close_all
    desk.watch(*slots)
    desk.is_idle()
    assert desk.receiver.late_replies >= 1
    desk.close()


def test_a_thread_that_cannot_be_started_is_tried_again_with_the_next_slot(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = desk.late(2)
    desk.reply(first)
    desk.reply(second)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        desk.watch(first)
    assert desk.returned == []
    desk.receiver.nudge()
    desk.watch(second)
    desk.came_back(first, second)


@pytest.mark.parametrize("why", ["it broke", "no watch is left"])
def test_a_connection_that_cannot_be_watched_is_lost(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    starts: list[Callable[[], None]] = []
    start = _thread.start_new_thread
    with monkeypatch.context() as patch:
        patch.setattr(
            _thread, "start_new_thread", lambda run, _args: starts.append(run)
        )
        (slot,) = desk.late()
        desk.watch(slot)
    channel = slot.channel
    assert channel is not None
    if why == "it broke":
        channel.close()
    else:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Board, "expect", refuse)
    start(starts.pop(), ())
    desk.came_back(slot)
    assert desk.receiver.drains == 1
    assert not channel.is_open


def test_a_thread_without_descriptors_waits_for_some(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slot,) = desk.late()
    desk.reply(slot)
    pair = socket.socketpair
    refusals = 0

    def few() -> tuple[socket.socket, socket.socket]:
        nonlocal refusals
        refusals += 1
        if refusals < 4:
            raise OSError(24, "Too many open files")
        return pair()

    monkeypatch.setattr(socket, "socketpair", few)
    desk.watch(slot)
    desk.came_back(slot)
    assert refusals == 4
