"""Asking a server that is starting whether it is ready, and whether it computes right.

Owns a few plain HTTP calls over TCP or a Unix socket. Refuses to decide what an
unreachable server means: it answers None and the caller knows whether the process
still lives.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
from typing import Any

_TIMEOUT = 5.0

CHECK_MODEL = "shmlane_numpy_check"
_CHECK_VALUES = [10.0, 20.0, 30.0, 40.0]


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server listens for HTTP: a port of this machine or a Unix socket."""

    port: int = 0
    unix_socket: str | None = None

    def __str__(self) -> str:
        return self.unix_socket or f"127.0.0.1:{self.port}"


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: Address) -> None:
        super().__init__("127.0.0.1", address.port, timeout=_TIMEOUT)
        self._unix_socket = address.unix_socket

    def connect(self) -> None:
        if self._unix_socket is None:
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT)
        self.sock.connect(self._unix_socket)
        return None


def call(address: Address, path: str, body: object = None) -> tuple[int, Any] | None:
    """GET, or POST of `body` as JSON: the status and the JSON that came back.

    None when nobody answers.
    """
    connection = _Connection(address)
    method = "GET" if body is None else "POST"
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        text = reply.read()
        return reply.status, json.loads(text) if text else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def is_ready(address: Address) -> bool:
    """Whether the server says that it and all its models are ready."""
    reply = call(address, "/v2/health/ready")
    return reply is not None and reply[0] == 200


def server_facts(address: Address) -> dict[str, Any]:
    """What the server says about itself; empty when it does not answer."""
    reply = call(address, "/v2")
    return reply[1] if reply and isinstance(reply[1], dict) else {}


def ready_models(address: Address) -> list[str]:
    """Names of the ready models."""
    reply = call(address, "/v2/repository/index", {"ready": True})
    models = reply[1] if reply and isinstance(reply[1], list) else []
    return sorted({model["name"] for model in models})


def wrong_echo(address: Address) -> str | None:
    """What the check model made of its numbers if they came back wrong, else None."""
    tensor = {
        "name": "INPUT",
        "shape": [len(_CHECK_VALUES)],
        "datatype": "FP32",
        "data": _CHECK_VALUES,
    }
    reply = call(address, f"/v2/models/{CHECK_MODEL}/infer", {"inputs": [tensor]})
    try:
        echoed = reply[1]["outputs"][0]["data"] if reply else "no answer"
    except (KeyError, IndexError, TypeError):
        echoed = reply
    return None if echoed == _CHECK_VALUES else f"{_CHECK_VALUES} came back as {echoed}"
