"""A session from construction to close: what it tells, holds and gives back."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmlane import (
    PoolClosed,
    Session,
    SessionStats,
)
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import (
    all_free,
    frame,
    own_region_files,
    region_files,
    registered,
    sink,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")


# --- opening, warming, closing --------------------------------------------------------


def test_construction_touches_nothing_and_the_first_use_opens(
    server: TritonServer,
) -> None:
    files = own_region_files()
    session = Session(server.http_url, "sink")
    assert repr(session) == f"<Session 'sink' at {server.http_url} not open>"
    assert session.stats() == SessionStats()
    assert own_region_files() == files
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


@pytest.mark.parametrize("version", ["1", 1])
def test_a_version_is_asked_for_and_answered(
    server: TritonServer, version: Any
) -> None:
    with (
        Session(server.http_url, "sink", version=version) as session,
        session.lease() as lease,
    ):
        lease.write("INPUT__0", frame(1))
        result = lease.infer()
        assert result.model_version == "1"
        assert dict(result.parameters) == {}
        assert session.version == "1"


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
    assert session.stats().registrations >= 4
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
    # Sessions of other fixtures may still be open, and those of earlier tests end.
    gc.collect()
    others = mapped_region_bytes()
    with Session(server.http_url, "sink", slots=2) as session:
        sink(session, 1, size=100_000)
        assert mapped_region_bytes() - others > 400_000
    gc.collect()
    assert mapped_region_bytes() <= others


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
        # The server counts a run only after its reply.
        eventually(lambda: runs() == before + 3, "the model ran once for each slot")
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
        # There may be fewer: what earlier tests had may end only now.
        assert after[1] <= before[1]
        # The server closes what it has closed to others in its own time.
        eventually(lambda: descriptors(server.pid) <= held, "it holds no more")
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
    assert descriptors(os.getpid()) <= mine
    eventually(lambda: descriptors(server.pid) <= servers, "it holds no more")
