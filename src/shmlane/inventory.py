"""The regions on this machine: whose they are, who lives, what servers know of them.

Owns listing region files of any process and removing what the dead left, in /dev/shm
and on servers. Refuses to touch a region whose owner lives, files of other users, and
registrations that are not proved to belong to a dead owner.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

from . import blocking, control
from .errors import ShmlaneError
from .header import RegionHeader
from .regions import is_owned, region_files, remove_stale
from .timing import Deadline
from .transport import Endpoint, HttpConnection
from .wire import HttpRequests

T = TypeVar("T")

_HEADER_BYTES = 1 << 20
_LIMIT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInfo:
    """One region file.

    alive: whether a process uses it; None when this user may not ask. registered: under
    how many names its server knows it; None when the server cannot be asked. pid,
    server, model and slots are what the header says, None when it cannot be read.
    """

    name: str
    nbytes: int
    uid: int
    alive: bool | None
    pid: int | None = None
    server: str | None = None
    model: str | None = None
    slots: int | None = None
    registered: int | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def list_regions() -> list[RegionInfo]:
    """Every region file in /dev/shm, anybody's; servers are asked what they know."""
    known: dict[str, dict[str, str] | None] = {}
    infos = []
    for path in region_files():
        with contextlib.suppress(FileNotFoundError):
            infos.append(_look_at(path, known))
    return sorted(infos, key=lambda info: info.name)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was removed: files by name, and registrations by name."""

    files: list[str]
    registrations: list[str]


def clean() -> Cleaned:
    """Remove this user's regions whose owners died, here and on their servers."""
    servers = {info.name: info.server for info in list_regions()}
    files = remove_stale()
    by_server: defaultdict[str, list[str]] = defaultdict(list)
    for name in files:
        if server := servers.get(name):
            by_server[server].append(name)
    registrations: list[str] = []
    for server, names in by_server.items():
        registrations += ask_server(server, _forget(names)) or []
    return Cleaned(files, registrations)


def _forget(
    names: Iterable[str],
) -> Callable[[HttpRequests], control.Talk[list[str]]]:
    return lambda requests: control.forget_dead(requests, set(names))


def ask_server(url: str, talk: Callable[[HttpRequests], control.Talk[T]]) -> T | None:
    """The outcome of a talk with the server at `url`, None if it cannot be had."""
    deadline = Deadline(_LIMIT)
    with contextlib.suppress(ShmlaneError):
        endpoint = Endpoint.parse(url)
        connection = HttpConnection.open(endpoint, deadline)
        with contextlib.closing(connection):
            requests = HttpRequests(endpoint.host_header, "any")
            return blocking.run(talk(requests), connection, deadline)
    return None


def _look_at(path: str, known: dict[str, dict[str, str] | None]) -> RegionInfo:
    name, facts = os.path.basename(path), os.stat(path)
    try:
        alive = is_owned(path)
        header = _read_header(path)
    except (OSError, ShmlaneError):
        return RegionInfo(
            name=name, nbytes=facts.st_size, uid=facts.st_uid, alive=_ask_alive(path)
        )
    about = header.description
    server = str(about.get("server", ""))
    if server not in known:
        known[server] = ask_server(server, control.registered_keys)
    keys = known[server]
    return RegionInfo(
        name=name,
        nbytes=facts.st_size,
        uid=facts.st_uid,
        alive=alive,
        pid=about.get("pid"),
        server=server,
        model=about.get("model"),
        slots=header.slots,
        registered=None if keys is None else list(keys.values()).count(name),
    )


def _ask_alive(path: str) -> bool | None:
    with contextlib.suppress(OSError):
        return is_owned(path)
    return None


def _read_header(path: str) -> RegionHeader:
    with open(path, "rb") as file:
        return RegionHeader.parse(file.read(_HEADER_BYTES))
