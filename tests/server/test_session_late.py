"""Callers that give up: the slot is kept until the server has let go of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import (
    InferTimeout,
    LeaseBusy,
)
from shmlane.server import TritonServer
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import (
    all_free,
    asking,
    fill,
    frame,
    open_sink,
    registered,
    sink,
    stopped,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")

# --- a caller that gives up -----------------------------------------------------------


def test_a_late_reply_frees_its_slot_and_is_nobodys_answer(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        sink(session, 1)
        with stopped(own_server):
            with session.lease() as lease:
                fill(lease, 2)
                error = given_up(lambda limit: lease.infer(timeout=limit))
                assert "no complete reply" in str(error)
                assert session.stats().in_flight == 1
            stats = session.stats()
            assert (stats.late, stats.free) == (1, 1)
            assert "1 late" in repr(session)
            # The other slot is not kept from anybody.
            with session.lease() as other:
                fill(other, 3)
        assert all_free(session).late_replies == 1
        for value in (4, 5, 6):
            assert sink(session, value) == value


def test_a_lease_that_waits_for_a_late_reply_is_not_usable(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as session:
        with stopped(own_server), session.lease() as lease:
            fill(lease, 2)
            given_up(lambda limit: lease.infer(timeout=limit))
            for use in (
                lambda: lease["INPUT__0"],
                lambda: lease.view("INPUT__0", (1, 1, 1, 8)),
                lambda: lease.write("INPUT__0", frame(1)),
                lease.infer,
            ):
                with pytest.raises(LeaseBusy, match="still waits for the reply"):
                    use()
        assert sink(session, 3) == 3
        all_free(session)


def test_views_of_a_late_slot_keep_it_pinned_after_the_reply(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as session:
        with stopped(own_server):
            lease = session.lease()
            view = lease["INPUT__0"]
            view[...] = 7
            given_up(lambda limit: lease.infer(timeout=limit))
            lease.release()
        eventually(lambda: session.stats().late_replies == 1)
        assert session.stats().pinned == 1
        assert sink(session, 8) == 8
        assert (view == 7).all()
        del view
        all_free(session)


def test_late_slots_come_back_all_at_once(own_server: TritonServer) -> None:
    def give_up(number: int) -> None:
        with session.lease() as lease:
            fill(lease, number)
            given_up(lambda limit: lease.infer(timeout=limit), limit=0.2)

    with open_sink(own_server, slots=8) as session:
        session.warmup()
        with stopped(own_server), ThreadPoolExecutor(8) as pool:
            list(pool.map(give_up, range(8)))
            assert session.stats().late == 8
        assert all_free(session).late_replies == 8
        assert sink(session, 9) == 9


def test_one_limit_covers_every_part_of_a_call(own_server: TritonServer) -> None:
    with open_sink(own_server, slots=1) as session, stopped(own_server):
        started = time.monotonic()
        with pytest.raises(InferTimeout):
            session.infer({"INPUT__0": frame(1)}, timeout=0.2)
        # A limit of its own for each part would be the session's 30 seconds.
        assert time.monotonic() - started < 10
    assert session.stats().late == 0


def test_closing_waits_for_late_replies(own_server: TritonServer) -> None:
    session = open_sink(own_server)
    with stopped(own_server):
        with session.lease() as lease:
            fill(lease, 2)
            given_up(lambda limit: lease.infer(timeout=limit))
        closing = threading.Thread(target=session.close)
        closing.start()
        eventually(lambda: "closed" in repr(session))
        assert closing.is_alive()
    closing.join()
    assert not registered(own_server)


def test_a_request_in_flight_ends_well_while_its_session_closes(
    own_server: TritonServer,
) -> None:
    session = open_sink(own_server)
    with stopped(own_server), asking(session, 5) as answer:
        closing = threading.Thread(target=session.close)
        closing.start()
        eventually(lambda: "closed" in repr(session))
        os.kill(own_server.pid, signal.SIGCONT)
        assert answer.result() == 5
    closing.join()


# --- Ctrl-C ---------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(when: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C in this thread as soon as `when()` is true; it must come out as itself."""
    target = threading.get_ident()

    def press() -> None:
        eventually(when)
        signal.pthread_kill(target, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


def test_ctrl_c_during_an_inference_sets_the_slot_aside(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as session:
        sink(session, 1)
        with stopped(own_server):
            with session.lease() as lease:
                fill(lease, 2)
                with interrupted(lambda: session.stats().in_flight == 1):
                    lease.infer()
            assert session.stats().lost == 1
        assert all_free(session).drains == 1
        for value in (3, 4, 5):
            assert sink(session, value) == value


def test_ctrl_c_during_a_registration_leaves_its_reply_to_nobody(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as session, session.lease() as lease:
        fill(lease, 1)
        lease.infer()
        before = session.stats()
        lease.view("INPUT__0", (1, 1, 1, 5000))[...] = 2
        with stopped(own_server):
            with interrupted(
                lambda: session.stats().registrations > before.registrations
            ):
                lease.infer()
            with pytest.raises(InferTimeout, match="nothing was sent"):
                lease.infer(timeout=0.05)
            # On the old connection a reply is still to come.
            assert session.stats().connections == before.connections + 1
        assert lease.infer()["OUTPUT__0"] == [2]
