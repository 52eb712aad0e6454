"""`shmlane serve`: a real tritonserver in the foreground.

Owns its arguments, the line it prints when the server is ready, and its end on Ctrl-C
or SIGTERM. Refuses to leave the server behind, whichever way it ends.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from shmlane.errors import LocalServerError
from shmlane.server import TritonServer, demo_models
from shmlane.server.cache import say
from shmlane.server.models import ECHO_MODELS

_POLL_INTERVAL = 0.2

_Port = typer.Option(min=0, max=65535, help="0 picks a free one.")
_Folder = typer.Option(
    exists=True, file_okay=False, help="A folder of models; may be given repeatedly."
)
_Demo = typer.Option(
    metavar="NAME", help="sink, identity, resnet50 or ocr_det; may be repeated."
)
_Unix = typer.Option(help="Serve HTTP on this Unix socket and on no port.")
_Rest = typer.Argument(metavar="[-- OPTIONS]", help="Options for tritonserver itself.")


def serve(
    http_port: Annotated[int, _Port] = 0,
    grpc_port: Annotated[int, _Port] = 0,
    unix: Annotated[Path | None, _Unix] = None,
    model_repository: Annotated[list[Path] | None, _Folder] = None,
    demo: Annotated[list[str] | None, _Demo] = None,
    options: Annotated[list[str] | None, _Rest] = None,
) -> None:
    """Run a real tritonserver until Ctrl-C.

    Prints one line of JSON on stdout when it is ready. Without models of its own it
    serves the demo models sink and identity.
    """
    with contextlib.suppress(KeyboardInterrupt), _stop_on_signals():
        wanted = demo or ([] if model_repository else ECHO_MODELS)
        server = TritonServer(
            [*(model_repository or ()), *demo_models(*wanted)],
            http_port=http_port,
            grpc_port=grpc_port,
            unix_socket=unix,
            extra_args=options or (),
        )
        with server:
            typer.echo(json.dumps(_facts(server, has_socket=unix is not None)))
            say("ready; Ctrl-C ends the server")
            _wait_for_end(server)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGTERM is Ctrl-C too, and only the first of either: the end is not disturbed."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _facts(server: TritonServer, *, has_socket: bool) -> dict[str, object]:
    return {
        "http_url": None if has_socket else server.http_url,
        "grpc_url": server.grpc_url,
        "unix_url": server.unix_url if has_socket else None,
        "pid": server.pid,
        "version": server.version,
        "models": server.model_names(),
        "log": str(server.log_path),
    }


def _wait_for_end(server: TritonServer) -> None:
    while server.is_alive:
        time.sleep(_POLL_INTERVAL)
    raise LocalServerError(
        f"The server ended by itself: {server!r}.",
        hint=f"Its log is {server.log_path}.",
    )
