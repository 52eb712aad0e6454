"""Real servers with models of their own, each started once for the tests that ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmlane.server import TritonServer, demo_models
from tests.sessions import write_models

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def networks_server() -> Iterator[TritonServer]:
    """`resnet50` and `ocr_det` on ports of loopback."""
    with TritonServer(demo_models("resnet50", "ocr_det")) as server:
        yield server


@pytest.fixture(scope="session")
def models_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """`rows`, `types` and `moody` on ports of loopback."""
    folder = tmp_path_factory.mktemp("models")
    with TritonServer(write_models(folder, "rows", "types", "moody")) as server:
        yield server
