"""Homes, borrowers and claimants that die: slots come back, and no value is wrong."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import (
    HandoffExpired,
    InferTimeout,
    Session,
    SessionHandle,
    SlotRef,
    Timeouts,
)
from shmlane.header import RegionHeader
from shmlane.inventory import clean_up
from shmlane.server import TritonServer
from tests.others import Other, other
from tests.polling import eventually
from tests.sessions import (
    all_free,
    fill,
    open_sink,
    region_files,
    registered,
    sink,
    stopped,
)


@pytest.fixture(scope="module")
def stoppable_server() -> Iterator[TritonServer]:
    """A server that tests stop for a while."""
    with TritonServer() as server:
        yield server


@pytest.fixture(autouse=True)
def cleaned(
    no_leftovers: None, server: TritonServer, stoppable_server: TritonServer
) -> Iterator[None]:
    """What the dead had beside the slots that they shared is not what is tested."""
    yield
    for each in (server, stoppable_server):
        clean_up(only=each.http_url)


@contextlib.contextmanager
def consuming(server: TritonServer, *, infer: float = 60.0) -> Iterator[Other]:
    """Another process with a session of its own."""
    with other() as process:
        process.ask(
            f"session = Session({server.http_url!r}, 'sink', slots=1,"
            f" timeouts=Timeouts(infer={infer})).open()"
        )
        yield process


@contextlib.contextmanager
def attached(handle: SessionHandle, slots: int) -> Iterator[Other]:
    """Another process that has claimed shared slots."""
    with other() as process:
        process.ask(
            "session = Session.attach("
            f"SessionHandle.parse({str(handle)!r}), slots={slots}).open()"
        )
        yield process


def filled(home: Session, value: float) -> SlotRef:
    with home.lease() as lease:
        fill(lease, value)
        return lease.detach()


def is_in_flight(region: str, slot: int) -> bool:
    """Whether a region says that the server may write to a slot."""
    data = Path("/dev/shm", region).read_bytes()
    return data[RegionHeader.parse(data).record_offset(slot)] == 1


def assert_nothing_left(server: TritonServer, region: str) -> None:
    """Once all who used it are gone and somebody has cleaned up."""

    def is_gone() -> bool:
        clean_up(only=server.http_url)
        return not Path("/dev/shm", region).exists()

    eventually(is_gone, f"{region} is gone")
    assert not [name for name in registered(server) if region in name]


# --- borrowers ------------------------------------------------------------------------


def test_a_slot_of_a_killed_borrower_is_free_at_once(server: TritonServer) -> None:
    with open_sink(server, slots=1) as home, consuming(server) as consumer:
        ref = filled(home, 5)
        consumer.ask(f"lease = session.adopt(SlotRef.parse({str(ref)!r}))")
        assert home.stats().lent == 1
        consumer.kill()
        assert all_free(home).drains == 0
        assert sink(home, 6) == 6
        with pytest.raises(HandoffExpired):
            home.adopt(ref)


def test_a_request_of_a_killed_borrower_is_waited_for(
    stoppable_server: TritonServer,
) -> None:
    server = stoppable_server
    with open_sink(server, slots=1) as home, consuming(server) as consumer:
        ref = filled(home, 5)
        with stopped(server):
            consumer.tell(f"infer(session, {str(ref)!r})")
            eventually(lambda: is_in_flight(ref.region, ref.slot))
            consumer.kill()
            eventually(lambda: home.stats().lost == 1, "the slot is lost")
        stats = all_free(home)
        assert (stats.drains, stats.lent) == (1, 0)
        assert sink(home, 6) == 6


def test_a_late_reply_is_read_by_the_borrower_that_gave_up(
    stoppable_server: TritonServer,
) -> None:
    server = stoppable_server
    with open_sink(server, slots=1) as home, open_sink(server, infer=0.1) as borrower:
        ref = filled(home, 5)
        with stopped(server):
            lease = borrower.adopt(ref)
            with pytest.raises(InferTimeout):
                lease.infer()
            lease.release()
            assert (home.stats().lent, home.stats().free) == (1, 0)
        assert all_free(home).drains == 0
        assert borrower.stats().late_replies == 1
        assert sink(home, 6) == 6


def test_a_borrower_that_closes_with_a_late_reply_leaves_it_to_the_home(
    stoppable_server: TritonServer,
) -> None:
    server = stoppable_server
    with open_sink(server, slots=1) as home:
        borrower = open_sink(server, infer=0.1, connect=0.1)
        ref = filled(home, 5)
        with stopped(server):
            lease = borrower.adopt(ref)
            with pytest.raises(InferTimeout):
                lease.infer()
            lease.release()
            borrower.close(wait=False)
            eventually(lambda: home.stats().lost == 1, "the slot is lost")
        assert all_free(home).drains == 1
        assert sink(home, 6) == 6
        del lease, borrower


# --- homes ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_adopted", [True, False])
def test_a_slot_outlives_its_killed_home(
    server: TritonServer, is_adopted: bool
) -> None:
    with open_sink(server) as borrower, other() as home:
        home.ask(f"session = Session({server.http_url!r}, 'sink', slots=2).open()")
        home.ask("lease = session.lease()")
        home.ask("lease.write('INPUT__0', np.full((1, 1, 1, 8), 3, np.float32))")
        ref = SlotRef.parse(home.ask("str(lease.detach())"))
        if is_adopted:
            with borrower.adopt(ref) as lease:
                home.kill()
                assert lease.infer()["OUTPUT__0"] == [3]
        else:
            home.kill()
            with contextlib.suppress(HandoffExpired), borrower.adopt(ref) as lease:
                assert lease.infer()["OUTPUT__0"] == [3]
    assert_nothing_left(server, ref.region)


def test_a_session_that_opens_takes_nothing_from_a_borrower(
    server: TritonServer,
) -> None:
    with open_sink(server) as borrower, other() as home:
        home.ask(f"session = Session({server.http_url!r}, 'sink', slots=2).open()")
        home.ask("lease = session.lease()")
        home.ask("lease.write('INPUT__0', np.full((1, 1, 1, 8), 3, np.float32))")
        ref = SlotRef.parse(home.ask("str(lease.detach())"))
        with borrower.adopt(ref) as lease:
            home.kill()
            with open_sink(server) as third:
                assert sink(third, 1) == 1
                assert lease.infer()["OUTPUT__0"] == [3]
    assert_nothing_left(server, ref.region)


# --- claims ---------------------------------------------------------------------------


def test_whoever_claims_a_slot_with_a_request_of_the_dead_waits_for_it(
    stoppable_server: TritonServer,
) -> None:
    server = stoppable_server
    with open_sink(server, slots=1) as sharer:
        handle = sharer.share(slots=1)
        with attached(handle, 1) as process:
            process.ask("lease = session.lease()")
            process.ask("lease['INPUT__0'].fill(4)")
            with stopped(server):
                process.tell("lease.infer()")
                eventually(lambda: is_in_flight(handle.region, 0))
                process.kill()
                session = Session.attach(handle).open()
                assert session.stats().lost == 1
        with session:
            stats = all_free(session)
            assert stats.drains == 1
            assert sink(session, 5) == 5


def test_a_sharer_that_is_killed_takes_nothing_from_others(
    server: TritonServer,
) -> None:
    with other() as sharer:
        sharer.ask(
            f"session = Session({server.http_url!r}, 'sink', slots=1,"
            " shapes={'INPUT__0': (1, 1, 1, 8)}).open()"
        )
        handle = SessionHandle.parse(sharer.ask("str(session.share(slots=2))"))
        with Session.attach(handle) as session:
            sharer.kill()
            assert sink(session, 2) == 2
            # Cleaning finds that it is in use.
            with open_sink(server):
                assert sink(session, 3) == 3
            with Session.attach(handle) as another:
                assert sink(another, 4) == 4
    assert_nothing_left(server, handle.region)


# --- all at once ----------------------------------------------------------------------

DECODER = """
import itertools
count = itertools.count({first})
def next_ref():
    value = next(count)
    with session.lease(timeout=20.0) as lease:
        lease['INPUT__0'].fill(value)
        return [value, str(lease.detach())]
"""
CONSUMER = """
def check(value, ref):
    try:
        got = infer(session, ref)
    except shmlane.HandoffExpired:
        return None
    assert got == value, (got, value)
    return got
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_decoder_fills_and_consumers_send_and_any_may_be_killed(
    server: TritonServer, seed: int
) -> None:
    """Frames are lost with the dead, as they must be; none is taken for another."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as running, open_sink(server, slots=1) as sharer:
        handle = sharer.share(slots=6)

        def start_decoder(first: int) -> Other:
            decoder = running.enter_context(attached(handle, 3))
            decoder.ask(DECODER.format(first=first))
            return decoder

        def start_consumer() -> Other:
            consumer = running.enter_context(consuming(server))
            consumer.ask(CONSUMER)
            return consumer

        decoder, consumers = start_decoder(0), [start_consumer(), start_consumer()]
        answered, value = 0, 0
        victims = [chance.randrange(5, 20) for _ in range(3)]
        for turn in range(60):
            which = turn % 2
            value, ref = decoder.ask("next_ref()")
            consumers[which].tell(f"check({value}, {ref!r})")
            if turn % 20 == victims[turn // 20]:
                if chance.random() < 0.3:
                    decoder.kill()
                    decoder = start_decoder(value + 1)
                    answered += consumers[which].hear() == value
                else:
                    consumers[which].kill()
                    consumers[which] = start_consumer()
                continue
            answer = consumers[which].hear()
            assert answer == value
            answered += 1
        assert answered >= 57
        decoder.ask("session.close()")
        for consumer in consumers:
            consumer.ask("session.close()")
        with Session.attach(handle, slots=6) as session:
            all_free(session)
            assert [sink(session, each) for each in range(6)] == list(range(6))
    assert_nothing_left(server, handle.region)
    assert Path("/dev/shm", handle.region) not in region_files()


def test_a_stopped_borrower_keeps_its_slot(server: TritonServer) -> None:
    # Not dead: whatever it does when it goes on, it does to memory of its own.
    limit = 0.05
    timeouts = Timeouts(handoff=limit)
    with (
        Session(server.http_url, "sink", slots=1, timeouts=timeouts) as home,
        consuming(server) as consumer,
    ):

        def detach() -> SlotRef:
            with home.lease() as lease:
                lease.view("INPUT__0", (1, 1, 1, 8)).fill(9)
                return lease.detach()

        consumer.adopt(detach)
        consumer.signal(signal.SIGSTOP)
        try:
            # It is not taken back, though the time to adopt it is over.
            time.sleep(2 * limit)
            assert home.stats().lent == 1
        finally:
            consumer.signal(signal.SIGCONT)
        assert consumer.ask("float(lease.infer()['OUTPUT__0'][0])") == 9
        consumer.ask("lease.release()")
        all_free(home)
        consumer.ask("session.close()")
