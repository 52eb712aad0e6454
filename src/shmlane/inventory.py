"""The regions on this machine: whose they are, who lives, what servers know of them.

Owns listing region files of any process and removing what the dead left, in /dev/shm
and on servers. Refuses to touch a region whose owner lives, files of other users, and
registrations that are not proved to belong to a dead owner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple, TypeVar

from . import control
from .calls import run
from .claims import Hold, taken
from .endpoint import Endpoint
from .errors import (
    AccessRestricted,
    RegionError,
    ServerError,
    ServerUnreachable,
    SharedMemoryDisabled,
    ShmlaneError,
)
from .header import MAGIC, RegionHeader
from .records import HEAD_BYTES, Record
from .regions import owner_is_dead, region_files, region_path
from .timing import Deadline
from .transport import HttpConnection
from .wire import HttpRequests

T = TypeVar("T")

# Among `headers`, the key of those for servers that have none of their own.
ANY_SERVER = ""

# Nearly every header fits the first of them.
_HEADER_BYTES = (64 << 10, 64 << 20)
_LIMIT = 2.0
# Each dead region is locked while its server forgets it, which takes a descriptor.
_AT_ONCE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInfo:
    """One region file.

    alive: whether a process uses it; None when this user may not ask. registered: under
    how many names its server knows it; None when the server cannot be asked, or is not
    because the file is another user's. server_trouble: why a server that was asked did
    not tell: "gone" where nothing listens, "refuses" where it says no, else "silent".
    pid, server, model and slots are what the header says, None when it cannot be read.
    claims, lent: which process has which slot for life, or has adopted it, by the
    slot's index.
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
    server_trouble: str | None = None
    claims: Mapping[int, int] = field(default_factory=dict)
    lent: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the file is this user's."""
        return self.uid == os.geteuid()

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def list_regions() -> list[RegionInfo]:
    """Every region file in /dev/shm, anybody's; servers are asked what they know.

    Only those that this user's files name: anybody can write a file, and with it have
    others connect to where they would not.
    """
    known: dict[str, _Told] = {}
    infos = []
    for path in region_files():
        with contextlib.suppress(FileNotFoundError):
            infos.append(_look_at(path, known))
    return sorted(infos, key=lambda info: info.name)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was removed, files and registrations by name, and why a file was kept."""

    files: list[str]
    registrations: list[str]
    kept: dict[str, str]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def clean_up(
    *,
    limit: float = _LIMIT,
    headers: Mapping[str, Mapping[str, str]] | None = None,
    only: str | None = None,
    force: bool = False,
    regions: Collection[str] | None = None,
) -> Cleaned:
    """Remove this user's regions whose owners died, here and on their servers.

    limit: seconds for each server. headers: by server URL or `ANY_SERVER`, where an API
    is restricted. only: the URL of the one server to ask, so that others that are away
    cost no time. regions: names of the only ones to look at. A server that fails once
    is not asked again.
    A region whose server cannot be asked now stays for the next one to clean, and so
    does one whose header cannot be read, unless `force`: without the file, nobody can
    tell any more whose its registrations are.
    """
    cleaned = Cleaned([], [], {})
    headers = headers or {}
    for server, problem, paths in _own_files(only, regions):
        known = headers.get(server) or headers.get(ANY_SERVER)
        for start in range(0, len(paths), _AT_ONCE):
            # Locked to the end: nobody can begin to use what is being removed.
            with _only_dead(paths[start : start + _AT_ONCE]) as dead:
                kept = {}
                if problem:
                    kept = dict.fromkeys(dead, problem)
                elif server and dead:
                    kept, problem = _forget_at(server, dead, cleaned, limit, known)
                removed = _remove(dead, {} if force else kept, cleaned)
                if server and removed and not problem:
                    # A registration that was on its way may have come in between. It
                    # can no more: there is no file for it.
                    _forget_at(server, removed, cleaned, limit, known)
    return cleaned


def _own_files(
    only: str | None, regions: Collection[str] | None
) -> list[tuple[str, str, list[str]]]:
    """This user's region files by server, or by what keeps it from being known.

    A file that does not begin as a region does was never registered by us.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    paths = region_files() if regions is None else map(region_path, regions)
    for path in paths:
        # Gone meanwhile, or another user's: not ours to remove.
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                continue
            server, problem = "", ""
            try:
                header = _read_header(path)
                server = "" if header is None else _text(header, "server") or ""
            except RegionError as error:
                problem = error.message.rstrip(".")
            if server in ("", only or server):
                groups.setdefault((server, problem), []).append(path)
    return [(*key, paths) for key, paths in groups.items()]


@contextlib.contextmanager
def _only_dead(paths: Sequence[str]) -> Iterator[list[str]]:
    """Those that no owner uses; none can begin to meanwhile."""
    with contextlib.ExitStack() as locks:
        dead = []
        for path in paths:
            with contextlib.suppress(OSError):
                if locks.enter_context(owner_is_dead(path)):
                    dead.append(path)
        yield dead


def _remove(
    paths: Sequence[str], kept: Mapping[str, str], cleaned: Cleaned
) -> list[str]:
    """Remove what is not to be kept; the paths that are gone by that."""
    removed = []
    for path in paths:
        name = os.path.basename(path)
        if path in kept:
            cleaned.kept[name] = kept[path]
            continue
        with contextlib.suppress(OSError):
            os.unlink(path)
            cleaned.files.append(name)
            removed.append(path)
    return removed


def _forget_at(
    server: str,
    paths: Sequence[str],
    cleaned: Cleaned,
    limit: float,
    headers: Mapping[str, str] | None,
) -> tuple[dict[str, str], str]:
    """Have a server forget dead regions.

    Returns of which it may still know, with the reason, and why it is of no use to ask
    it for more.
    """
    kept: dict[str, str] = {}
    names = {os.path.basename(path): path for path in paths}

    def forget(requests: HttpRequests) -> control.Talk[None]:
        try:
            forgotten = yield from control.forget_dead(requests, names)
            cleaned.registrations.extend(forgotten)
            return
        except AccessRestricted:
            raise
        except SharedMemoryDisabled:
            # Then it knows of none.
            return
        except ServerError:
            # A request of the dead is on one of them; others need not wait for it.
            pass
        for name, path in names.items():
            try:
                forgotten = yield from control.forget_dead(requests, {name})
                cleaned.registrations.extend(forgotten)
            except ServerError as error:
                kept[path] = error.message.rstrip(".")

    try:
        ask_server(server, forget, limit=limit, headers=headers)
    except (OSError, ShmlaneError) as error:
        problem = _why(server, error)
    else:
        return kept, ""
    return dict.fromkeys(paths, problem), problem


def _why(server: str, error: OSError | ShmlaneError) -> str:
    # Some of ours are also an OSError.
    if isinstance(error, ShmlaneError) and not isinstance(error, ServerUnreachable):
        return error.message.rstrip(".")
    return f"its server {server} does not answer"


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
        return run(talk(requests), connection, deadline)


class _Told(NamedTuple):
    """The regions that a server has, by the name of each registration, or why not."""

    regions: Mapping[str, str]
    trouble: str | None = None


def _look_at(path: str, known: dict[str, _Told]) -> RegionInfo:
    facts = os.lstat(path)
    info = RegionInfo(
        name=os.path.basename(path),
        nbytes=facts.st_size,
        uid=facts.st_uid,
        alive=_ask_alive(path),
    )
    try:
        header = _read_header(path)
    except (OSError, RegionError):
        return info
    if header is None:
        return info
    server, pid = _text(header, "server"), header.description.get("pid")
    if server and info.is_own:
        told = known[server] = known.get(server) or _ask_server(server)
        count = list(told.regions.values()).count(info.name)
        registered = None if told.trouble else count
        info = replace(info, registered=registered, server_trouble=told.trouble)
    with contextlib.suppress(OSError):
        claims, lent = _holders(path, header)
        info = replace(info, claims=claims, lent=lent)
    return replace(
        info,
        pid=pid if isinstance(pid, int) else None,
        server=server,
        model=_text(header, "model"),
        slots=header.slots,
    )


def _holders(path: str, header: RegionHeader) -> tuple[dict[int, int], dict[int, int]]:
    """Who has claimed and adopted which slots of a region."""
    with open(path, "rb") as file:
        held = {hold: taken(file.fileno(), header.slots, hold) for hold in Hold}

        def record(index: int) -> Record:
            file.seek(header.record_offset(index))
            data = file.read(header.record_stride).ljust(HEAD_BYTES, b"\0")
            return Record(memoryview(data), header.entry_stride)

        claims = {index: record(index).claimant for index in held[Hold.HOME]}
        return claims, {index: record(index).borrower for index in held[Hold.BORROWER]}


def _ask_server(server: str) -> _Told:
    try:
        regions = ask_server(server, control.registered_keys)
    except SharedMemoryDisabled:
        return _Told({})
    except ServerError:
        return _Told({}, "refuses")
    except (OSError, ShmlaneError):
        return _Told({}, "silent")
    return _Told({}, "gone") if regions is None else _Told(regions)


def _ask_alive(path: str) -> bool | None:
    with contextlib.suppress(OSError), owner_is_dead(path) as dead:
        return not dead
    return None


def _read_header(path: str) -> RegionHeader | None:
    """The header of a region file, None where the file does not begin as one does.

    Raises `RegionError` for a region that this version cannot read.
    """
    usual, longest = _HEADER_BYTES
    with open(path, "rb") as file:
        data = file.read(usual)
        if not data.startswith(MAGIC):
            return None
        try:
            return RegionHeader.parse(data)
        except RegionError:
            return RegionHeader.parse(data + file.read(longest))


def _text(header: RegionHeader, key: str) -> str | None:
    """One of the texts in a header: whoever wrote the file may have put anything."""
    text = header.description.get(key)
    return text if isinstance(text, str) else None
