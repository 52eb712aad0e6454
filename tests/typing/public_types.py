"""What type checkers tell users. Never run: mypy reads it and fails when it differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import shmlane
from shmlane.server import TritonServer

if TYPE_CHECKING:
    from typing import assert_type

    AnyArray = npt.NDArray[Any]

    def a_session_reveals(
        session: shmlane.Session, frame: npt.NDArray[np.uint8]
    ) -> None:
        with session as opened:
            assert_type(opened, shmlane.Session)
        assert_type(session.infer({"images": frame}), dict[str, AnyArray])
        assert_type(session.metadata, shmlane.ModelMetadata)
        assert_type(session.metadata.inputs["images"], shmlane.TensorSpec)
        assert_type(session.stats(), shmlane.SessionStats)

    def a_lease_reveals(session: shmlane.Session) -> None:
        with session.lease(timeout=1.0) as lease:
            assert_type(lease, shmlane.Lease)
            assert_type(lease["images"], AnyArray)
            assert_type(lease.view("images", (1, 3, 640, 640)), AnyArray)
            result = lease.infer(timeout=None)
        assert_type(result, shmlane.Result)
        assert_type(result["output0"], AnyArray)
        assert_type(result.copy(), dict[str, AnyArray])

    def a_server_reveals() -> None:
        with TritonServer() as server:
            assert_type(server, TritonServer)
            assert_type(server.http_url, str)

    def an_error_reveals(error: shmlane.ShmlaneError) -> None:
        assert_type(error.hint, str)
        assert_type(error.retryable, bool)
        assert_type(error.context, dict[str, object])
