"""Real servers with models of their own, each started once for the tests that ask.

They are killed in the end: a stop takes a second or more, and has tests of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmlane import Session
from shmlane.server import TritonServer, demo_models
from tests.sessions import all_free, sink, write_models
from tests.tensor_models import write_echoes, write_tensor_models

if TYPE_CHECKING:
    from collections.abc import Iterator

# Connections that are still open delay its end for at most a second.
BREAKABLE = [
    "--model-control-mode=explicit",
    "--load-model=*",
    "--exit-timeout-secs=1",
]


@pytest.fixture(scope="session")
def networks_server() -> Iterator[TritonServer]:
    """`resnet50`, `ocr_det` and `ocr_rec` on ports of loopback."""
    with TritonServer(demo_models("resnet50", "ocr_det", "ocr_rec")) as server:
        yield server
        server.kill()


@pytest.fixture(scope="session")
def models_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """`rows`, `types` and `moody` on ports of loopback."""
    folder = tmp_path_factory.mktemp("models")
    with TritonServer(write_models(folder, "rows", "types", "moody")) as server:
        yield server
        server.kill()


@pytest.fixture(scope="session")
def tensors_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The models of `tests.tensor_models`, on ports of loopback."""
    folder = tmp_path_factory.mktemp("tensors")
    # Headers that match become parameters of the request, which `reported` shows.
    arguments = ["--http-header-forward-pattern=x-seen.*", "--exit-timeout-secs=1"]
    models = write_tensor_models(write_echoes(folder))
    with TritonServer(models, extra_args=arguments) as server:
        yield server
        server.kill()


@pytest.fixture(scope="session")
def unix_tensors_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """Those of them that run no Python, with HTTP on a Unix socket."""
    folder = tmp_path_factory.mktemp("unix-tensors")
    models = write_echoes(folder / "models")
    with TritonServer(models, unix_socket=folder / "http.sock") as server:
        yield server
        server.kill()


@pytest.fixture(params=["TCP", "Unix socket"])
def tensors_url(request: pytest.FixtureRequest) -> str:
    """The models that echo, reached in each way, in turn."""
    if request.param == "TCP":
        server: TritonServer = request.getfixturevalue("tensors_server")
        return server.http_url
    unix_server: TritonServer = request.getfixturevalue("unix_tensors_server")
    return unix_server.unix_url


@pytest.fixture
def rows(models_server: TritonServer) -> Iterator[Session]:
    """A session with a model that batches and has an optional input."""
    with Session(models_server.http_url, "rows", slots=2) as session:
        yield session
        all_free(session)


@pytest.fixture(scope="session")
def breakable_server() -> Iterator[TritonServer]:
    with TritonServer(extra_args=BREAKABLE) as server:
        yield server
        server.kill()


@pytest.fixture
def own_server(breakable_server: TritonServer) -> Iterator[TritonServer]:
    """A server that the test may stop, kill and restart, and leaves answering."""
    yield breakable_server
    if not breakable_server.is_alive:
        breakable_server.start()
    with Session(breakable_server.http_url, "sink") as session:
        assert sink(session, 5) == 5
