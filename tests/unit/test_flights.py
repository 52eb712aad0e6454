"""One request that nobody waits for: sent, judged in pieces, and looked for in time."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmlane.errors import InferFailed, InferTimeout, ProtocolError, RequestLost
from shmlane.exchange import Answer, Exchange, Verdict
from shmlane.flights import Flight, Timetable
from shmlane.slots import Label, Slot
from shmlane.tensors import NOTHING
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.unit.loopback import LONG
from tests.unit.scripted import (
    FIRST_ID,
    OF_FIRST,
    OPEN,
    OTHER_ID,
    PLAIN,
    REQUESTS,
    error,
    http,
    memory,
    output,
    success,
)

pytestmark = pytest.mark.usefixtures("counted_ids")

FULL = output("Y", (1, 4))
BLOB = np.arange(65536, dtype=np.float32)


class Gate:
    """A slot with one flight, and the far end of its connection."""

    def __init__(self, *, is_wire: bool = False) -> None:
        metadata = OPEN if is_wire else PLAIN
        self.exchange = Exchange(REQUESTS, metadata)
        self.memory = memory(metadata, shapes={"X": (4,)} if is_wire else None)
        (self.slot,) = self.memory.make_slots(1)
        near, self.far = socket.socketpair()
        self.channel = HttpConnection(near)
        self.slot.channel = self.channel
        self.slot.registrations[0].is_live = True
        self.exchange.prepare(self.slot, 1)
        self.flight = Flight(self.slot, 1, LONG)

    def send(self) -> None:
        assert self.flight.send(self.exchange)
        assert self.slot.server_hold
        assert self.far.recv(65536).startswith(b"POST")

    def comes(self, data: bytes) -> None:
        self.far.sendall(data)

    def judge(self) -> Answer | Verdict | None:
        return self.flight.receive(self.exchange)

    @property
    def reply(self) -> bytes:
        return success(self.slot.sent_id, FULL)

    def close(self) -> None:
        self.slot.close()
        self.far.close()
        self.memory.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


@pytest.fixture
def wire_gate() -> Iterator[Gate]:
    made = Gate(is_wire=True)
    yield made
    made.close()


def test_a_flight_is_ready_once_its_slot_is(gate: Gate) -> None:
    slot, flight = gate.slot, gate.flight
    assert flight.is_ready()
    assert not Flight(slot, 3, LONG).is_ready()
    gate.comes(b"HTTP/1.1 408 Too slow\r\n")
    eventually(lambda: not flight.is_ready(), "an idle connection that speaks is dead")
    gate.channel.close()
    assert not flight.is_ready()
    slot.channel = None
    assert not flight.is_ready()
    slot.prepared = None
    assert not flight.is_ready()
    assert flight.is_small


def test_nothing_is_waited_for_and_the_reply_is_the_answer(gate: Gate) -> None:
    for _ in range(4):
        gate.send()
        assert gate.judge() is None
        gate.comes(gate.reply)
        assert isinstance(gate.judge(), Answer)
        assert not gate.slot.server_hold
        assert gate.slot.record[0] == 0
    prepared = gate.slot.prepared
    assert prepared is not None
    assert isinstance(gate.exchange.matches(gate.slot, gate.reply), Answer)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_reply_may_come_in_two_pieces_of_any_length(
    gate: Gate, is_known: bool
) -> None:
    for _ in range(2 if is_known else 0):
        gate.send()
        gate.comes(gate.reply)
        assert gate.judge()
    for cut in range(1, len(gate.reply)):
        gate.send()
        gate.comes(gate.reply[:cut])
        assert gate.judge() is None
        assert gate.judge() is None
        assert gate.slot.server_hold
        gate.comes(gate.reply[cut:])
        assert isinstance(gate.judge(), Answer)
        assert not gate.slot.server_hold


def test_a_reply_may_come_byte_by_byte(gate: Gate) -> None:
    gate.send()
    for number in range(len(gate.reply) - 1):
        gate.comes(gate.reply[number : number + 1])
        assert gate.judge() is None
    gate.comes(gate.reply[-1:])
    assert isinstance(gate.judge(), Answer)


def test_a_large_body_is_received_where_it_belongs(wire_gate: Gate) -> None:
    gate = wire_gate
    for turn in range(3):
        gate.send()
        data = success(
            gate.slot.sent_id,
            output("Y", BLOB.shape, wire=BLOB.nbytes),
            blobs=(turn + BLOB).tobytes(),
        )
        outcome: Answer | Verdict | None = None
        for start in range(0, len(data), 50_000):
            assert outcome is None
            gate.comes(data[start : start + 50_000])
            outcome = gate.judge()
            # A piece of it may lie ready that was not taken in one go.
            while outcome is None and not gate.channel.is_quiet:
                outcome = gate.judge()
        assert isinstance(outcome, Answer)
        np.testing.assert_array_equal(outcome.wire["Y"], turn + BLOB)
        assert not gate.slot.server_hold


def test_a_connection_that_is_dead_has_taken_nothing(gate: Gate) -> None:
    gate.channel.close()
    assert not gate.flight.send(gate.exchange)
    assert not gate.slot.server_hold
    assert gate.slot.record[0] == 0


def test_a_request_whose_last_byte_did_not_leave_in_time_is_not_in_flight(
    wire_gate: Gate,
) -> None:
    slot = wire_gate.slot
    big = np.zeros(1 << 20, np.float32)
    slot.prepared = None
    slot.inputs["X"].reshape((4,))
    wire_gate.exchange.prepare(slot, 1)
    prepared = slot.prepared
    assert prepared is not None
    tensor = slot.inputs["X"]
    tensor.lent = big
    prepared.wire_inputs = (tensor,)
    flight = Flight(slot, 1, 0.02)
    assert not flight.is_small
    with pytest.raises(InferTimeout, match="has not begun"):
        flight.send(wire_gate.exchange)
    assert not slot.server_hold
    assert not wire_gate.channel.is_open
    tensor.lent = None


def test_whoever_is_interrupted_while_sending_leaves_no_slot_that_is_only_late(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reply would ever come to what may not have left."""

    def begin(slot: Slot) -> bytes:
        Exchange.begin(slot)
        raise KeyboardInterrupt

    monkeypatch.setattr(gate.exchange, "begin", begin)
    with pytest.raises(KeyboardInterrupt):
        gate.flight.send(gate.exchange)
    assert gate.slot.label is Label.LOST


@pytest.mark.parametrize(
    ("data", "kind", "is_held"),
    [
        (error(500, f"{OF_FIRST} the model broke"), InferFailed, False),
        (success(FIRST_ID), InferFailed, False),
        (success(OTHER_ID, FULL), ProtocolError, True),
        (b"garbage, not HTTP\r\n\r\n", ProtocolError, True),
        (success(FIRST_ID, FULL) * 2, ProtocolError, True),
        (http(504, "gateway"), RequestLost, True),
        (success(FIRST_ID, FULL, Via="proxy"), RequestLost, True),
        (b"", RequestLost, True),
        (success(FIRST_ID, FULL)[:40], RequestLost, True),
    ],
)
def test_after_an_error_the_connection_is_closed_and_the_holds_are_true(
    gate: Gate, data: bytes, kind: type[Exception], is_held: bool
) -> None:
    gate.send()
    gate.comes(data)
    if kind is RequestLost:
        gate.far.close()

    def judge() -> None:
        while gate.judge() is None:
            pass

    with pytest.raises(kind):
        judge()
    assert not gate.channel.is_open
    assert gate.slot.server_hold == is_held


def test_an_unknown_region_is_to_be_registered_again(gate: Gate) -> None:
    gate.send()
    gate.comes(error(400, "Unable to find shared memory region: 'r'"))
    assert gate.judge() is Verdict.REGISTER_AGAIN
    assert not gate.slot.server_hold
    assert not gate.channel.is_open


def test_what_a_flight_says_of_its_time(gate: Gate) -> None:
    flight = Flight(gate.slot, 1, 5.0)
    assert 4.0 < (flight.deadline.remaining or 0) <= 5.0
    assert flight.deadline.limit == 5.0
    assert Flight(gate.slot, 1, None).deadline.remaining is None
    assert Flight(gate.slot, 1, 0.0).deadline.has_passed
    assert repr(flight) == f"<Flight of {gate.slot!r}>"


# --- the timetable --------------------------------------------------------------------


def flights(*limits: float | None) -> list[Flight]:
    slot: Any = NOTHING
    return [Flight(slot, 1, limit) for limit in limits]


def test_without_limits_there_is_no_time_to_look() -> None:
    table = Timetable()
    (flight,) = flights(None)
    table.note(flight)
    assert table.remaining is None
    assert table.overdue([flight]) == []
    assert table.next == math.inf


def test_the_first_limit_is_the_time_to_look() -> None:
    table = Timetable()
    made = flights(30.0, 10.0, None, 20.0)
    for flight in made:
        table.note(flight)
    assert table.next == made[1].when
    assert 9.0 < (table.remaining or 0) <= 10.0
    assert table.overdue(made) == []


def test_those_whose_time_is_up_are_told_and_the_next_is_looked_for() -> None:
    table = Timetable()
    made = flights(0.0, 10.0, 0.0, None)
    for flight in made:
        table.note(flight)
    assert table.remaining == 0
    assert table.overdue(made) == [made[0], made[2]]
    assert table.next == made[1].when
    # The others are there no more.
    assert table.overdue([made[1], made[3]]) == []


def test_a_look_in_vain_is_not_repeated() -> None:
    table = Timetable()
    gone, later = flights(0.0, 10.0)
    table.note(gone)
    table.note(later)
    assert table.overdue([later]) == []
    assert table.next == later.when
    assert table.overdue([]) == []
    assert str(table).startswith("<Timetable: next look in ")


def test_a_limit_is_kept_to_the_millisecond() -> None:
    table = Timetable()
    (flight,) = flights(0.02)
    table.note(flight)
    deadline = Deadline(LONG)
    while not (overdue := table.overdue([flight])):
        assert not deadline.has_passed
        time.sleep(table.remaining or 0)
    assert overdue == [flight]
    assert 0 <= time.monotonic() - flight.when < LONG
