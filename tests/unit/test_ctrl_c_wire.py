"""Ctrl-C at every moment of a session over the wire, of BYTES, and of learning sizes.

No slot is lost, nothing of an interrupted call is sent by the next, and no file and no
registration is left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmlane import RequestOptions, Session, regions
from tests.polling import eventually
from tests.unit.asked import doubling, session_on, words
from tests.unit.interleaving import CtrlC, every
from tests.unit.one_slot import files_of

SLOTS = 2
STALE = np.full(8, 7.0, np.float32)
OWN_ID = RequestOptions(id="mine")

# Ctrl-C may come between the making of a thing and the statement that would end it;
# then its finaliser does, and says so.
# Where `any` ends a generator early, Python drops what is raised in that.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <generator"
        ":pytest.PytestUnraisableExceptionWarning"
    ),
]


def infer(session: Session) -> None:
    session.infer({"X": STALE})


def infer_with_an_id(session: Session) -> None:
    session.infer({"X": STALE}, options=OWN_ID)


def fill_and_infer(session: Session) -> None:
    with session.lease() as lease:
        lease.write("X", STALE)
        lease.infer()


def learn(session: Session) -> None:
    """Once over the wire and once through a block that has to grow."""
    for _ in range(2):
        session.infer({"X": STALE})


def all_slots_serve(session: Session, value: float) -> None:
    eventually(lambda: session.stats().free == SLOTS, lambda: repr(session))
    leases = [session.lease() for _ in range(SLOTS)]
    assert len({id(lease._slot) for lease in leases}) == SLOTS
    for number, lease in enumerate(leases):
        slot = lease._slot
        assert slot is not None
        assert slot.inputs["X"].lent is None
        lease.write("X", np.full(3 + number, value, np.float32))
        assert lease.infer()["Y"].tolist() == [2 * value] * (3 + number)
        lease.release()


@pytest.mark.parametrize("use", [infer, infer_with_an_id, fill_and_infer])
def test_ctrl_c_at_any_moment_over_the_wire(use: Callable[[Session], None]) -> None:
    with session_on(doubling(), memory="wire", slots=SLOTS) as (server, session):
        use(session)
        for number, _ in enumerate(
            every(lambda moment: CtrlC(lambda: use(session), moment))
        ):
            all_slots_serve(session, number)
        assert session.stats().spare_slots == 0
        assert (server.regions, files_of(server)) == ({}, [])


@pytest.mark.parametrize("use", [infer_with_an_id, learn])
def test_ctrl_c_at_any_moment_through_shared_memory(
    use: Callable[[Session], None],
) -> None:
    with session_on(doubling(), slots=SLOTS, shapes={"X": (8,)}) as (server, session):
        for number, _ in enumerate(
            every(lambda moment: CtrlC(lambda: use(session), moment))
        ):
            all_slots_serve(session, number)
        assert session.stats().spare_slots == 0
        session.close()
        assert (server.regions, files_of(server)) == ({}, [])


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_ctrl_c_at_any_moment_with_bytes(memory: str) -> None:
    with session_on(words(), memory=memory, rerun=True) as (_, session):
        for number, _ in enumerate(
            every(lambda moment: CtrlC(lambda: session.infer({"W": ["old"]}), moment))
        ):
            eventually(lambda: session.stats().free == 1, lambda: repr(session))
            given = [b"%d" % number, b"x"]
            assert session.infer({"W": given})["W_OUT"].tolist() == given


@pytest.mark.long
def test_ctrl_c_at_any_moment_of_opening_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor is there anybody else's memory that would be looked at.
    monkeypatch.setattr(regions, "SHM_DIRECTORY", str(tmp_path))
    with session_on(doubling(), memory="wire") as (server, _):

        def use(memory: str) -> None:
            with Session(server.url, "doubling", memory=memory, slots=1) as session:
                session.infer({"X": STALE})

        for _ in every(lambda moment: CtrlC(lambda: use("wire"), moment)):
            assert (server.regions, files_of(server)) == ({}, [])
