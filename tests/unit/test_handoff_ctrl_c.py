"""Ctrl-C, finalisers and threads in the middle of handing slots over: none is lost."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import (
    HandoffExpired,
    Lease,
    PoolClosed,
    Session,
    SlotRef,
    Timeouts,
    borrowing,
    loans,
    session_base,
)
from shmlane.claims import Hold, SlotLocks
from shmlane.testing import ScriptedServer, sink_model
from tests.polling import eventually
from tests.unit import interleaving
from tests.unit.interleaving import CtrlC, Halt, every
from tests.unit.one_slot import files_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm"),
    # Interrupted between the making of a thing and the statement that would end it,
    # its finaliser ends it, and says so.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHAPES = {"INPUT__0": (1, 1, 1, 4)}
# Long enough to be adopted; what Ctrl-C kept from being handed out is back soon.
TIMEOUTS = Timeouts(handoff=0.01, lease=10.0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([sink_model()]) as server:
        yield server


@pytest.fixture
def home(server: ScriptedServer) -> Iterator[Session]:
    with Session(
        server.url, "sink", slots=2, shapes=SHAPES, timeouts=TIMEOUTS
    ) as session:
        yield session


@pytest.fixture
def borrower(server: ScriptedServer) -> Iterator[Session]:
    with Session(server.url, "sink", slots=1) as session:
        yield session


def in_time(pass_on: Callable[[], None]) -> None:
    """Again where the time to adopt was over: this thread may not have run then."""
    while True:
        with contextlib.suppress(HandoffExpired):
            pass_on()
            return


def filled(home: Session, value: float) -> SlotRef:
    with home.lease() as lease:
        lease["INPUT__0"].fill(value)
        return lease.detach()


def lend(home: Session, _: Session) -> None:
    filled(home, 1)


def lend_and_borrow(home: Session, borrower: Session) -> None:
    with borrower.adopt(filled(home, 5)) as lease:
        assert lease.infer()["OUTPUT__0"] == [5]


def lend_and_take_back(home: Session, _: Session) -> None:
    with home.adopt(filled(home, 6)) as lease:
        assert lease.infer()["OUTPUT__0"] == [6]


def hand_on(home: Session, borrower: Session) -> None:
    with borrower.adopt(filled(home, 7)) as lease:
        ref = lease.detach()
    with home.adopt(ref) as lease:
        assert lease.infer()["OUTPUT__0"] == [7]


def keep_a_view(home: Session, borrower: Session) -> None:
    with borrower.adopt(filled(home, 8)) as lease:
        view = lease.infer()["OUTPUT__0"]
    assert view == [8]


@pytest.mark.parametrize(
    "use", [lend, lend_and_borrow, lend_and_take_back, hand_on, keep_a_view]
)
def test_ctrl_c_at_any_moment_loses_no_slot(
    home: Session, borrower: Session, use: Callable[[Session, Session], None]
) -> None:
    def run() -> None:
        in_time(lambda: use(home, borrower))

    run()
    moments = 0
    for _ in every(lambda at: CtrlC(run, at)):
        moments += 1
        # What Ctrl-C stopped goes on with whatever is asked next.
        eventually(lambda: borrower.stats().adopted == 0)
        eventually(lambda: home.stats().free == 2, lambda: repr(home.stats()))
        assert borrower.stats().free == 1
    assert moments > 60
    for _ in range(3):
        in_time(lambda: lend_and_borrow(home, borrower))
    eventually(lambda: home.stats().free == 2)


def test_ctrl_c_at_any_moment_of_adopting_leaves_the_slot_as_it_was(
    server: ScriptedServer, borrower: Session
) -> None:
    """Its home knows what the server has, and nothing is registered anew."""

    def adopt(at: int) -> CtrlC:
        with Session(server.url, "sink", slots=1, shapes=SHAPES) as home:
            borrower.adopt(filled(home, 1)).release()
            with home.lease() as lease:
                lease.view("INPUT__0", (1, 1, 1, 2000)).fill(2)
                lease.infer()
            ref = filled(home, 3)
            known = dict(server.regions)
            moment = CtrlC(lambda: borrower.adopt(ref), at)
            if home.stats().lent:
                # Stopped before it had begun.
                borrower.adopt(ref).release()
            with borrower.adopt(filled(home, 4)) as lease:
                assert lease.infer()["OUTPUT__0"] == [4]
            assert server.regions == known
        return moment

    assert len(list(every(adopt))) > 100


def test_a_session_that_closes_at_any_moment_of_an_adoption_keeps_the_slot_or_not(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that comes of it has its slot alone, and gives it back."""
    traced = {each.__file__ for each in (borrowing, loans, session_base)}
    monkeypatch.setattr(interleaving, "_TRACED", traced)

    def adopt(borrower: Session, ref: SlotRef) -> Lease | None:
        with contextlib.suppress(PoolClosed):
            return borrower.adopt(ref)
        return None

    with Session(server.url, "sink", slots=1, shapes=SHAPES) as owner:

        def halted(at: int) -> Halt[Lease | None]:
            borrower = Session(server.url, "sink", slots=1).open()
            ref = filled(owner, 1)
            with Halt(lambda: adopt(borrower, ref), at) as adoption:
                borrower.close(wait=False)
            lease = adoption.result or owner.adopt(ref)
            assert owner.stats().free == 0
            lease.release()
            borrower.close()
            eventually(lambda: owner.stats().free == 1)
            return adoption

        assert len(list(every(halted))) > 20


def test_ctrl_c_at_any_moment_of_claiming_leaves_the_slot_to_others(
    home: Session,
) -> None:
    handle = home.share(slots=1)

    def claim() -> None:
        with Session.attach(handle) as session, session.lease() as lease:
            lease["INPUT__0"].fill(3)
            assert lease.infer()["OUTPUT__0"] == [3]

    moments = 0
    locks = SlotLocks.of(f"/dev/shm/{handle}")
    for _ in every(lambda at: CtrlC(claim, at)):
        moments += 1
        if locks.is_taken(0, Hold.HOME):
            # What the collector has yet to find has its claim until then.
            gc.collect()
        assert not locks.is_taken(0, Hold.HOME)
    assert moments > 200
    claim()


def test_ctrl_c_at_any_moment_of_sharing_leaves_nothing_behind(
    server: ScriptedServer, home: Session
) -> None:
    for _ in every(lambda at: CtrlC(lambda: home.share(slots=2), at)):
        pass
    handle = home.share(slots=1)
    with Session.attach(handle) as session, session.lease() as lease:
        lease["INPUT__0"].fill(4)
        assert lease.infer()["OUTPUT__0"] == [4]
    home.close()
    gc.collect()
    assert not server.regions
    assert not files_of(server)


def test_threads_lend_and_borrow_without_end(
    server: ScriptedServer, borrower: Session
) -> None:
    with Session(server.url, "sink", slots=2, shapes=SHAPES) as home:

        def work(first: int) -> None:
            for value in range(first, first + 60):
                ref = filled(home, value)
                with borrower.adopt(ref) as lease:
                    assert lease.infer()["OUTPUT__0"] == [value]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(0, 400, 100)))
        eventually(lambda: home.stats().free == 2)
        assert borrower.stats().adopted == 0
