"""A real server with the two real networks, started once for the tests that ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmlane.server import TritonServer, demo_models

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def networks_server() -> Iterator[TritonServer]:
    """`resnet50` and `ocr_det` on ports of loopback."""
    with TritonServer(demo_models("resnet50", "ocr_det")) as server:
        yield server
