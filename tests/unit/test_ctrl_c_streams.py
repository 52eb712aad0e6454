"""Ctrl-C at every moment of a stream: it ends, no slot is lost, no value is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from shmlane import Session, gathering
from tests.polling import eventually
from tests.unit.flowing import (
    Pair,
    engine_of,
    fill,
    flowing,
    is_free,
    is_idle,
    number_of,
    open_descriptors,
)
from tests.unit.interleaving import CtrlC, every

SLOTS = 2
ITEMS = range(2)

# Ctrl-C may come between the making of a thing and the statement that would end it;
# then its finaliser does, and says so. What is raised while a stream is dropped, Python
# drops too.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <generator"
        ":pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(params=["system", "wire", "replies waited for together"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    memory = request.param
    if memory not in ("system", "wire"):
        memory = "system"
        monkeypatch.setattr(gathering, "_LEAST_IN_FLIGHT", SLOTS)
        monkeypatch.setattr(gathering, "_PART", 1)
        monkeypatch.setattr(gathering, "_QUICK", 1e9)
    with flowing(slots=SLOTS, memory=memory) as pair:
        yield pair


def run(session: Session) -> None:
    stream = session.stream(ITEMS, write=fill, read=number_of)
    for count, value in enumerate(stream):
        assert value == count


def leave(session: Session) -> None:
    with session.stream(ITEMS, write=fill, read=number_of) as stream:
        assert next(stream) == 0


def lack(session: Session) -> None:
    """A stream that waits for the slot of somebody else."""
    with session.lease():
        run(session)


def all_slots_serve(session: Session, first: float) -> None:
    eventually(lambda: is_free(session), lambda: repr(session))
    numbers = [first, first + 1]
    assert list(session.stream(numbers, write=fill, read=number_of)) == numbers


@pytest.mark.parametrize("use", [run, leave, lack])
def test_ctrl_c_at_any_moment_loses_no_slot(
    pair: Pair, use: Callable[[Session], None]
) -> None:
    _, session = pair
    use(session)
    # The server has accepted both connections by then.
    all_slots_serve(session, 0)
    is_idle(session)
    before, threads = open_descriptors(), threading.active_count()
    moments = every(lambda moment: CtrlC(lambda: use(session), moment))
    for number, _ in enumerate(moments):
        assert not engine_of(session).fairness.lacking
        all_slots_serve(session, number)
    assert session.stats().spare_slots == 0
    is_idle(session)
    eventually(lambda: open_descriptors() <= before, "descriptors are closed")
    eventually(lambda: threading.active_count() <= threads, "threads have ended")
