"""`shmlane serve`: a real tritonserver in the foreground.

Owns its arguments, the line it prints when the server is ready, and its end on Ctrl-C
or SIGTERM. Refuses to leave the server behind, whichever way it ends.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from shmlane.errors import LocalServerError
from shmlane.server import TritonServer, demo_models
from shmlane.server.cache import say
from shmlane.server.models import ECHO_MODELS

_POLL_INTERVAL = 0.2
_KILLED = 128 + signal.SIGKILL
_OUT_OF_MEMORY = (
    "137 is SIGKILL, which Linux sends where memory runs out: dmesg tells of that."
)

_Port = typer.Option(min=0, max=65535, metavar="PORT", show_default="a free one")
_Folder = typer.Option(
    exists=True,
    file_okay=False,
    metavar="FOLDER",
    help="A folder of models; may be given repeatedly.",
)
_Demo = typer.Option(
    metavar="NAME",
    help="sink, identity, resnet50, ocr_det or ocr_rec; may be repeated.",
)
_Unix = typer.Option(
    metavar="PATH", help="Serve HTTP on this Unix socket and on no port."
)
# Every command takes it; this one prints JSON anyway.
_Json = typer.Option("--json", hidden=True)
_Rest = typer.Argument(
    metavar="-- OPTIONS", help="Options for tritonserver itself.", show_default=False
)


def serve(
    http_port: Annotated[int | None, _Port] = None,
    grpc_port: Annotated[int | None, _Port] = None,
    unix: Annotated[Path | None, _Unix] = None,
    model_repository: Annotated[list[Path] | None, _Folder] = None,
    demo: Annotated[list[str] | None, _Demo] = None,
    as_json: Annotated[bool, _Json] = False,
    options: Annotated[list[str] | None, _Rest] = None,
) -> None:
    """Run a real tritonserver until Ctrl-C.

    Prints one line of JSON on stdout when it is ready. Without models of its own it
    serves the demo models sink and identity.
    """
    _refuse_two_addresses(http_port, unix)
    _refuse_words(options or ())
    with contextlib.suppress(KeyboardInterrupt), _stop_on_signals():
        wanted = demo or ([] if model_repository else ECHO_MODELS)
        server = TritonServer(
            [*(model_repository or ()), *demo_models(*wanted)],
            http_port=http_port or 0,
            grpc_port=grpc_port or 0,
            unix_socket=unix,
            extra_args=options or (),
        )
        with server:
            typer.echo(json.dumps(_facts(server, has_socket=unix is not None)))
            say("ready; Ctrl-C ends the server")
            _wait_for_end(server)


def _refuse_two_addresses(http_port: int | None, unix: Path | None) -> None:
    if unix is not None and http_port is not None:
        raise typer.BadParameter(
            f"Triton has one HTTP address: either --http-port {http_port} or "
            f"--unix {unix}.",
            param_hint="--http-port",
        )


def _refuse_words(options: Sequence[str]) -> None:
    """A word that is neither an option nor the value after one is a mistake here."""
    before = ""
    for word in options:
        may_be_value = before.startswith("-") and "=" not in before
        if not (word.startswith("-") or may_be_value):
            raise typer.BadParameter(
                f"{word!r} is not an option of tritonserver. Models are named with "
                f"--demo {word} or --model-repository FOLDER.",
                param_hint="OPTIONS",
            )
        before = word


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
    killed = server.exit_code == _KILLED
    raise LocalServerError(
        f"the server ended by itself: {server!r}.",
        hint=f"Its log is {server.log_path}."
        + (f" {_OUT_OF_MEMORY}" if killed else ""),
    )
