"""The server's own account of a model: how many inferences, and how long each took.

Owns two readings of Triton's HTTP API. Each opens a connection of its own, so that
none is left for the server to serve while it is measured.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from shmlane.endpoint import Endpoint
from shmlane.errors import ServerUnreachable
from shmlane.server.health import Address, call

_MOST_READINGS = 100
_BETWEEN_READINGS_S = 0.005


@dataclasses.dataclass(frozen=True)
class Count:
    """Totals since the server started, or between two readings of them."""

    inferences: int
    failures: int
    busy_ns: int

    def __sub__(self, earlier: Count) -> Count:
        return Count(
            self.inferences - earlier.inferences,
            self.failures - earlier.failures,
            self.busy_ns - earlier.busy_ns,
        )

    @property
    def mean_us(self) -> float | None:
        """Mean time that an inference spent in the server, from queue to reply."""
        return self.busy_ns / self.inferences / 1e3 if self.inferences else None


@dataclasses.dataclass(frozen=True)
class ServerStats:
    """Reads the totals of one model; `url` is `127.0.0.1:port` or `unix:///path`."""

    url: str
    model: str

    def settled(self) -> Count:
        """The totals once they stand still; only sensible while no client sends.

        A server counts a request some time after its reply has left.
        """
        count = self.read()
        for _ in range(_MOST_READINGS):
            time.sleep(_BETWEEN_READINGS_S)
            earlier, count = count, self.read()
            if count == earlier:
                break
        return count

    def read(self) -> Count:
        """All versions of the model together, as of now."""
        models = self._get(f"/v2/models/{self.model}/stats")["model_stats"]
        done = [model["inference_stats"] for model in models]
        return Count(
            sum(part["success"]["count"] for part in done),
            sum(part["fail"]["count"] for part in done),
            sum(part["success"]["ns"] for part in done),
        )

    def server_version(self) -> str:
        """Triton's version, such as `2.51.0`."""
        return str(self._get("/v2")["version"])

    def _get(self, path: str) -> dict[str, Any]:
        where = Endpoint.parse(self.url)
        reply = call(Address(where.port, where.path or None), path)
        if reply is None or reply[0] != 200 or not isinstance(reply[1], dict):
            raise ServerUnreachable(
                f"the server at {self.url} answered {path} with "
                f"{'nothing' if reply is None else reply}.",
                hint="See whether it still runs and has the model.",
                url=self.url,
            )
        return reply[1]
