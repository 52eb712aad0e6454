"""Regions whose owners are dead, in a folder in place of /dev/shm, where nobody cleans.

Owns making them and having a server know them. Refuses to clean up: the folder goes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmlane import control
from shmlane.header import RegionHeader
from shmlane.inventory import ask_server
from shmlane.layout import SlotLayout, TensorPlan
from shmlane.metadata import TensorSpec
from shmlane.wire import HttpRequests


def left_behind(
    folder: Path,
    name: str,
    server: str,
    *,
    model: str = "m",
    version: int | None = None,
    headers: Mapping[str, str] | None = None,
    registered: bool = True,
) -> Path:
    """A region of a dead process; `registered` with its server under one name."""
    plan = TensorPlan(TensorSpec("X", "UINT8", (8,)), True, (8,), 0, 8)
    header = RegionHeader.plan(
        SlotLayout((plan,), 4096), 1, pid=7, server=server, model=model
    )
    data = header.pack().ljust(header.region_bytes, b"\0")
    if version is not None:
        data = data[:8] + struct.pack("<I", version) + data[12:]
    path = folder / f"shmlane.{name}"
    path.write_bytes(data)
    if registered:
        register(path, server, headers=headers)
    return path


def register(
    path: Path, server: str, *, headers: Mapping[str, str] | None = None
) -> None:
    """Have the server know a region, under one name."""
    nbytes = path.stat().st_size

    def ask(requests: HttpRequests) -> control.Talk[Any]:
        name = path.name
        return control.ask(requests.register(f"{name}.0.0", f"/{name}", nbytes))

    reply = ask_server(server, ask, headers=headers)
    assert reply is not None
    assert reply.status == 200, reply.body
