"""Ctrl-C at every moment of submitting, and of what becomes of futures and results."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator

import pytest

from shmlane import Session
from tests.polling import eventually
from tests.unit.flowing import (
    LIMIT,
    Pair,
    answer,
    fill,
    flowing,
    is_free,
    is_idle,
    item,
    owned,
    value_of,
)
from tests.unit.interleaving import CtrlC, every

SLOTS = 2

# Ctrl-C may come between the making of a thing and the statement that would end it;
# then its finaliser does, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(params=["system", "wire"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with flowing(slots=SLOTS, memory=request.param) as pair:
        yield pair


def submit(session: Session) -> None:
    assert answer(session.submit(item(1))) == 1


def submit_a_lease(session: Session) -> None:
    with owned(session, 1).result(LIMIT) as result:
        assert value_of(result) == 1


def cancel(session: Session) -> None:
    future = session.submit(item(1))
    future.cancel()


def let_go_of_a_result(session: Session) -> None:
    future = owned(session, 1)
    concurrent.futures.wait([future], LIMIT)
    future.result().release()


def use_a_lease_again(session: Session) -> None:
    """A lease that was interrupted in submit is not used without its slot."""
    with session.lease() as lease:
        fill(lease, 1)
        try:
            future = lease.submit()
        except KeyboardInterrupt:
            if lease._slot is not None:
                assert lease.held is lease._slot
            raise
    concurrent.futures.wait([future], LIMIT)


def all_slots_serve(session: Session, value: float) -> None:
    eventually(lambda: is_free(session), lambda: repr(session))
    futures = [session.submit(item(value + each)) for each in range(SLOTS)]
    assert [answer(future) for future in futures] == [value, value + 1]
    eventually(lambda: is_free(session), lambda: repr(session))


@pytest.mark.parametrize(
    "use",
    [submit, submit_a_lease, cancel, let_go_of_a_result, use_a_lease_again],
)
def test_ctrl_c_at_any_moment_loses_no_slot(
    pair: Pair, use: Callable[[Session], None]
) -> None:
    _, session = pair
    use(session)
    moments = every(lambda moment: CtrlC(lambda: use(session), moment))
    for number, _ in enumerate(moments):
        all_slots_serve(session, number)
    assert session.stats().spare_slots == 0
    is_idle(session)
    assert "0 futures" in repr(session._ensure_open().receiver)
