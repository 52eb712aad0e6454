"""One session, many threads: every answer belongs to its own request."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmlane import Connection, LeaseTimeout, Session, Timeouts
from shmlane.server import TritonServer
from tests.sessions import all_free, frame, order, region_files, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")

SHAPE = (1, 1, 4, 4)


def at_once(threads: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(threads - 1)`, all of them beginning together."""
    start = threading.Barrier(threads)

    def run(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run, number) for number in range(threads)]:
            future.result()


@pytest.mark.parametrize("threads", [16, 64])
def test_every_thread_gets_its_own_tokens_back(
    server: TritonServer, threads: int
) -> None:
    def work(number: int) -> None:
        for turn in range(3200 // threads):
            token = number * 1000 + turn
            with session.lease() as lease:
                lease["INPUT__0"][...] = token
                output = lease.infer()["OUTPUT__0"]
                assert (output == token).all()
                output[...] = -1
                # A view kept into the next lease would keep a slot from all others.
                del output

    with Session(
        server.http_url,
        "identity",
        slots=8,
        shapes={"INPUT__0": SHAPE},
        outputs={"OUTPUT__0": SHAPE},
        timeouts=Timeouts(lease=60),
    ) as session:
        at_once(threads, work)
        gc.collect()
        stats = all_free(session)
        assert stats.spare_slots in (0, 8)
        assert stats.connections <= stats.slots
        assert sink_still_right(session)


def sink_still_right(session: Session) -> bool:
    sent = np.arange(16, dtype=np.float32).reshape(SHAPE)
    received = session.infer({"INPUT__0": sent})["OUTPUT__0"]
    return bool((received == sent).all())


def test_threads_of_every_size_do_not_meet(server: TritonServer) -> None:
    def work(number: int) -> None:
        sizes = np.random.default_rng(number).integers(1, 20_000, 20)
        for turn, size in enumerate(sizes):
            token = number * 1000 + turn
            assert sink(session, token, size=int(size)) == token

    limits = Timeouts(lease=60)
    with Session(server.http_url, "sink", slots=4, timeouts=limits) as session:
        at_once(12, work)
        all_free(session)


def test_views_kept_by_threads_are_never_written_by_others(
    server: TritonServer,
) -> None:
    def work(number: int) -> None:
        kept = []
        for turn in range(30):
            token = number * 1000 + turn
            with session.lease() as lease:
                lease["INPUT__0"][...] = token
                kept.append((token, lease.infer()["OUTPUT__0"]))
            if len(kept) > 2:
                kept.pop(0)
            for expected, view in kept:
                assert view == [expected]

    with Session(
        server.http_url,
        "sink",
        slots=16,
        shapes={"INPUT__0": SHAPE},
        timeouts=Timeouts(lease=60),
    ) as session:
        at_once(8, work)
        gc.collect()
        assert all_free(session).spare_slots in (0, 16)


def test_failures_in_some_threads_leave_the_others_right(
    models_server: TritonServer,
) -> None:
    def work(number: int) -> None:
        for turn in range(10):
            token = number * 100 + turn
            if turn % 3 == 1:
                with pytest.raises(Exception, match=f"takes no -{token}"):
                    session.infer({"ORDER": order(-token)})
            reply = session.infer({"ORDER": order(token, count=turn)})["REPLY"]
            assert reply.tolist() == [token] * turn

    limits = Timeouts(lease=60)
    with Session(models_server.http_url, "moody", slots=3, timeouts=limits) as session:
        at_once(8, work)
        all_free(session)


def test_a_session_outlives_the_thread_that_opened_it(server: TritonServer) -> None:
    session = Session(server.http_url, "sink", slots=2)
    answers: list[float] = []
    for value in range(3):
        thread = threading.Thread(
            target=lambda value=value: answers.append(sink(session, value))
        )
        thread.start()
        thread.join()
    assert answers == [0, 1, 2]
    assert sink(session, 3) == 3
    assert all_free(session).connections <= 2
    session.close()


def test_a_lease_may_be_handed_to_another_thread(server: TritonServer) -> None:
    with (
        Session(server.http_url, "sink") as session,
        ThreadPoolExecutor(1) as pool,
    ):
        lease = session.lease()
        lease.write("INPUT__0", frame(5))
        output = pool.submit(lambda: float(lease.infer()["OUTPUT__0"][0]))
        assert output.result() == 5
        pool.submit(lease.release).result()
        all_free(session)


def test_opening_in_many_threads_opens_once(server: TritonServer) -> None:
    def work(number: int) -> None:
        assert sink(session, number, size=1) == number

    before, files = registered(server), region_files()
    session = Session(server.http_url, "sink", slots=3)
    at_once(8, work)
    made = {name.rsplit(".", 2)[0] for name in registered(server) - before}
    own = {path.name for path in region_files() - files if path.name in made}
    stats = all_free(session)
    # One region for the slots, and one for each slot that has grown.
    assert len(own) == 1 + stats.growths
    session.close()


def test_closing_in_many_threads_closes_once(server: TritonServer) -> None:
    before = registered(server)
    session = Session(server.http_url, "sink").open()
    sink(session, 1)
    at_once(8, lambda _: session.close())
    assert registered(server) == before


def test_callers_that_time_out_do_not_take_a_slot_with_them(
    server: TritonServer,
) -> None:
    def work(number: int) -> None:
        for turn in range(40):
            try:
                lease = session.lease(timeout=0.0005)
            except LeaseTimeout:
                continue
            with lease:
                lease["INPUT__0"][...] = number * 100 + turn
                assert lease.infer()["OUTPUT__0"] == [number * 100 + turn]

    with Session(
        server.http_url, "sink", slots=2, shapes={"INPUT__0": SHAPE}
    ) as session:
        at_once(12, work)
        gc.collect()
        all_free(session)
        with session.lease(timeout=0), session.lease(timeout=0):
            pass


def test_a_session_dropped_in_a_thread_warns_and_leaves_nothing(
    server: TritonServer,
) -> None:
    before = registered(server)

    def work() -> None:
        session = Session(server.http_url, "sink", connection=Connection())
        sink(session, 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    messages = [str(each.message) for each in caught]
    assert [each for each in messages if "dropped without close" in each] == messages
    assert len(messages) == 1
    assert registered(server) == before
