"""The main path of a session: right values in place, over ports and over a socket."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane import (
    InferFailed,
    OutOfSharedMemory,
    PoolClosed,
    RegionOptions,
    Session,
    SessionStats,
    TensorMismatch,
)
from shmlane.server import TritonServer
from tests.sessions import Array, all_free, frame, order, region_files, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture(params=["TCP", "Unix socket"])
def url(request: pytest.FixtureRequest) -> str:
    """The same server reached in each way, in turn."""
    if request.param == "TCP":
        server: TritonServer = request.getfixturevalue("server")
        return server.http_url
    unix_server: TritonServer = request.getfixturevalue("unix_server")
    return unix_server.unix_url


@pytest.fixture
def rows(models_server: TritonServer) -> Iterator[Session]:
    """A session with a model that batches and has an optional input."""
    with Session(models_server.http_url, "rows", slots=2) as session:
        yield session
        all_free(session)


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


def test_the_short_form_copies_in_and_out(url: str) -> None:
    sent = images((2, 3, 4, 5))
    with Session(url, "identity") as session:
        outputs = session.infer({"INPUT__0": sent})
        again = session.infer({"INPUT__0": sent + 1})
        all_free(session)
    np.testing.assert_array_equal(outputs["OUTPUT__0"], sent)
    np.testing.assert_array_equal(again["OUTPUT__0"], sent + 1)
    assert outputs["OUTPUT__0"].flags.owndata


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


def test_every_numeric_datatype_travels(models_server: TritonServer) -> None:
    with Session(models_server.http_url, "types") as session:
        tensors = session.metadata.inputs
        sent = {
            name: (np.arange(7) % 5).astype(spec.dtype)
            for name, spec in tensors.items()
        }
        outputs = session.infer(sent)
        assert len(outputs) == 12
        all_free(session)
    for name, array in sent.items():
        received = outputs["OUT" + name.removeprefix("IN")]
        assert received.dtype == array.dtype
        np.testing.assert_array_equal(received, array[::-1])


# --- shapes and growth ----------------------------------------------------------------


def test_sizes_may_change_with_every_request(url: str) -> None:
    sizes = [1, 4, 1024, 3, 70_000, 5, 1024, 300_000, 1]
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


# --- outputs --------------------------------------------------------------------------


def test_only_the_outputs_asked_for_come(models_server: TritonServer) -> None:
    values = images((2, 3))
    for wanted, other in (("SUMS", "MARKED"), ("MARKED", "SUMS")):
        url = models_server.http_url
        with Session(url, "rows", outputs=[wanted]) as session:
            outputs = session.infer({"VALUES": values})
            assert list(outputs) == [wanted]
            with session.lease() as lease:
                lease.write("VALUES", values)
                result = lease.infer()
                assert wanted in result
                assert other not in result


def test_outputs_whose_size_follows_the_data(models_server: TritonServer) -> None:
    # The shapes of inputs never change here, those of outputs with every reply.
    for outputs in (None, {"REPLY": (6,)}):
        with Session(models_server.http_url, "moody", outputs=outputs) as session:
            for token in range(60):
                count = (0, 1, 2, 1, 1, 6)[token % 6]
                reply = session.infer({"ORDER": order(token, count=count)})["REPLY"]
                assert reply.tolist() == [token] * count
            all_free(session)


def test_an_output_larger_than_declared_fails_with_sizes(
    models_server: TritonServer,
) -> None:
    url = models_server.http_url
    with Session(url, "moody", slots=1, outputs={"REPLY": (4,)}) as session:
        with pytest.raises(InferFailed, match=r"needs 20 bytes.* has 16") as it:
            session.infer({"ORDER": order(1, count=5)})
        assert it.value.context["needed"] == 20
        assert "outputs={'REPLY'" in it.value.hint
        reply = session.infer({"ORDER": order(2, count=4)})["REPLY"]
        assert reply.tolist() == [2] * 4
        all_free(session)


# --- batches and optional inputs ------------------------------------------------------


def test_every_batch_size_is_answered_row_by_row(rows: Session) -> None:
    for batch in (1, 8, *range(1, 9), 3):
        values = images((batch, 3), seed=batch)
        marks = np.arange(2 * batch, dtype=np.int8).reshape(batch, 2)
        outputs = rows.infer({"VALUES": values, "MARKS": marks})
        sums = values.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(outputs["SUMS"], sums, rtol=1e-6)
        np.testing.assert_array_equal(outputs["MARKED"], marks)


def test_a_batch_too_large_is_refused_before_sending(rows: Session) -> None:
    with rows.lease() as lease:
        with pytest.raises(TensorMismatch, match=r"\(9, 3\).*at most 8"):
            lease.view("VALUES", (9, 3))
        lease.write("VALUES", images((8, 3)))
        assert lease.infer()["SUMS"].shape == (8, 1)


def test_batches_that_differ_between_inputs_fail(rows: Session) -> None:
    with pytest.raises(InferFailed, match="batch size does not match"):
        rows.infer({"VALUES": images((2, 3)), "MARKS": np.zeros((3, 2), np.int8)})
    assert rows.infer({"VALUES": images((2, 3))})["SUMS"].shape == (2, 1)


def test_an_open_batch_starts_at_one(rows: Session) -> None:
    with rows.lease() as lease:
        assert lease["VALUES"].shape == (1, 3)
        assert lease["MARKS"].shape == (1, 2)


def test_declared_shapes_give_the_batch_of_inputs_and_outputs(
    models_server: TritonServer,
) -> None:
    url = models_server.http_url
    with Session(url, "rows", shapes={"VALUES": (5, 3)}) as session:
        with session.lease() as lease:
            lease["VALUES"][...] = 1
            assert lease.infer()["SUMS"].tolist() == [[3.0]] * 5
        assert session.stats().growths == 0


def test_an_optional_input_comes_and_goes(rows: Session) -> None:
    for number in range(12):
        values = images((2, 3), seed=number)
        inputs = {"VALUES": values}
        if number % 3:
            inputs["MARKS"] = np.full((2, 2), number, np.int8)
        marked = rows.infer(inputs)["MARKED"]
        assert (marked == (number if number % 3 else -1)).all()


def test_an_optional_input_can_be_added_within_a_lease(rows: Session) -> None:
    with rows.lease() as lease:
        lease["VALUES"][...] = 1
        assert (lease.infer()["MARKED"] == -1).all()
        lease["MARKS"][...] = 4
        assert (lease.infer()["MARKED"] == 4).all()


# --- opening, warming, closing --------------------------------------------------------


def test_construction_touches_nothing_and_the_first_use_opens(
    server: TritonServer,
) -> None:
    files = region_files()
    session = Session(server.http_url, "sink")
    assert repr(session) == f"<Session 'sink' at {server.http_url} not open>"
    assert session.stats() == SessionStats()
    assert region_files() == files
    assert session.metadata.name == "sink"
    assert session.stats().slots == 4
    assert session.open() is session
    session.close()
    session.close()


def test_metadata_tells_names_shapes_and_versions(rows: Session) -> None:
    metadata = rows.metadata
    assert metadata.inputs["VALUES"].shape == (-1, 3)
    assert metadata.inputs["MARKS"].optional
    assert metadata.outputs["MARKED"].dtype == np.int8
    assert metadata.max_batch_size == 8
    assert metadata.versions == ("1",)
    assert metadata.server_version[:2] == "2."


def test_a_version_is_asked_for_and_answered(server: TritonServer) -> None:
    with (
        Session(server.http_url, "sink", version="1") as session,
        session.lease() as lease,
    ):
        lease.write("INPUT__0", frame(1))
        result = lease.infer()
        assert result.model_version == "1"
        assert dict(result.parameters) == {}


def test_closing_leaves_no_file_and_no_registration(server: TritonServer) -> None:
    before = registered(server)
    session = Session(server.http_url, "sink", slots=3)
    for size in (1, 5000):
        sink(session, size, size=size)
    mine = registered(server) - before
    assert len(mine) == 4
    session.close()
    assert not registered(server) & mine
    regions = {name.rsplit(".", 2)[0] for name in mine}
    assert not regions & {path.name for path in region_files()}
    assert session.stats() == SessionStats()
    assert repr(session) == f"<Session 'sink' at {server.http_url} closed>"


@pytest.mark.parametrize("opened", [True, False])
def test_a_closed_session_stays_closed(server: TritonServer, opened: bool) -> None:
    session = Session(server.http_url, "sink")
    if opened:
        session.open()
    session.close()
    for use in (session.open, session.lease, lambda: session.metadata, session.warmup):
        with pytest.raises(PoolClosed, match="session for 'sink' is closed"):
            use()


def test_a_closed_session_gives_its_memory_back(server: TritonServer) -> None:
    with Session(server.http_url, "sink", slots=2) as session:
        sink(session, 1, size=100_000)
        assert mapped_region_bytes() > 400_000
    gc.collect()
    assert mapped_region_bytes() == 0


def mapped_region_bytes() -> int:
    """Bytes of region files that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


def test_warming_connects_every_slot(server: TritonServer) -> None:
    with Session(server.http_url, "sink", slots=3) as session:
        session.warmup()
        assert all_free(session).connections == 3
        assert sink(session, 4) == 4
        assert session.stats().connections == 3


def test_warming_runs_the_model_where_shapes_are_known(
    models_server: TritonServer,
) -> None:
    def runs() -> int:
        _, statistics = models_server.call("/v2/models/rows/stats")
        count: int = statistics["model_stats"][0]["inference_count"]
        return count

    before = runs()
    with Session(models_server.http_url, "rows", slots=3) as session:
        session.warmup()
        assert runs() == before + 3
        assert all_free(session).connections == 3


# --- telling --------------------------------------------------------------------------


def test_counters_and_texts_show_the_state(server: TritonServer) -> None:
    with Session(server.http_url, "sink", slots=2) as session:
        with session.lease() as lease:
            stats = session.stats()
            assert (stats.slots, stats.leased, stats.free) == (2, 1, 1)
            assert "1 leased" in repr(session)
            assert repr(lease) == "<Lease <Slot 0 leased generation 0>>"
            lease.write("INPUT__0", frame(1))
            result = lease.infer()
            assert repr(result) == "<Result OUTPUT__0 [1]>"
            view = result["OUTPUT__0"]
        assert repr(lease) == "<Lease released>"
        assert repr(result) == "<Result expired>"
        assert session.stats().pinned == 1
        assert "1 pinned" in repr(session)
        del view
        assert "2 free" in repr(session)


# --- cost -----------------------------------------------------------------------------


def test_requests_leave_no_memory_and_no_descriptors(server: TritonServer) -> None:
    shapes = {"INPUT__0": (1, 1, 1, 8)}
    with Session(server.http_url, "sink", slots=2, shapes=shapes) as session:
        use(session, 500)
        tracemalloc.start()
        use(session, 500)
        before = tracemalloc.take_snapshot(), descriptors(os.getpid())
        held = descriptors(server.pid)
        use(session, 10_000)
        after = tracemalloc.take_snapshot(), descriptors(os.getpid())
        tracemalloc.stop()
        assert descriptors(server.pid) == held
        assert after[1] == before[1]
        grown = after[0].compare_to(before[0], "filename")
        ours = [each for each in grown if "shmlane" in each.traceback[0].filename]
        assert sum(each.size_diff for each in ours) < 4096
        all_free(session)


def use(session: Session, times: int) -> None:
    for value in range(times):
        with session.lease() as lease:
            lease["INPUT__0"][...] = value
            assert lease.infer()["OUTPUT__0"][0] == value


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_sessions_come_and_go_without_descriptors_left(server: TritonServer) -> None:
    with Session(server.http_url, "sink") as session:
        sink(session, 0)
    mine, servers = descriptors(os.getpid()), descriptors(server.pid)
    for value in range(20):
        with Session(server.http_url, "sink", slots=2) as session:
            assert sink(session, value, size=2000) == value
    assert descriptors(os.getpid()) == mine
    assert descriptors(server.pid) <= servers + 2
