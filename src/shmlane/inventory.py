"""The regions on this machine: whose they are, who lives, what servers know of them.

Owns listing region files of any process and removing what the dead left, in /dev/shm
and on servers. Refuses to touch a region whose owner lives, files of other users, and
registrations that are not proved to belong to a dead owner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from . import blocking, control
from .errors import ShmlaneError
from .header import RegionHeader
from .regions import owner_is_dead, region_files
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

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def clean_up(
    *,
    limit: float = _LIMIT,
    headers: Mapping[str, Mapping[str, str]] | None = None,
    only: str | None = None,
    force: bool = False,
) -> Cleaned:
    """Remove this user's regions whose owners died, here and on their servers.

    limit: seconds for each server. headers: by server URL, where an API is restricted.
    only: the URL of the one server to ask, so that others that are away cost no time.
    A region whose server cannot be asked now stays for the next one to clean, unless
    `force`: without the file, nobody can tell any more whose its registrations are.
    """
    cleaned = Cleaned([], [])
    for path in region_files():
        # Gone meanwhile, or another user's: not ours to remove.
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.getuid():
                continue
            # Locked to the end: nobody can begin to use what is being removed.
            with owner_is_dead(path) as dead:
                server = _server_of(path)
                if not dead or server not in ("", only or server):
                    continue
                known = headers.get(server) if headers else None
                if _clean_server(server, path, cleaned, limit, known) or force:
                    os.unlink(path)
                    cleaned.files.append(os.path.basename(path))
    return cleaned


def _clean_server(
    server: str,
    path: str,
    cleaned: Cleaned,
    limit: float,
    headers: Mapping[str, str] | None,
) -> bool:
    """Have its server forget a dead region; True when nothing is left to forget."""
    if not server:
        return True
    talk = _forget(os.path.basename(path))
    try:
        names = ask_server(server, talk, limit=limit, headers=headers)
    except (OSError, ShmlaneError):
        return False
    cleaned.registrations.extend(names or ())
    return True


def _server_of(path: str) -> str:
    # A region whose header cannot be read was never registered by us.
    with contextlib.suppress(ShmlaneError):
        return str(_read_header(path).description.get("server", ""))
    return ""


def _forget(name: str) -> Callable[[HttpRequests], control.Talk[list[str]]]:
    return lambda requests: control.forget_dead(requests, {name})


def ask_server(
    url: str,
    talk: Callable[[HttpRequests], control.Talk[T]],
    *,
    limit: float = _LIMIT,
    headers: Mapping[str, str] | None = None,
) -> T | None:
    """The outcome of a talk with the server at `url`; None if no server is there.

    Raises `ShmlaneError` when one is there and does not answer as it should.
    """
    endpoint, deadline = Endpoint.parse(url), Deadline(limit)
    try:
        connection = HttpConnection(endpoint.connect(limit))
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    with contextlib.closing(connection):
        requests = HttpRequests(endpoint.host_header, "any", headers=headers)
        return blocking.run(talk(requests), connection, deadline)


def _look_at(path: str, known: dict[str, dict[str, str] | None]) -> RegionInfo:
    name, facts = os.path.basename(path), os.stat(path)
    alive = _ask_alive(path)
    try:
        header = _read_header(path)
    except (OSError, ShmlaneError):
        return RegionInfo(
            name=name, nbytes=facts.st_size, uid=facts.st_uid, alive=alive
        )
    about = header.description
    server = str(about.get("server", ""))
    if server not in known:
        known[server] = None
        with contextlib.suppress(OSError, ShmlaneError):
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
    with contextlib.suppress(OSError), owner_is_dead(path) as dead:
        return not dead
    return None


def _read_header(path: str) -> RegionHeader:
    with open(path, "rb") as file:
        return RegionHeader.parse(file.read(_HEADER_BYTES))
