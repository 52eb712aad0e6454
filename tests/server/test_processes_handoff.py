"""Slots handed from one process to another: filled here, sent there, and back again."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane import (
    HandoffExpired,
    LeaseExpired,
    LeaseTimeout,
    RegionError,
    Session,
    SlotRef,
    Timeouts,
    UsageError,
)
from shmlane.header import RegionHeader
from shmlane.inventory import list_regions
from shmlane.records import State
from shmlane.server import TritonServer
from tests.others import Other, Told, other
from tests.polling import eventually
from tests.sessions import all_free, fill, frame, open_sink, registered

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def home(server: TritonServer) -> Iterator[Session]:
    with open_sink(server) as session:
        yield session
        all_free(session)


@pytest.fixture
def consumer(server: TritonServer) -> Iterator[Other]:
    """Another process with a session of its own."""
    with other() as consumer:
        consumer.ask(f"session = Session({server.http_url!r}, 'sink', slots=1).open()")
        yield consumer
        consumer.ask("session.close()")


def filled(home: Session, value: float) -> SlotRef:
    with home.lease() as lease:
        fill(lease, value)
        return lease.detach()


def ask(consumer: Other, ref: SlotRef) -> float:
    """What the consumer is answered to a slot that was handed to it."""
    answer: float = consumer.ask(f"infer(session, {str(ref)!r})")
    return answer


def files_made_by(process: Other) -> set[str]:
    return {each.name for each in list_regions() if each.pid == process.pid}


# --- there and back -------------------------------------------------------------------


def test_a_slot_filled_here_is_sent_from_there(home: Session, consumer: Other) -> None:
    for value in range(1, 20):
        assert ask(consumer, filled(home, value)) == value
    stats = all_free(home)
    assert (stats.slots, stats.lent) == (2, 0)
    assert consumer.ask("session.stats().adopted") == 0


def test_no_slot_is_registered_again_by_who_adopts_it(
    home: Session, consumer: Other, server: TritonServer
) -> None:
    before = registered(server)
    for value in range(4):
        assert ask(consumer, filled(home, value)) == value
    assert registered(server) == before
    # One connection serves all of them.
    told = consumer.ask("[session.stats().registrations, session.stats().connections]")
    assert told == [1, 2]


def test_what_travels_is_short_and_the_same_as_text(home: Session) -> None:
    ref = filled(home, 1)
    assert len(pickle.dumps(ref)) < 300
    assert pickle.loads(pickle.dumps(ref)) == ref == SlotRef.parse(str(ref))
    home.adopt(ref).release()


def test_all_slots_can_be_out_and_a_caller_gets_the_next_that_comes_back(
    home: Session, consumer: Other
) -> None:
    refs = [filled(home, value) for value in (1.0, 2.0)]
    assert home.stats().lent == 2
    with pytest.raises(LeaseTimeout, match="2 lent") as caught:
        home.lease(timeout=0.05)
    assert "other processes" in caught.value.hint
    consumer.tell(f"infer(session, {str(refs[1])!r})")
    # Nothing but the record of the slot tells that it is back.
    with home.lease(timeout=10.0) as lease:
        fill(lease, 3)
        assert lease.infer()["OUTPUT__0"] == [3]
    assert consumer.hear() == 2.0
    assert ask(consumer, refs[0]) == 1.0


def test_the_same_process_may_adopt(home: Session, server: TritonServer) -> None:
    with Session(server.http_url, "sink", slots=1) as session:
        for value in (5, 6):
            with session.adopt(filled(home, value)) as lease:
                assert session.stats().adopted == 1
                assert home.stats().lent == 1
                assert lease.infer()["OUTPUT__0"] == [value]
        all_free(home)


def test_an_adopted_lease_is_a_lease(home: Session, server: TritonServer) -> None:
    with Session(server.http_url, "sink", slots=1) as session:
        with session.adopt(filled(home, 5)) as lease:
            assert lease["INPUT__0"][0, 0, 0, 0] == 5
            assert lease.infer()["OUTPUT__0"] == [5]
            fill(lease, 8)
            assert lease.infer()["OUTPUT__0"] == [8]
        with pytest.raises(LeaseExpired):
            lease.infer()


def test_a_lease_ends_with_detach(home: Session) -> None:
    with home.lease() as lease:
        fill(lease, 2)
        result = lease.infer()
        ref = lease.detach()
        for use in (lease.infer, lease.detach, lambda: result["OUTPUT__0"]):
            with pytest.raises(LeaseExpired):
                use()
    home.adopt(ref).release()


def test_an_empty_slot_is_filled_by_who_adopts_it(
    home: Session, consumer: Other
) -> None:
    with home.lease() as lease:
        ref = lease.detach()
    with pytest.raises(Told, match="InputMissing"):
        ask(consumer, ref)
    with home.lease() as lease:
        ref = lease.detach()
    consumer.ask(f"lease = session.adopt(SlotRef.parse({str(ref)!r}))")
    consumer.ask("lease['INPUT__0'].fill(9)")
    assert consumer.ask("float(lease.infer()['OUTPUT__0'][0])") == 9
    consumer.ask("lease.release()")


def test_a_slot_goes_from_hand_to_hand_and_home(
    home: Session, consumer: Other, server: TritonServer
) -> None:
    with home.lease() as lease:
        ref = lease.detach()
    consumer.ask(f"lease = session.adopt(SlotRef.parse({str(ref)!r}))")
    consumer.ask("lease['INPUT__0'].fill(11)")
    old, ref = ref, SlotRef.parse(consumer.ask("str(lease.detach())"))
    with pytest.raises(HandoffExpired, match="another reference"):
        home.adopt(old)
    with Session(server.http_url, "sink", slots=1) as session:
        with session.adopt(ref) as lease:
            assert lease.infer()["OUTPUT__0"] == [11]
            ref = lease.detach()
        # By the home itself, in the end.
        with home.adopt(ref) as lease:
            assert lease["INPUT__0"][0, 0, 0, 0] == 11
            assert lease.infer()["OUTPUT__0"] == [11]


# --- what is refused ------------------------------------------------------------------


def test_a_reference_is_good_once(
    home: Session, consumer: Other, server: TritonServer
) -> None:
    ref = filled(home, 4)
    with Session(server.http_url, "sink", slots=1) as session:
        with session.adopt(ref) as lease:
            for adopt in (session.adopt, home.adopt):
                with pytest.raises(HandoffExpired, match="adopted"):
                    adopt(ref)
            with pytest.raises(Told, match="another process has adopted it"):
                ask(consumer, ref)
            assert lease.infer()["OUTPUT__0"] == [4]
        for adopt in (session.adopt, home.adopt):
            with pytest.raises(HandoffExpired):
                adopt(ref)
    newer = filled(home, 5)
    with pytest.raises(Told, match="HandoffExpired"):
        ask(consumer, ref)
    assert ask(consumer, newer) == 5


def test_a_reference_is_not_good_for_the_next_hand_over(server: TritonServer) -> None:
    with (
        open_sink(server, slots=1) as home,
        Session(server.http_url, "sink", slots=1) as session,
    ):
        old = filled(home, 4)
        home.adopt(old).release()
        new = filled(home, 5)
        assert (old.region, old.slot) == (new.region, new.slot)
        for adopt in (session.adopt, home.adopt):
            with pytest.raises(HandoffExpired, match="another reference"):
                adopt(old)
        with session.adopt(new) as lease:
            assert lease.infer()["OUTPUT__0"] == [5]


def test_of_many_who_adopt_at_once_one_has_it(
    home: Session, server: TritonServer
) -> None:
    with other() as one, other() as two:
        for each in (one, two):
            each.ask(f"session = Session({server.http_url!r}, 'sink', slots=1).open()")
            each.ask(
                """
def race(refs):
    got = []
    for ref in refs:
        try:
            got.append(infer(session, ref))
        except shmlane.HandoffExpired:
            got.append(None)
    return got
"""
            )
        for _ in range(10):
            refs = [str(filled(home, value)) for value in (1.0, 2.0)]
            for each in (one, two):
                each.tell(f"race({refs})")
            answers = zip(one.hear(), two.hear(), strict=True)
            assert [{a, b} for a, b in answers] == [{1.0, None}, {2.0, None}]
        for each in (one, two):
            each.ask("session.close()")


def test_what_nobody_adopts_is_taken_back(server: TritonServer) -> None:
    timeouts = Timeouts(handoff=0.05)
    with Session(server.http_url, "sink", slots=1, timeouts=timeouts) as home:
        for _ in range(3):
            with home.lease() as lease:
                lease.write("INPUT__0", frame(1))
                ref = lease.detach()
            with home.lease(timeout=10.0):
                pass
            with pytest.raises(HandoffExpired, match="was taken back"):
                home.adopt(ref)
        eventually(lambda: home.stats().free == 1)


def test_it_is_taken_back_though_nobody_looks(server: TritonServer) -> None:
    timeouts = Timeouts(handoff=0.05)
    with Session(server.http_url, "sink", slots=1, timeouts=timeouts) as home:
        with home.lease() as lease:
            lease.write("INPUT__0", frame(1))
            ref = lease.detach()
        with other() as consumer:
            consumer.ask(f"session = Session({server.http_url!r}, 'sink', slots=1)")
            consumer.ask("session.open()")

            data = Path("/dev/shm", ref.region)
            at = RegionHeader.parse(data.read_bytes()).record_offset(0) + 1
            eventually(lambda: data.read_bytes()[at] == State.HOME)
            with pytest.raises(Told, match="taken back"):
                ask(consumer, ref)
            consumer.ask("session.close()")


def test_a_slot_with_views_is_not_handed_over(home: Session) -> None:
    with home.lease() as lease:
        view = lease["INPUT__0"]
        with pytest.raises(UsageError, match="'INPUT__0'") as caught:
            lease.detach()
        assert "del view" in caught.value.hint
        view.fill(3)
        output = lease.infer()["OUTPUT__0"]
        del view
        with pytest.raises(UsageError, match="'OUTPUT__0'"):
            lease.detach()
        assert output == [3]
        del output
        ref = lease.detach()
    home.adopt(ref).release()


def test_slots_of_others_are_refused(
    home: Session, server: TritonServer, unix_server: TritonServer
) -> None:
    ref = filled(home, 1)
    for url, model in ((server.http_url, "identity"), (unix_server.unix_url, "sink")):
        with (
            Session(url, model, slots=1) as session,
            pytest.raises(UsageError, match=f"{model!r} at {url}"),
        ):
            session.adopt(ref)
    with home.adopt(ref) as lease:
        assert lease.infer()["OUTPUT__0"] == [1]


def test_nothing_is_handed_over_the_wire(home: Session, server: TritonServer) -> None:
    ref = filled(home, 1)
    with Session(server.http_url, "sink", slots=1, memory="wire") as session:
        with session.lease() as lease, pytest.raises(UsageError, match="the wire"):
            lease.detach()
        with pytest.raises(UsageError, match="the wire"):
            session.adopt(ref)
        with pytest.raises(UsageError, match="the wire"):
            session.share()
    home.adopt(ref).release()


@pytest.mark.parametrize("text", ["", "shmlane.0:0:0", "../x:0:1", "a:b", "1", "x:1:2"])
def test_what_is_no_reference_is_told(home: Session, text: str) -> None:
    with pytest.raises(UsageError, match="no reference"):
        SlotRef.parse(text)
    with pytest.raises(UsageError, match="no reference"):
        home.adopt(text)


@pytest.mark.parametrize(
    "ref", [SlotRef("shmlane.0123456789abcdef", 0, 1), SlotRef("shmlane.x", 0, 1)]
)
def test_a_region_that_is_gone_is_told(home: Session, ref: SlotRef) -> None:
    with pytest.raises((HandoffExpired, RegionError)):
        home.adopt(ref)


def test_a_slot_beyond_the_region_is_told(home: Session) -> None:
    ref = filled(home, 1)
    with pytest.raises(HandoffExpired, match="2 slots"):
        home.adopt(SlotRef(ref.region, 7, 1))
    home.adopt(ref).release()


# --- tensors that grow ----------------------------------------------------------------


def test_what_outgrew_its_block_is_handed_over_too(
    home: Session, consumer: Other
) -> None:
    for size in (4000, 9000, 4000, 20):
        with home.lease() as lease:
            lease.write("INPUT__0", frame(size, size=size))
            ref = lease.detach()
        assert ask(consumer, ref) == size
    all_free(home)


def test_what_grows_with_its_borrower_stays_so_at_home(
    server: TritonServer, consumer: Other
) -> None:
    made = files_made_by(consumer)
    with open_sink(server, slots=1) as home:
        for size in (5000, 5000, 12000, 100):
            with home.lease() as lease:
                ref = lease.detach()
            consumer.ask(f"lease = session.adopt(SlotRef.parse({str(ref)!r}))")
            consumer.ask(f"lease.view('INPUT__0', (1, 1, 1, {size})).fill({size})")
            assert consumer.ask("float(lease.infer()['OUTPUT__0'][0])") == size
            consumer.ask("lease.release()")
            with home.lease() as lease:
                lease.write("INPUT__0", frame(7, size=size))
                assert lease.infer()["OUTPUT__0"] == [7]
        # There was room already: no region was made for it.
        assert home.stats().growths == 0
        all_free(home)
        # The smaller block is gone; the larger one is the home's.
        assert len(files_made_by(consumer) - made) == 1
    assert consumer.ask("session.stats().growths") == 2
    assert files_made_by(consumer) == made


# --- what holds a slot ----------------------------------------------------------------


def test_a_view_of_the_borrower_keeps_the_slot_from_its_home(
    home: Session, server: TritonServer
) -> None:
    with Session(server.http_url, "sink", slots=1) as session:
        with session.adopt(filled(home, 6)) as lease:
            view = lease.infer()["OUTPUT__0"]
        for value in (1, 2, 3):
            with home.lease() as lease:
                fill(lease, value)
                assert lease.infer()["OUTPUT__0"] == [value]
        assert view == [6]
        assert home.stats().lent == 1
        del view
        all_free(home)


def test_a_view_keeps_the_slot_when_the_session_of_the_borrower_is_closed(
    home: Session, server: TritonServer
) -> None:
    session = Session(server.http_url, "sink", slots=1).open()
    with session.adopt(filled(home, 6)) as lease:
        view = lease.infer()["OUTPUT__0"]
    session.close()
    assert view == [6]
    assert home.stats().lent == 1
    del view, lease, session
    gc.collect()
    all_free(home)


def test_a_lease_that_is_dropped_returns_its_slot(
    home: Session, server: TritonServer
) -> None:
    with Session(server.http_url, "sink", slots=1) as session:
        lease = session.adopt(filled(home, 6))
        with pytest.warns(ResourceWarning, match="dropped without release"):
            del lease
        all_free(home)


# --- homes and borrowers that end -----------------------------------------------------


def test_a_home_that_closes_leaves_its_slots_to_who_has_them(
    server: TritonServer, consumer: Other
) -> None:
    home = open_sink(server)
    refs = [filled(home, value) for value in (3, 4)]
    consumer.ask(f"lease = session.adopt(SlotRef.parse({str(refs[0])!r}))")
    home.close()
    # Both: the one that is adopted, and the one that can be.
    assert consumer.ask("float(lease.infer()['OUTPUT__0'][0])") == 3
    assert ask(consumer, refs[1]) == 4
    consumer.ask("lease.release()")
    consumer.ask("session.close()")
    assert not Path("/dev/shm", refs[0].region).exists()
    assert not {name for name in registered(server) if refs[0].region in name}


def test_a_borrower_that_closes_returns_what_it_has_when_its_lease_ends(
    home: Session, server: TritonServer
) -> None:
    session = Session(server.http_url, "sink", slots=1).open()
    lease = session.adopt(filled(home, 3))
    session.close()
    assert home.stats().lent == 1
    lease.release()
    all_free(home)


def test_an_array_of_many_slots_round_and_round(
    server: TritonServer, consumer: Other
) -> None:
    with open_sink(server, slots=4) as home:
        for round_ in range(8):
            refs = [filled(home, round_ * 10 + n) for n in range(4)]
            answers = [ask(consumer, ref) for ref in refs]
            assert answers == [round_ * 10 + n for n in range(4)]
        all_free(home)
    assert np.all(np.array(answers) >= 70)


def test_a_lease_released_while_its_session_closes_ends_nothing_that_is_out(
    server: TritonServer,
) -> None:
    """What is lent may still come back until the close has waited for all others."""
    with Session(server.http_url, "sink", slots=1) as borrower:
        home = open_sink(server, slots=2)
        ref = filled(home, 3)
        lease = home.lease()
        with borrower.adopt(ref) as adopted:
            home._begin_to_close()
            lease.release()
            assert adopted.infer()["OUTPUT__0"] == [3]
        home.close()
    assert not Path("/dev/shm", ref.region).exists()
    assert not [name for name in registered(server) if ref.region in name]
