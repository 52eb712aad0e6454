"""The servers that contenders talk to.

Owns the mapping from a contender to its address, and starting servers of our own for
those who have none. Triton has one HTTP address, so a Unix socket needs a server of its
own beside the one on ports; both run the same model from the same files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shmlane.bench.plan import Contender, Plan
from shmlane.bench.server_stats import ServerStats
from shmlane.errors import UsageError
from shmlane.server import TritonServer, demo_models


@dataclasses.dataclass(frozen=True)
class Servers:
    """Addresses of running servers on this machine that all serve `model`.

    `http` and `grpc` are `127.0.0.1:port` of one server, `unix` is `unix:///path`. The
    model takes one input `INPUT__0` and answers with its last element as `OUTPUT__0`.
    """

    http: str | None = None
    grpc: str | None = None
    unix: str | None = None
    model: str = "sink"

    def url(self, contender: Contender) -> str:
        """Where this contender sends its requests."""
        url: str | None = getattr(self, contender.endpoint)
        if url is None:
            raise UsageError(
                f"no server has the {contender.endpoint} address that "
                f"{contender.name} needs.",
                hint=f"Give Servers({contender.endpoint}=...).",
            )
        return url

    def stats(self, contender: Contender) -> ServerStats:
        """The account of the server that this contender talks to, over its HTTP."""
        url = self.unix if contender.endpoint == "unix" else self.http
        if url is None:
            raise UsageError(
                f"the inferences of {contender.name} are counted over HTTP, and no "
                "server has an HTTP address.",
                hint="Give Servers(http=...) of the same server.",
            )
        return ServerStats(url, self.model)


@contextlib.contextmanager
def own_servers(plan: Plan) -> Iterator[Servers]:
    """Start what the plan's contenders need, and stop it afterwards."""
    endpoints = {contender.endpoint for contender in plan.contenders}
    models = demo_models("sink")
    servers = Servers()
    with contextlib.ExitStack() as running:
        if endpoints & {"http", "grpc"}:
            tcp = running.enter_context(TritonServer(models))
            servers = dataclasses.replace(servers, http=tcp.http_url, grpc=tcp.grpc_url)
        if "unix" in endpoints:
            folder = running.enter_context(
                tempfile.TemporaryDirectory(prefix="shmlane-bench-")
            )
            socket = Path(folder) / "http.sock"
            local = running.enter_context(TritonServer(models, unix_socket=socket))
            servers = dataclasses.replace(servers, unix=local.unix_url)
        yield servers
