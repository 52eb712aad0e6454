"""Late and lost requests: when their slots come back, and when they never do."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shmlane import draining
from shmlane.errors import OutOfSharedMemory
from shmlane.slots import Label, Slot
from tests.polling import eventually
from tests.unit.loopback import LONG
from tests.unit.receiving import (
    FULL,
    IN_USE,
    OK,
    ControlServer,
    Desk,
    control_in_place,
    read_by_the_other_end,
)
from tests.unit.scripted import (
    FIRST_ID,
    OF_FIRST,
    OTHER_ID,
    error,
    http,
    output,
    success,
)

pytestmark = pytest.mark.usefixtures("counted_ids")

REFUSED = error(403, "This API is restricted")
DOUBLING = [0.001, 0.002, 0.004, 0.008]


@pytest.fixture
def control_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlServer]:
    with control_in_place(monkeypatch) as server:
        yield server


@pytest.fixture
def desk(control_server: ControlServer) -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


# --- late replies ---------------------------------------------------------------------


def test_a_late_reply_frees_its_slot_and_keeps_its_connection(desk: Desk) -> None:
    (slot,) = desk.late()
    desk.watch(slot)
    assert desk.receiver.is_busy
    assert repr(desk.receiver) == "<Receiver running, 0 futures, 0 drains>"
    desk.reply(slot)
    desk.came_back(slot)
    assert slot.channel is not None
    assert slot.channel.is_open
    assert desk.receiver.late_replies == 1
    assert repr(desk.receiver) == "<Receiver idle, 0 futures, 0 drains>"


def test_a_reply_that_was_there_already_is_read(desk: Desk) -> None:
    (slot,) = desk.late()
    desk.reply(slot)
    desk.watch(slot)
    desk.came_back(slot)


def test_a_reply_in_pieces_frees_the_slot_with_its_last_byte(desk: Desk) -> None:
    (slot,) = desk.late()
    desk.watch(slot)
    data = success(FIRST_ID, FULL)
    for piece in (data[:30], data[30:60], data[60:-1]):
        desk.reply(slot, piece)
        eventually(lambda: read_by_the_other_end(desk.far[slot]))
        assert desk.returned == []
        assert slot.label is Label.LATE
    desk.reply(slot, data[-1:])
    desk.came_back(slot)
    assert desk.receiver.late_replies == 1


def test_the_rest_of_a_reply_that_was_begun_is_read(desk: Desk) -> None:
    (slot,) = desk.late()
    data = success(FIRST_ID, FULL)
    desk.reply(slot, data[:50])
    assert slot.channel is not None
    assert slot.channel.feed(slot.channel.receive(1)) is None
    desk.watch(slot)
    desk.reply(slot, data[50:])
    desk.came_back(slot)


@pytest.mark.parametrize(
    "data",
    [
        error(500, f"{OF_FIRST} the model broke"),
        error(404, "Unable to find shared memory region: 'r'"),
        error(404, "Request for unknown model: 'm' is not found"),
        success(FIRST_ID),
        success(FIRST_ID, output("Y", (5, 5))),
        success(FIRST_ID, FULL, Connection="close"),
    ],
)
def test_every_complete_reply_of_tritons_frees_the_slot(
    desk: Desk, control_server: ControlServer, data: bytes
) -> None:
    (slot,) = desk.late()
    desk.watch(slot)
    desk.reply(slot, data)
    desk.came_back(slot)
    assert (desk.receiver.late_replies, desk.receiver.drains) == (1, 0)
    assert control_server.asked == []


def test_late_replies_are_never_known_by_their_bytes(desk: Desk) -> None:
    (slot,) = desk.late()
    desk.watch(slot)
    desk.reply(slot)
    desk.came_back(slot)
    for _ in range(2):
        desk.exchange.begin(slot)
    assert desk.exchange.matches(slot, success(FIRST_ID, FULL)) is None
    desk.exchange.withdraw(slot)


# --- lost requests --------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        success(FIRST_ID, FULL) + b"more",
        success(OTHER_ID, FULL),
        success(FIRST_ID, FULL, name="other"),
        success(FIRST_ID, FULL, Via="1.1 proxy"),
        http(502, "<html>Bad Gateway</html>"),
        http(200, "{}"),
    ],
)
def test_a_late_reply_that_cannot_be_trusted_is_drained(
    desk: Desk, control_server: ControlServer, data: bytes
) -> None:
    (slot,) = desk.late()
    (name,) = [each.name for each in slot.registrations]
    desk.watch(slot)
    desk.reply(slot, data)
    desk.came_back(slot)
    assert slot.channel is not None
    assert not slot.channel.is_open
    assert (desk.receiver.late_replies, desk.receiver.drains) == (0, 1)
    region = f"/v2/systemsharedmemory/region/{name}"
    assert control_server.asked == [
        f"GET {region}/status",
        f"POST {region}/unregister",
        f"GET {region}/status",
    ]


@pytest.mark.parametrize("begun", [b"", success(FIRST_ID, FULL)[:50]])
def test_an_end_while_a_reply_is_awaited_is_drained(desk: Desk, begun: bytes) -> None:
    (slot,) = desk.late()
    desk.watch(slot)
    desk.reply(slot, begun)
    desk.far[slot].close()
    desk.came_back(slot)
    assert desk.receiver.drains == 1


def test_a_lost_slot_comes_back_with_new_names(desk: Desk) -> None:
    (slot,) = desk.lost()
    before = slot.registrations[0].name
    desk.watch(slot)
    desk.came_back(slot)
    assert slot.label is Label.FREE
    assert slot.registrations[0].name != before
    assert not slot.registrations[0].is_live
    assert slot.obsolete == []


def test_a_lost_slot_is_kept_until_the_server_agrees(
    desk: Desk, control_server: ControlServer
) -> None:
    replies = [OK, IN_USE, IN_USE, IN_USE, IN_USE]
    control_server.answer = lambda line: replies.pop()
    (slot,) = desk.lost()
    desk.watch(slot)
    desk.came_back(slot)
    assert replies == []
    assert control_server.asked[1:-1] == [control_server.asked[1]] * 5


def test_outputs_move_when_the_server_does_not_know_the_slot(
    desk: Desk, control_server: ControlServer
) -> None:
    control_server.knows_nothing = True
    (slot,) = desk.lost()
    (tensor,) = slot.outputs.values()
    before = tensor.registration.region
    old = tensor.root
    desk.watch(slot)
    desk.came_back(slot)
    assert tensor.registration.region is not before
    # What a server out of reach still writes goes where nobody looks.
    old[:] = 7
    assert not (tensor.array == 7).any()
    assert all("unregister" not in line for line in control_server.asked)


def test_outputs_that_cannot_move_now_are_moved_later(
    desk: Desk, control_server: ControlServer
) -> None:
    control_server.knows_nothing = True
    tries: list[Slot] = []

    def move(slot: Slot) -> None:
        tries.append(slot)
        if len(tries) < 3:
            raise OutOfSharedMemory("full")

    desk.move_outputs = move
    (slot,) = desk.lost()
    desk.watch(slot)
    desk.came_back(slot)
    assert tries == [slot] * 3


def test_a_lost_slot_of_an_old_server_is_given_up(
    desk: Desk, control_server: ControlServer
) -> None:
    control_server.version = "2.49.0"
    (slot,) = desk.lost()
    desk.watch(slot)
    desk.is_idle()
    assert (desk.receiver.retired, desk.receiver.drains) == (1, 0)
    assert desk.retired == [slot]
    assert desk.returned == []
    assert slot.server_hold
    assert slot.record[0] == 1
    assert control_server.asked == []


def test_a_server_that_is_away_is_asked_again(
    desk: Desk, control_server: ControlServer
) -> None:
    control_server.is_away = True
    (slot,) = desk.lost()
    desk.watch(slot)
    eventually(lambda: control_server.refusals >= 3)
    assert slot.server_hold
    control_server.is_away = False
    desk.came_back(slot)


def test_a_server_that_refuses_is_asked_less_and_less_often(
    desk: Desk, control_server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_LONGEST_PAUSE", 0.016)
    # One that did not answer would be asked again at once.
    monkeypatch.setattr(draining, "_CONTROL_LIMIT", LONG)
    moments: list[float] = []

    def refuse_at_first(_line: str) -> bytes:
        moments.append(time.monotonic())
        return OK if len(moments) > 30 else REFUSED

    control_server.answer = refuse_at_first
    (slot,) = desk.lost()
    desk.watch(slot)
    # Twice as long each time without end, it would not come back today.
    desk.came_back(slot)
    pauses = [after - before for before, after in itertools.pairwise(moments)]
    assert all(pause >= wanted for pause, wanted in zip(pauses, DOUBLING, strict=False))
    assert min(pauses[4:]) >= 0.016


def test_a_server_that_has_begun_to_answer_is_asked_often_again(
    desk: Desk, control_server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_LONGEST_PAUSE", 1e6)
    replies = [OK, *[REFUSED] * 8, IN_USE, *[REFUSED] * 8]
    control_server.answer = lambda line: replies.pop()
    (slot,) = desk.lost()
    desk.watch(slot)
    desk.came_back(slot)
    assert replies == []


def test_a_server_that_was_away_is_asked_often_again(
    desk: Desk, control_server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_LONGEST_PAUSE", 1e6)
    replies = [OK, *[REFUSED] * 8, b"", *[REFUSED] * 8]
    control_server.answer = lambda line: replies.pop()
    (slot,) = desk.lost()
    desk.watch(slot)
    desk.came_back(slot)
    assert replies == []


def test_one_connection_after_another_is_no_proof(
    desk: Desk, control_server: ControlServer
) -> None:
    """The second may lead to a neighbour on the same address, who knows of nothing."""

    def accept_and_end(_line: str) -> bytes:
        control_server.knows_nothing = True
        return http(200, Connection="close")

    control_server.answer = accept_and_end
    (slot,) = desk.lost()
    (tensor,) = slot.outputs.values()
    before = tensor.registration.region
    desk.watch(slot)
    desk.came_back(slot)
    assert tensor.registration.region is not before


def test_a_control_connection_that_broke_is_made_anew(
    desk: Desk, control_server: ControlServer
) -> None:
    replies = [OK, b"garbage", IN_USE, http(500, Connection="close"), IN_USE]
    control_server.answer = lambda line: replies.pop()
    (slot,) = desk.lost()
    desk.watch(slot)
    desk.came_back(slot)
    assert replies == []


def test_a_drain_does_not_keep_late_replies_waiting(
    desk: Desk, control_server: ControlServer
) -> None:
    control_server.answer = lambda line: IN_USE
    (lost,), (late,) = desk.lost(), desk.late()
    desk.watch(lost, late)
    eventually(lambda: repr(desk.receiver) == "<Receiver running, 0 futures, 1 drains>")
    desk.reply(late)
    eventually(lambda: desk.returned == [late])
    control_server.answer = lambda line: OK
    desk.came_back(late, lost)


@pytest.mark.parametrize("hangs", ["connect", "answer"])
def test_a_server_that_hangs_keeps_nobody_waiting(
    desk: Desk,
    control_server: ControlServer,
    monkeypatch: pytest.MonkeyPatch,
    hangs: str,
) -> None:
    monkeypatch.setattr(draining, "_CONTROL_LIMIT", LONG)
    asked, go = threading.Event(), threading.Event()
    hanging = getattr(control_server, hangs)

    def hang(argument: Any) -> Any:
        asked.set()
        assert go.wait(LONG)
        return hanging(argument)

    monkeypatch.setattr(control_server, hangs, hang)
    (lost,), (late, other) = desk.lost(), desk.late(2)
    desk.watch(lost, late, other)
    try:
        assert asked.wait(LONG)
        desk.reply(late)
        eventually(lambda: desk.returned == [late])
        desk.receiver.stop()
        assert not go.is_set()
        assert (lost.label, other.label) == (Label.LOST, Label.LATE)
    finally:
        go.set()
    desk.is_idle()
    assert desk.returned == [late]
    assert (lost.label, other.label) == (Label.LOST, Label.LATE)
