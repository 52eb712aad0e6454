"""The main path of a session: right values in place, over ports and over a socket."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from shmlane import (
    OutOfSharedMemory,
    RegionOptions,
    Session,
    TensorMismatch,
)
from shmlane.server import TritonServer
from tests.sessions import Array, all_free, frame, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture(params=["TCP", "Unix socket"])
def url(request: pytest.FixtureRequest) -> str:
    """The same server reached in each way, in turn."""
    if request.param == "TCP":
        server: TritonServer = request.getfixturevalue("server")
        return server.http_url
    unix_server: TritonServer = request.getfixturevalue("unix_server")
    return unix_server.unix_url


def images(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).random(shape, np.float32)


# --- values ---------------------------------------------------------------------------


def test_values_are_written_and_read_in_place(url: str) -> None:
    with Session(url, "identity", outputs={"OUTPUT__0": (1, 3, 16, 16)}) as session:
        sent = images((1, 3, 16, 16))
        with session.lease() as lease:
            view = lease.view("INPUT__0", sent.shape)
            view[...] = sent
            result = lease.infer()
            received = result["OUTPUT__0"]
            np.testing.assert_array_equal(received, sent)
            assert received.flags.writeable
            assert not received.flags.owndata
            assert lease["INPUT__0"].ctypes.data == view.ctypes.data
        del view, received
        assert all_free(session).leased == 0


def test_thousands_of_requests_never_see_stale_data(url: str) -> None:
    with Session(url, "sink", slots=2, shapes={"INPUT__0": (1, 1, 1, 8)}) as session:
        for value in range(2000):
            with session.lease() as lease:
                lease["INPUT__0"][...] = value
                result = lease.infer()
                output = result["OUTPUT__0"]
                assert output[0] == value
                # A request that left this as it is would answer with the value before.
                output[0] = -1
        del output
        stats = all_free(session)
        assert stats.connections <= 2
        assert stats.registrations == 2


@pytest.mark.parametrize("form", ["localhost:{}", "http://127.0.0.1:{}/"])
def test_an_address_may_be_written_in_other_ways(
    server: TritonServer, form: str
) -> None:
    url = form.format(server.http_url.rpartition(":")[2])
    with Session(url, "sink") as session:
        assert sink(session, 5) == 5


def test_sessions_of_one_model_do_not_meet(server: TritonServer) -> None:
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(Session(server.http_url, "sink", slots=2))
            for _ in range(5)
        ]
        for turn in range(4):
            for number, session in enumerate(sessions):
                token = 10 * turn + number
                assert sink(session, token, size=1 + 900 * number) == token
        for session in sessions[::2]:
            session.close()
        for number, session in enumerate(sessions[1::2]):
            assert sink(session, number) == number


def test_the_short_form_copies_in_and_out(url: str) -> None:
    sent = images((2, 3, 4, 5))
    with Session(url, "identity") as session:
        outputs = session.infer({"INPUT__0": sent})
        again = session.infer({"INPUT__0": sent + 1})
        all_free(session)
        # The first came over the wire, the next ones through shared memory.
        last = session.infer({"INPUT__0": sent + 2})
    np.testing.assert_array_equal(outputs["OUTPUT__0"], sent)
    np.testing.assert_array_equal(again["OUTPUT__0"], sent + 1)
    np.testing.assert_array_equal(last["OUTPUT__0"], sent + 2)
    assert last["OUTPUT__0"].flags.owndata


def test_a_strided_array_is_written_in_one_go(server: TritonServer) -> None:
    picture = images((8, 6, 3))
    chw = picture.transpose(2, 0, 1)[None, :, ::-1, ::2]
    with Session(server.http_url, "identity") as session:
        outputs = session.infer({"INPUT__0": chw})
    np.testing.assert_array_equal(outputs["OUTPUT__0"], chw)


def test_other_datatypes_are_refused_unless_cast(server: TritonServer) -> None:
    with Session(server.http_url, "sink") as session, session.lease() as lease:
        integers = np.arange(4).reshape(1, 1, 1, 4)
        with pytest.raises(TensorMismatch, match=r"takes FP32 .* was int64.*cast=True"):
            lease.write("INPUT__0", integers)
        lease.write("INPUT__0", integers, cast=True)
        assert lease.infer()["OUTPUT__0"] == [3]


def test_an_input_without_elements_is_sent(server: TritonServer) -> None:
    with Session(server.http_url, "identity") as session:
        outputs = session.infer({"INPUT__0": np.empty((1, 0, 2, 2), np.float32)})
        assert outputs["OUTPUT__0"].shape == (1, 0, 2, 2)
        full = session.infer({"INPUT__0": frame(3)})["OUTPUT__0"]
        assert full[..., -1] == 3


# --- shapes and growth ----------------------------------------------------------------


def test_sizes_may_change_with_every_request(url: str) -> None:
    sizes = [1, 4, 1024, 3, 70_000, 5, 1024, 4_000_000, 1]
    with Session(url, "sink", slots=1) as session:
        for number, size in enumerate(sizes):
            assert sink(session, number, size=size) == number
        stats = all_free(session)
        assert 0 < stats.growths < len(sizes)


def test_identity_returns_every_size_over_the_wire(url: str) -> None:
    with Session(url, "identity", slots=1) as session:
        for size in (1, 640, 40_000, 2, 40_000, 1):
            sent = images((1, 1, 1, size), seed=size)
            received = session.infer({"INPUT__0": sent})["OUTPUT__0"]
            np.testing.assert_array_equal(received, sent)
        all_free(session)


def test_identity_returns_declared_sizes_in_shared_memory(url: str) -> None:
    largest = (1, 1, 1, 4096)
    with Session(url, "identity", slots=1, outputs={"OUTPUT__0": largest}) as session:
        before = session.stats().shared_bytes
        assert before >= 4 * 4096
        for size in (1, 4096, 7, 4096, 7, 7, 1):
            sent = images((1, 1, 1, size), seed=size)
            received = session.infer({"INPUT__0": sent})["OUTPUT__0"]
            np.testing.assert_array_equal(received, sent)


def test_growth_moves_only_the_lease_that_needs_it(server: TritonServer) -> None:
    shapes = {"INPUT__0": (1, 1, 1, 8)}
    with Session(server.http_url, "sink", slots=2, shapes=shapes) as session:
        with session.lease() as small, session.lease() as large:
            small["INPUT__0"][...] = 1
            large.view("INPUT__0", (1, 1, 1, 5000))[...] = 2
            assert small.infer()["OUTPUT__0"] == [1]
            assert large.infer()["OUTPUT__0"] == [2]
        stats = all_free(session)
        assert (stats.growths, stats.registrations) == (1, 3)
        assert len(registered(server)) >= 3


def test_views_before_a_growth_stay_valid_and_apart(server: TritonServer) -> None:
    with Session(server.http_url, "sink", slots=1) as session:
        with session.lease() as lease:
            old = lease.view("INPUT__0", (1, 1, 1, 4))
            old[...] = 5
            new = lease.view("INPUT__0", (1, 1, 1, 100_000))
            new[...] = 6
            old[...] = 7
            assert lease.infer()["OUTPUT__0"] == [6]
            assert (old == 7).all()
        del new
        assert sink(session, 8, size=4) == 8
        assert (old == 7).all()


def test_a_lease_starts_with_the_declared_shape(server: TritonServer) -> None:
    shapes = {"INPUT__0": (1, 1, 2, 4)}
    with Session(server.http_url, "sink", slots=1, shapes=shapes) as session:
        with session.lease() as lease:
            assert lease["INPUT__0"].shape == (1, 1, 2, 4)
            lease.view("INPUT__0", (1, 1, 1, 2))
            assert lease["INPUT__0"].shape == (1, 1, 1, 2)
        with session.lease() as lease:
            assert lease["INPUT__0"].shape == (1, 1, 2, 4)


def test_an_input_of_no_known_shape_asks_for_one(server: TritonServer) -> None:
    with Session(server.http_url, "sink") as session, session.lease() as lease:
        with pytest.raises(TensorMismatch, match=r"no shape yet.*lease\.view"):
            lease["INPUT__0"]
        lease.write("INPUT__0", frame(2))
        assert lease.infer()["OUTPUT__0"] == [2]


def test_growth_beyond_the_limit_leaves_the_lease_usable(server: TritonServer) -> None:
    options = RegionOptions(max_bytes=1 << 20)
    with Session(server.http_url, "sink", slots=1, region=options) as session:
        with session.lease() as lease:
            lease.write("INPUT__0", frame(1))
            with pytest.raises(OutOfSharedMemory, match="limit is 1048576"):
                lease.view("INPUT__0", (1, 1, 1, 1 << 20))
            assert lease.infer()["OUTPUT__0"] == [1]
        assert all_free(session).shared_bytes <= 1 << 20
