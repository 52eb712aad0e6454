"""Real servers for the tests, and a guard against leaving anything behind.

Owns the session's two servers, the header of the report, and `no_leftovers`. Refuses
to count what other programs on this machine do with shared memory. The servers are
killed in the end: a stop takes a second or more, and has tests of its own.
"""

from __future__ import annotations

import gc
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane import engine, regions
from shmlane.server import TritonServer, managed
from tests.polling import eventually
from tests.sessions import is_own, region_files

SHM = Path("/dev/shm")


def pytest_report_header() -> list[str]:
    shm = shutil.disk_usage(SHM)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"tritonserver: {managed.describe()}",
        f"machine: {len(os.sched_getaffinity(0))} cores, {memory / 2**30:.0f} GiB, "
        f"/dev/shm {shm.free / 2**30:.1f} of {shm.total / 2**30:.1f} GiB free, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}",
    ]


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """A real server with `sink` and `identity` on ports of loopback."""
    with TritonServer() as server:
        yield server
        server.kill()


@pytest.fixture(scope="session")
def unix_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The same, with HTTP on a Unix socket."""
    path = tmp_path_factory.mktemp("unix") / "http.sock"
    with TritonServer(unix_socket=path) as server:
        yield server
        server.kill()


@pytest.fixture
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a session waits until the dead are cleaned up after.

    Else half a second is enough, which servers on a busy machine may need.
    """
    monkeypatch.setattr(engine, "_CLEAN_LIMIT", 10.0)


@pytest.fixture
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves a region file, or a region registered in a server.

    Its servers are the fixtures whose names end in `server`.
    """
    servers: list[TritonServer] = [
        request.getfixturevalue(name)
        for name in request.fixturenames
        if name.endswith("server")
    ]
    files, regions = region_files(), _registered(servers)
    yield
    gc.collect()

    def leftovers() -> set[str]:
        stale = {str(path) for path in region_files() - files if is_own(path)}
        return stale | (_registered(servers) - regions)

    eventually(
        lambda: not leftovers(),
        lambda: f"nothing is left behind, but there is {sorted(leftovers())}",
        timeout=5.0,
    )


def _registered(servers: list[TritonServer]) -> set[str]:
    """Names of the system regions that these servers know."""
    return {
        region["name"]
        for server in servers
        for region in server.call("/v2/systemsharedmemory/status")[1]
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, where nobody else looks, locks or cleans."""
    monkeypatch.setattr(regions, "SHM_DIRECTORY", str(tmp_path))
    return tmp_path
