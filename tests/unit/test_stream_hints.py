"""What a caller is told who waits for a slot that a stream of the same thread has."""

from __future__ import annotations

import threading

import pytest

from shmlane import LeaseTimeout, upcoming
from tests.unit.flowing import Gates, fill, flowing, item, number_of

_NO_TIME = 0.01


@pytest.fixture(autouse=True)
def quick_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots are in flight, however long a busy machine takes over the items."""
    monkeypatch.setattr(upcoming, "_SLOW", 60.0)


def all_shut_but_the_first() -> Gates:
    """Of nine items one is answered: those that were sent after it have their slots."""
    gates = Gates()
    for number in range(1, 9):
        gates.shut(float(number))
    return gates


def test_a_loop_that_waits_for_the_slots_of_its_own_stream_is_told_so() -> None:
    gates = all_shut_but_the_first()
    with flowing(slots=2, gates=gates) as (_, session):
        stream = session.stream(range(9), write=fill, read=number_of)
        assert next(stream) == 0
        told = r"loop over a stream, which has 2 of them .* in_flight=1\)"
        with pytest.raises(LeaseTimeout, match=told):
            session.infer(item(1), timeout=_NO_TIME)
        gates.open_all()
        assert list(stream) == list(range(1, 9))


def test_a_stream_is_not_blamed_for_slots_that_others_have() -> None:
    with flowing(slots=2) as (_, session):
        stream = session.stream(range(9), write=fill, read=number_of, in_flight=1)
        assert list(stream) == list(range(9))
        wants = pytest.raises(LeaseTimeout, match="Release leases sooner")
        with session.lease(), session.lease(), wants:
            session.lease(timeout=0)


def test_another_thread_is_told_what_it_can_do_itself() -> None:
    errors: list[LeaseTimeout] = []
    gates = all_shut_but_the_first()

    with flowing(slots=2, gates=gates) as (_, session):
        stream = session.stream(range(9), write=fill, read=number_of)
        assert next(stream) == 0

        def ask() -> None:
            with pytest.raises(LeaseTimeout) as told:
                session.lease(timeout=_NO_TIME)
            errors.append(told.value)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert "Release leases sooner" in str(errors[0])
        gates.open_all()
        assert list(stream) == list(range(1, 9))


def test_a_session_of_one_slot_is_told_to_have_more() -> None:
    gates = all_shut_but_the_first()
    with flowing(slots=1, gates=gates) as (_, session):
        stream = session.stream(range(9), write=fill, read=number_of)
        assert next(stream) == 0
        with pytest.raises(LeaseTimeout, match=r"slots=2\) and in_flight=1"):
            session.lease(timeout=_NO_TIME)
        gates.open_all()
        assert list(stream) == list(range(1, 9))
