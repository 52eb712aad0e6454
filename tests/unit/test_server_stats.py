"""What a server says that it has done for a model, read at each kind of address."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shmlane import Session
from shmlane.bench.server_stats import Count, ServerStats
from shmlane.testing import ScriptedServer, sink_model
from tests.unit.scripted import SMALL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")


@pytest.mark.parametrize(
    "socket_in", [lambda folder: None, lambda folder: folder / "http.sock"]
)
def test_a_server_tells_its_version_and_how_often_a_model_ran(
    tmp_path: Path, socket_in: Callable[[Path], Path | None]
) -> None:
    sink = sink_model()
    with ScriptedServer([sink], unix_socket=socket_in(tmp_path)) as server:
        stats = ServerStats(server.url, "sink")
        before = stats.settled()
        shapes = {"INPUT__0": (1, 1, 1, 4)}
        with Session(server.url, "sink", shapes=shapes, region=SMALL) as session:
            session.warmup()
        done = stats.settled() - before
        assert stats.server_version() == server.version
    assert before == Count(0, 0, 0)
    assert (done.inferences, done.failures) == (4, 0)
    assert done.mean_us
