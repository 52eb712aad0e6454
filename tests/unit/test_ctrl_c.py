"""Ctrl-C at every moment of using a session: no slot is lost, and none is had twice."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest

from shmlane import Session, Timeouts
from shmlane.testing import ScriptedServer, identity_model
from tests.polling import eventually
from tests.unit.interleaving import CtrlC, every, is_finaliser

SLOTS = 2
ROW = np.full((1, 1, 1, 8), 7.0, np.float32)


@pytest.fixture
def session() -> Iterator[Session]:
    with (
        ScriptedServer([identity_model()]) as server,
        Session(
            server.url, "identity", slots=SLOTS, timeouts=Timeouts(lease=10.0)
        ) as session,
    ):
        yield session


def fill_and_release(session: Session) -> None:
    with session.lease() as lease:
        (name,) = session.metadata.inputs
        lease.write(name, ROW)


def infer(session: Session) -> None:
    (name,) = session.metadata.inputs
    session.infer({name: ROW})


def infer_in_a_loop(session: Session) -> None:
    """The views of each result live into the next lease."""
    (name,) = session.metadata.inputs
    kept: object = None
    for _ in range(2):
        with session.lease() as lease:
            lease.write(name, ROW)
            kept = dict(lease.infer())
    del kept


# Ctrl-C may come between the making of a thing and the statement that would end it;
# then its finaliser does, and says so.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("use", [fill_and_release, infer, infer_in_a_loop])
def test_ctrl_c_at_any_moment_of_use_loses_no_slot(
    session: Session, use: Callable[[Session], object]
) -> None:
    use(session)
    for _ in every(lambda moment: CtrlC(lambda: use(session), moment)):
        eventually(lambda: session.stats().free == SLOTS, lambda: repr(session))
        leases = [session.lease() for _ in range(SLOTS)]
        assert len({id(lease._slot) for lease in leases}) == SLOTS
        for lease in leases:
            lease.release()
    assert session.stats().spare_slots == 0
    (output,) = session.infer({next(iter(session.metadata.inputs)): ROW}).values()
    assert output.tolist() == ROW.tolist()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_signals_at_any_time_lose_no_slot(session: Session) -> None:
    def press_soon() -> None:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 * random.randint(20, 200))

    def press(_number: int, frame: FrameType | None) -> None:
        # Python drops what is raised in a finaliser.
        if is_finaliser(frame):
            press_soon()
        else:
            raise KeyboardInterrupt

    interruptions = 0
    before = signal.signal(signal.SIGALRM, press)
    gc.disable()
    try:
        while interruptions < 2000:
            try:
                press_soon()
                while True:
                    fill_and_release(session)
            except KeyboardInterrupt:
                interruptions += 1
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    eventually(lambda: session.stats().free == SLOTS, lambda: repr(session))
    leases = [session.lease() for _ in range(SLOTS)]
    assert len({id(lease._slot) for lease in leases}) == SLOTS
    for lease in leases:
        lease.release()
