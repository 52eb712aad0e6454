"""What a lease promises: its data, its end, and slots that views hold."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import (
    InputMissing,
    Lease,
    LeaseExpired,
    LeaseTimeout,
    OutOfSharedMemory,
    PoolClosed,
    RegionOptions,
    Result,
    Session,
    TensorMismatch,
    Timeouts,
    UnknownTensor,
    UsageError,
)
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import Array, all_free, frame, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")

SHAPE = (1, 1, 1, 8)


@contextlib.contextmanager
def open_sink(
    server: TritonServer, *, slots: int = 2, lease: float | None = 5.0
) -> Iterator[Session]:
    """A session whose slots must all be free at its end."""
    with Session(
        server.http_url,
        "sink",
        slots=slots,
        shapes={"INPUT__0": SHAPE},
        timeouts=Timeouts(lease=lease),
    ) as session:
        yield session
        all_free(session)


def ask(lease: Lease, value: float) -> Result:
    lease["INPUT__0"][...] = value
    return lease.infer()


def hold_output(session: Session, value: float) -> Array:
    """The output view of a lease that has ended."""
    with session.lease() as lease:
        return ask(lease, value)["OUTPUT__0"]


def hammer(session: Session, times: int = 100) -> None:
    """Many leases that write to all they get."""
    for value in range(times):
        with session.lease() as lease:
            result = ask(lease, -value)
            assert result["OUTPUT__0"] == [-value]
            result["OUTPUT__0"][...] = -1e9


# --- one lease ------------------------------------------------------------------------


def test_a_second_infer_sends_the_same_inputs_again(server: TritonServer) -> None:
    with open_sink(server) as session, session.lease() as lease:
        first = ask(lease, 5)
        first["OUTPUT__0"][...] = 0
        second = lease.infer()
        assert second["OUTPUT__0"] == [5]
        with pytest.raises(LeaseExpired, match=r"result has expired.*\.copy\(\)"):
            first["OUTPUT__0"]
        with pytest.raises(LeaseExpired):
            first.copy()
        assert repr(first) == "<Result expired>"
        lease["INPUT__0"][...] = 6
        assert lease.infer()["OUTPUT__0"] == [6]


def test_a_failed_infer_ends_the_earlier_result_too(
    models_server: TritonServer,
) -> None:
    with Session(models_server.http_url, "rows") as session, session.lease() as lease:
        lease["VALUES"][...] = 1
        first = lease.infer()
        lease.view("MARKS", (3, 2))
        with contextlib.suppress(Exception):
            lease.infer()
        with pytest.raises(LeaseExpired):
            first["SUMS"]


def test_a_released_lease_refuses_every_use(server: TritonServer) -> None:
    with open_sink(server) as session:
        with session.lease() as lease:
            result = ask(lease, 1)
        for use in (
            lambda: lease["INPUT__0"],
            lambda: lease.view("INPUT__0", SHAPE),
            lambda: lease.write("INPUT__0", frame(1)),
            lease.infer,
            lambda: result["OUTPUT__0"],
            result.copy,
        ):
            with pytest.raises(LeaseExpired, match="another caller"):
                use()
        lease.release()
        assert session.stats().free == 2


def test_a_lease_outlives_its_session_only_to_be_released(
    server: TritonServer,
) -> None:
    session = Session(server.http_url, "sink", shapes={"INPUT__0": SHAPE})
    lease = session.lease()
    view = lease["INPUT__0"]
    view[...] = 3
    result = lease.infer()
    session.close()
    with pytest.raises(PoolClosed, match="is closed"):
        lease.infer()
    assert (lease["INPUT__0"] == 3).all()
    with pytest.raises(PoolClosed, match="is closed"):
        lease.view("INPUT__0", (1, 1, 1, 5000))
    lease.release()
    with pytest.raises(LeaseExpired):
        result["OUTPUT__0"]
    assert (view == 3).all()


def test_a_required_input_must_be_given_in_this_lease(server: TritonServer) -> None:
    with open_sink(server, slots=1) as session:
        with session.lease() as lease:
            assert ask(lease, 7)["OUTPUT__0"] == [7]
        with (
            session.lease() as lease,
            pytest.raises(InputMissing, match=r"'INPUT__0'.*earlier caller's") as it,
        ):
            lease.infer()
        assert it.value.context["missing"] == ["INPUT__0"]
        with pytest.raises(InputMissing):
            session.infer({})


def test_an_optional_input_does_not_count_as_missing(
    models_server: TritonServer,
) -> None:
    with Session(models_server.http_url, "rows") as session:
        with session.lease() as lease:
            lease["MARKS"][...] = 1
            with pytest.raises(InputMissing) as it:
                lease.infer()
            assert it.value.context["missing"] == ["VALUES"]
        all_free(session)


def test_names_of_tensors_are_checked(server: TritonServer) -> None:
    with open_sink(server) as session, session.lease() as lease:
        for use in (
            lambda: lease["images"],
            lambda: lease.view("images", SHAPE),
            lambda: lease.write("images", frame(1)),
            lambda: session.infer({"images": frame(1)}),
        ):
            with pytest.raises(UnknownTensor, match=r"'images'.* has: 'INPUT__0'"):
                use()
        result = ask(lease, 2)
        with pytest.raises(UnknownTensor, match=r"no output 'boxes'.* 'OUTPUT__0'"):
            result["boxes"]
        assert "boxes" not in result
        assert list(result) == ["OUTPUT__0"]
        assert len(result) == 1


@pytest.mark.parametrize("shape", [(), (8,), (1, 1, 8), (1, 1, 1, 1, 8), (1, 1, 1, -8)])
def test_a_shape_that_the_model_forbids_is_refused(
    server: TritonServer, shape: tuple[int, ...]
) -> None:
    with open_sink(server) as session, session.lease() as lease:
        lease["INPUT__0"][...] = 4
        with pytest.raises(TensorMismatch, match="the model allows") as it:
            lease.view("INPUT__0", shape)
        assert it.value.context["given"] == shape
        assert it.value.context["allowed"] == (-1, -1, -1, -1)
        assert lease.infer()["OUTPUT__0"] == [4]


def test_a_dropped_lease_warns_and_comes_back(server: TritonServer) -> None:
    with open_sink(server, slots=1) as session:
        with pytest.warns(ResourceWarning, match=r"Lease.*dropped without release"):
            session.lease()
        assert sink(session, 2) == 2


# --- views that outlive their lease ---------------------------------------------------


def test_views_keep_their_content_while_other_leases_run(
    server: TritonServer,
) -> None:
    with open_sink(server, slots=3) as session:
        with session.lease() as lease:
            sent = lease["INPUT__0"]
            sent[...] = 11
            received = lease.infer()["OUTPUT__0"]
        hammer(session)
        assert session.stats().pinned == 1
        assert (sent == 11).all()
        assert received == [11]
        del sent, received


def test_a_part_of_a_view_keeps_the_whole_slot(server: TritonServer) -> None:
    with open_sink(server, slots=2) as session:
        with session.lease() as lease:
            ask(lease, 12)
            part = lease["INPUT__0"].reshape(4, 2)[1:, ::-1].T
        hammer(session)
        assert (part == 12).all()
        del part


def test_a_buffer_over_a_view_keeps_the_slot(server: TritonServer) -> None:
    with open_sink(server, slots=2) as session:
        with session.lease() as lease:
            ask(lease, 13)
            buffer = lease["INPUT__0"].data
        hammer(session)
        assert (np.asarray(buffer) == 13).all()
        del buffer


def test_views_stay_valid_after_their_session_has_closed(
    server: TritonServer,
) -> None:
    with Session(server.http_url, "sink", shapes={"INPUT__0": SHAPE}) as session:
        held = hold_output(session, 21)
        with session.lease() as lease:
            lease.view("INPUT__0", (1, 1, 1, 4000))[...] = 22
            grown = lease["INPUT__0"]
            lease.infer()
    grown[...] = 23
    with Session(server.http_url, "sink") as other:
        for size in (1, 4000, 10):
            assert sink(other, size, size=size) == size
    assert held == [21]
    assert (grown == 23).all()


def test_a_view_may_die_after_its_session_was_closed(server: TritonServer) -> None:
    # Somebody waits for the slot before, so that it is watched for the death of views.
    session = Session(
        server.http_url, "sink", slots=1, shapes={"INPUT__0": SHAPE}
    ).open()
    views = [hold_output(session, value) for value in range(2)]
    with pytest.raises(LeaseTimeout):
        session.lease(timeout=0)
    session.close()
    with warnings.catch_warnings(record=True) as caught:
        views.clear()
        gc.collect()
    assert not caught


# --- pinned slots ---------------------------------------------------------------------


def test_pinned_slots_are_replaced_once_by_spare_ones(server: TritonServer) -> None:
    with open_sink(server, slots=2) as session:
        held = [hold_output(session, value) for value in range(4)]
        stats = session.stats()
        assert (stats.spare_slots, stats.slots, stats.pinned) == (2, 4, 4)
        with pytest.raises(LeaseTimeout, match=r"4 pinned.*\.copy\(\)"):
            session.lease(timeout=0.01)
        assert [float(output[0]) for output in held] == [0, 1, 2, 3]
        assert session.stats().spare_slots == 2
        held.clear()
        hammer(session, 20)
        assert session.stats().spare_slots == 2


def test_a_waiting_lease_gets_the_slot_whose_views_die(server: TritonServer) -> None:
    with open_sink(server, slots=1) as session:
        held = [hold_output(session, value) for value in range(2)]
        with waiting(session) as served:
            assert not served.is_set()
            held.pop()
            assert served.wait(5)
        held.clear()


def test_a_waiting_lease_gets_a_spare_slot_when_views_stay(
    server: TritonServer,
) -> None:
    with open_sink(server, slots=1) as session:
        lease = session.lease()
        output = ask(lease, 31)["OUTPUT__0"]
        with waiting(session) as served:
            lease.release()
            assert served.wait(5)
        assert session.stats().spare_slots == 1
        assert output == [31]
        del output


def test_no_room_for_spare_slots_is_said(server: TritonServer) -> None:
    session = Session(
        server.http_url,
        "sink",
        slots=1,
        shapes={"INPUT__0": SHAPE},
        region=RegionOptions(max_bytes=8192),
    )
    with session:
        held = hold_output(session, 1)
        with pytest.raises(LeaseTimeout, match="1 pinned") as caught:
            session.lease(timeout=0.1)
        assert isinstance(caught.value.__cause__, OutOfSharedMemory)
        assert "its limit is 8192" in str(caught.value.__cause__)
        assert held == [1]
        del held
        assert sink(session, 2) == 2
        all_free(session)


@contextlib.contextmanager
def waiting(session: Session) -> Iterator[threading.Event]:
    """A thread that waits for a lease; the event says that it had one."""
    served = threading.Event()

    def take() -> None:
        with session.lease() as lease:
            assert ask(lease, 1)["OUTPUT__0"] == [1]
            served.set()

    waits = session.stats().waits
    thread = threading.Thread(target=take)
    thread.start()
    eventually(lambda: session.stats().waits > waits, "the thread waits for a lease")
    yield served
    thread.join()


# --- waiting --------------------------------------------------------------------------


def test_no_free_slot_within_the_limit_is_an_error(server: TritonServer) -> None:
    with open_sink(server, slots=2, lease=0.02) as session:
        with session.lease(), session.lease():
            for limit in (0, 0.02):
                with pytest.raises(LeaseTimeout, match="2 leased") as it:
                    session.lease(timeout=limit)
                assert it.value.retryable
                assert it.value.context["counts"] == {"leased": 2}
            with pytest.raises(LeaseTimeout, match=r"within 0\.02 s"):
                session.lease()
            with pytest.raises(LeaseTimeout):
                session.infer({"INPUT__0": frame(1)}, timeout=0.02)
        assert session.stats().waits == 4
        assert sink(session, 3) == 3


def test_waiting_callers_are_served_in_turn(server: TritonServer) -> None:
    served: list[int] = []

    def take(number: int) -> None:
        with session.lease(timeout=10):
            served.append(number)

    with open_sink(server, slots=1) as session:
        lease = session.lease()
        threads: list[threading.Thread] = []
        for number in range(12):
            thread = threading.Thread(target=take, args=[number])
            thread.start()
            threads.append(thread)
            eventually(lambda: session.stats().waits == len(threads))
        lease.release()
        for thread in threads:
            thread.join()
    assert served == list(range(12))


def test_closing_ends_every_wait(server: TritonServer) -> None:
    errors: list[Exception] = []

    def take() -> None:
        try:
            session.lease(timeout=30)
        except PoolClosed as error:
            errors.append(error)

    session = Session(server.http_url, "sink", slots=1).open()
    lease = session.lease()
    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: session.stats().waits == 3)
    session.close()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 3
    lease.release()


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), 1e300])
def test_what_is_no_time_limit_is_refused(server: TritonServer, limit: float) -> None:
    with open_sink(server) as session:
        with session.lease() as lease:
            lease["INPUT__0"][...] = 1
            with pytest.raises(UsageError, match="not a time limit"):
                lease.infer(timeout=limit)
        for call in (
            lambda: session.lease(timeout=limit),
            lambda: session.infer({"INPUT__0": frame(1)}, timeout=limit),
            lambda: Timeouts(infer=limit),
            lambda: Session(server.http_url, "sink").open(wait=limit),
        ):
            with pytest.raises(UsageError, match="not a time limit"):
                call()
