"""Shared slots: claimed for life by any process, registered once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmlane import (
    HandoffExpired,
    PoolClosed,
    RegionError,
    Session,
    SessionHandle,
    SlotRef,
    SlotsClaimed,
    UsageError,
)
from shmlane.cli.regions import ls
from shmlane.inventory import list_regions
from shmlane.server import TritonServer
from tests.others import Other, Told, other
from tests.polling import eventually
from tests.sessions import all_free, fill, open_sink, registered, sink
from tests.unit.children import run_python

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def sharer(server: TritonServer) -> Iterator[Session]:
    with open_sink(server, slots=1) as session:
        yield session


def attach(process: Other, handle: SessionHandle, slots: int = 1) -> None:
    process.ask(
        f"session = Session.attach(SessionHandle.parse({str(handle)!r}), slots={slots})"
    )
    process.ask("session.open()")
    process.ask(
        """
def sink(value):
    with session.lease() as lease:
        lease['INPUT__0'].fill(value)
        return float(lease.infer()['OUTPUT__0'][0])
"""
    )


def file_of(handle: SessionHandle) -> Path:
    return Path("/dev/shm", str(handle))


# --- claiming -------------------------------------------------------------------------


def test_a_handle_is_a_name_and_nothing_else(sharer: Session) -> None:
    handle = sharer.share(slots=1)
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert SessionHandle.parse(str(handle)) == handle
    assert len(pickle.dumps(handle)) < 300
    assert file_of(handle).exists()


def test_processes_that_attach_use_one_registration(
    sharer: Session, server: TritonServer
) -> None:
    handle = sharer.share(slots=3)
    before = registered(server)
    assert sum(str(handle) in name for name in before) == 3
    with other() as one, Session.attach(handle, slots=2) as two:
        attach(one, handle)
        assert one.ask("sink(3.5)") == 3.5
        assert [sink(two, value) for value in range(4)] == [0, 1, 2, 3]
        assert registered(server) == before
        assert two.stats().registrations == 0
        assert one.ask("session.stats().registrations") == 0
        assert two.stats().slots == 2
        one.ask("session.close()")
        one.end()
        all_free(two)
        assert registered(server) == before


def test_an_attached_session_is_as_the_one_that_shares(
    sharer: Session, server: TritonServer
) -> None:
    handle = sharer.share(slots=1)
    with Session.attach(handle) as session:
        assert (session.url, session.model) == (sharer.url, sharer.model)
        assert repr(session.metadata) == repr(sharer.metadata)
        assert session.metadata == sharer.metadata
        assert "sink" in repr(session)
        with session.lease() as lease:
            assert lease["INPUT__0"].shape == (1, 1, 1, 8)


def test_more_than_there_are_cannot_be_claimed(sharer: Session) -> None:
    handle = sharer.share(slots=3)
    with Session.attach(handle, slots=2):
        with pytest.raises(SlotsClaimed, match="1 of its 3 are unclaimed") as caught:
            Session.attach(handle, slots=2).open()
        assert caught.value.retryable
        assert caught.value.context["wanted"] == 2
        assert caught.value.context["unclaimed"] == 1
        assert caught.value.context["holders"] == {0: os.getpid(), 1: os.getpid()}
        # Nothing stays claimed by the one that failed.
        with Session.attach(handle, slots=1) as last:
            assert sink(last, 7) == 7
    with Session.attach(handle, slots=3) as session:
        assert sink(session, 7) == 7


def test_the_claims_of_a_killed_process_are_free_at_once(sharer: Session) -> None:
    handle = sharer.share(slots=2)
    with other() as process:
        attach(process, handle, slots=2)
        assert process.ask("sink(4)") == 4
        with pytest.raises(SlotsClaimed, match=str(process.pid)):
            Session.attach(handle).open()
        process.kill()
    with Session.attach(handle, slots=2) as session:
        assert [sink(session, value) for value in (5, 6)] == [5, 6]
        all_free(session)


def test_each_slot_has_one_holder_however_many_ask(sharer: Session) -> None:
    handle = sharer.share(slots=4)

    def try_to_claim(_: int) -> Session | None:
        try:
            return Session.attach(handle).open()
        except SlotsClaimed:
            return None

    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(try_to_claim, range(8)))
    opened = [session for session in sessions if session is not None]
    assert len(opened) == 4
    for value, session in enumerate(opened):
        with session.lease() as lease:
            fill(lease, value)
    # Nobody wrote into anybody else's.
    for value, session in enumerate(opened):
        assert sink(session, value) == value
        session.close()


def test_without_slots_a_session_only_adopts(sharer: Session) -> None:
    handle = sharer.share(slots=1)
    with Session.attach(handle, slots=0) as adopter, Session.attach(handle) as home:
        with pytest.raises(UsageError, match="claimed no slots"):
            adopter.lease()
        with home.lease() as lease:
            fill(lease, 2)
            ref = lease.detach()
        with adopter.adopt(ref) as lease:
            assert lease.infer()["OUTPUT__0"] == [2]
        all_free(home)


def test_a_process_without_a_server_fills_for_others(
    sharer: Session, server: TritonServer
) -> None:
    handle = sharer.share(slots=2)
    with other() as decoder:
        attach(decoder, handle, slots=2)
        for value in range(5):
            ref = decoder.ask(
                f"""
with session.lease() as lease:
    lease['INPUT__0'].fill({value})
    ref = str(lease.detach())
"""
            )
            ref = decoder.ask("ref")
            with sharer.adopt(SlotRef.parse(ref)) as lease:
                assert lease.infer()["OUTPUT__0"] == [value]
        assert decoder.ask("session.stats().connections") == 0
        decoder.ask("session.close()")


@pytest.mark.parametrize("slots", [-1, 1.5, "2", None])
def test_a_number_of_slots_that_cannot_be_is_refused(
    sharer: Session, slots: object
) -> None:
    handle = sharer.share(slots=1)
    with pytest.raises(UsageError, match="slots="):
        Session.attach(handle, slots=slots)  # type: ignore[arg-type]
    if slots is not None:
        with pytest.raises(UsageError, match="slots="):
            sharer.share(slots=slots)  # type: ignore[arg-type]


def test_slots_of_one_session_cannot_be_claimed(sharer: Session) -> None:
    with sharer.lease() as lease:
        ref = lease.detach()
    with pytest.raises(RegionError, match="cannot be claimed"):
        Session.attach(SessionHandle(ref.region))
    sharer.adopt(ref).release()


def test_what_is_no_handle_is_told(sharer: Session) -> None:
    for text in ("", "shmlane.x", "../../etc/passwd", "shmlane.0123456789abcdef:0:1"):
        with pytest.raises(UsageError, match="no handle"):
            SessionHandle.parse(text)
    with pytest.raises(RegionError, match="any more"):
        Session.attach(SessionHandle.parse("shmlane.0123456789abcdef"))


# --- ends -----------------------------------------------------------------------------


def test_the_last_who_uses_shared_slots_removes_them(server: TritonServer) -> None:
    sharer = open_sink(server, slots=1)
    handle = sharer.share(slots=2)
    with Session.attach(handle) as session:
        sharer.close()
        assert sink(session, 3) == 3
        with Session.attach(handle) as late:
            assert sink(late, 4) == 4
        assert sink(session, 5) == 5
        assert file_of(handle).exists()
    assert not file_of(handle).exists()
    assert not [name for name in registered(server) if str(handle) in name]
    with pytest.raises(RegionError, match="any more"):
        Session.attach(handle)


def test_shared_slots_that_nobody_claimed_go_with_who_shared_them(
    server: TritonServer,
) -> None:
    with open_sink(server, slots=1) as sharer:
        handles = [sharer.share(slots=1), sharer.share()]
        assert all(file_of(handle).exists() for handle in handles)
    assert not any(file_of(handle).exists() for handle in handles)


def test_views_of_a_closed_session_keep_its_slot_from_others(sharer: Session) -> None:
    handle = sharer.share(slots=1)
    session = Session.attach(handle).open()
    with session.lease() as lease:
        fill(lease, 6)
        view = lease.infer()["OUTPUT__0"]
    session.close()
    del session, lease
    assert view == [6]
    with pytest.raises(SlotsClaimed):
        Session.attach(handle).open()
    del view
    with Session.attach(handle) as next_:
        assert sink(next_, 7) == 7


def test_a_closed_session_hands_out_nothing(sharer: Session) -> None:
    handle = sharer.share(slots=1)
    session = Session.attach(handle).open()
    session.close()
    for use in (session.lease, session.share):
        with pytest.raises(PoolClosed):
            use()
    with pytest.raises(PoolClosed):
        session.adopt(SlotRef(str(handle), 0, 1))


def test_what_a_claimed_slot_outgrew_to_goes_with_its_session(
    sharer: Session, server: TritonServer
) -> None:
    handle = sharer.share(slots=1)
    before = registered(server)
    with Session.attach(handle) as session:
        for size in (3000, 8000):
            assert sink(session, size, size=size) == size
        assert len(registered(server) - before) == 1
    assert registered(server) == before
    with Session.attach(handle) as session:
        assert sink(session, 3) == 3


def test_a_slot_that_was_handed_over_cannot_be_adopted_after_its_home(
    sharer: Session,
) -> None:
    handle = sharer.share(slots=1)
    with Session.attach(handle) as home, home.lease() as lease:
        fill(lease, 1)
        ref = lease.detach()
    with Session.attach(handle) as home:
        with pytest.raises(HandoffExpired):
            sharer.adopt(ref)
        assert sink(home, 2) == 2


def test_a_slot_in_use_of_a_borrower_is_not_claimed(sharer: Session) -> None:
    handle = sharer.share(slots=1)
    home = Session.attach(handle).open()
    with home.lease() as lease:
        fill(lease, 1)
        ref = lease.detach()
    with sharer.adopt(ref) as lease:
        home.close()
        with pytest.raises(SlotsClaimed, match="0 of its 1"):
            Session.attach(handle).open()
        assert lease.infer()["OUTPUT__0"] == [1]
    with Session.attach(handle) as home:
        assert sink(home, 2) == 2


# --- a server that forgets ------------------------------------------------------------


def test_whoever_finds_a_registration_gone_registers_for_all(
    sharer: Session, server: TritonServer
) -> None:
    handle = sharer.share(slots=1)
    with Session.attach(handle) as home:
        assert sink(home, 1) == 1
        server.call("/v2/systemsharedmemory/unregister", {})
        with home.lease() as lease:
            fill(lease, 2)
            ref = lease.detach()
        with sharer.adopt(ref) as lease:
            assert lease.infer()["OUTPUT__0"] == [2]
        names = {name for name in registered(server) if str(handle) in name}
        assert names == {f"{handle}.0.1"}
        # The home has learned of it, and so does the next one.
        assert sink(home, 3) == 3
        assert home.stats().retries == 0
    with Session.attach(handle) as next_:
        assert sink(next_, 4) == 4
        assert next_.stats().registrations == 0


# --- ways to get there ----------------------------------------------------------------


def _work(handle: SessionHandle, value: float) -> float:
    with Session.attach(handle) as session:
        return sink(session, value)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_attach_to_the_handle_that_they_are_given(
    sharer: Session, method: str
) -> None:
    handle = sharer.share(slots=2)
    with multiprocessing.get_context(method).Pool(2) as pool:
        answers = pool.starmap(_work, [(handle, value) for value in range(6)])
        pool.close()
        pool.join()
    assert answers == list(range(6))


FORKING = """
import os, sys
import numpy as np
from shmlane import Session

def serve(session, value):
    with session, session.lease() as lease:
        lease["INPUT__0"].fill(value)
        assert lease.infer()["OUTPUT__0"] == [value]

with Session(sys.argv[1], "sink", slots=1, shapes={"INPUT__0": (1, 1, 1, 8)}) as parent:
    handle = parent.share(slots=2)
    unopened = Session.attach(handle)
    children = []
    for value in (1, 2):
        pid = os.fork()
        if not pid:
            serve(unopened, value)
            serve(Session.attach(handle), value + 10)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    serve(unopened, 3)
"""


def test_forked_workers_attach_to_what_their_parent_shares(
    server: TritonServer,
) -> None:
    assert run_python(FORKING, server.http_url) == ""


# --- telling --------------------------------------------------------------------------


def test_a_listing_tells_who_has_which_slot(
    sharer: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = sharer.share(slots=3)
    with other() as process:
        pids = ", ".join(map(str, sorted({process.pid, os.getpid()})))
        attach(process, handle)
        with Session.attach(handle) as session, session.lease() as lease:
            fill(lease, 1)
            ref = lease.detach()
            with sharer.adopt(ref):
                (info,) = (each for each in list_regions() if each.name == str(handle))
                assert info.alive
                assert info.claims == {0: process.pid, 1: os.getpid()}
                assert info.lent == {1: os.getpid()}
                ls()
                told = capsys.readouterr().out
                assert f"2 claimed by {pids}; 1 lent to {os.getpid()}" in told
        process.ask("session.close()")
        process.end()
        process_is_gone = eventually(
            lambda: next(
                not each.claims for each in list_regions() if each.name == str(handle)
            )
        )
        assert process_is_gone


def test_an_error_of_another_process_is_told(sharer: Session) -> None:
    handle = sharer.share(slots=1)
    with (
        other() as process,
        Session.attach(handle),
        pytest.raises(Told, match="SlotsClaimed"),
    ):
        attach(process, handle)


def test_the_pages_of_a_claimed_slot_are_there_from_the_beginning(
    server: TritonServer,
) -> None:
    shapes = {"INPUT__0": (1, 3, 640, 640)}
    with Session(server.http_url, "sink", slots=1, shapes=shapes) as sharer:
        handle = sharer.share(slots=2)
        with Session.attach(handle) as session, session.lease() as lease:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            fill(lease, 1)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            # 1200 pages; the interpreter needs a few of its own.
            assert faults < 300
