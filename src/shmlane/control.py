"""Talks with the server beside inference: discovery, registration, draining.

Owns everything that differs between versions of Triton, and what its refusals mean.
Refuses to wait and to do I/O: a talk is a generator that yields request bytes, or a
pause, and is sent each reply, so that blocking and asynchronous sessions share it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeVar

from .errors import (
    AccessRestricted,
    ModelNotReady,
    ProtocolError,
    RegionNotVisible,
    ServerError,
    SharedMemoryDisabled,
    ShmlaneError,
    UsageError,
)
from .ledger import note_registration
from .metadata import ModelMetadata
from .replies import HttpReply
from .slots import Slot
from .tensors import Registration
from .wire import HttpRequests

T = TypeVar("T")

_REQUEST_ID_PREFIX = re.compile(r"^\[request id: [^\]]*\] ")

# The first version that counts the requests on a registration.
_COUNTED = (2, 50)
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
# With these pauses, a quarter of a second.
_UNREGISTER_TRIES = 8


class Pause(NamedTuple):
    """Asks the driver of a talk to wait for so many seconds."""

    seconds: float


Talk = Generator[bytes | Pause, HttpReply | None, T]


def ask(request: bytes) -> Talk[HttpReply]:
    """One request of a talk, and its reply."""
    reply = yield request
    if reply is None:
        raise TypeError("the driver of a talk must send a reply for each request")
    return reply


# --- what the server has --------------------------------------------------------------


def discover(
    requests: HttpRequests, model: str, *, version: str = ""
) -> Talk[ModelMetadata]:
    """Ask for the model's tensors; `ModelNotReady` says what the server has instead."""
    server = yield from _server_version(requests)
    ready = yield from ask(requests.model_ready())
    metadata = yield from ask(requests.model_metadata())
    if metadata.status == 403:
        raise refusal(metadata, f"asking for model {model!r}")
    # Where health alone is restricted, a model that is there is told by its metadata.
    if ready.status not in (200, 403) or metadata.status != 200:
        yield from _explain_missing(requests, model, version)
    # A restricted or missing configuration costs only what the metadata cannot say.
    config = yield from ask(requests.model_config())
    found = ModelMetadata.from_json(
        metadata.json(),
        config.json() if config.status == 200 else {},
        server_version=server,
    )
    if found.decoupled:
        raise UsageError(
            f"model {model!r} is decoupled: it may answer any number of times, which"
            " Triton offers over gRPC streams only."
        )
    return found


def _server_version(requests: HttpRequests) -> Talk[str]:
    reply = yield from ask(requests.server_metadata())
    if reply.status != 200 and reply.error_text is not None:
        raise refusal(reply, "asking for the server's version")
    about = reply.json() if reply.status == 200 else None
    if not isinstance(about, Mapping) or "version" not in about:
        raise ProtocolError(
            f"GET /v2 is not answered like Triton does (status {reply.status}).",
            hint="Is this the HTTP address of a tritonserver?",
        )
    return str(about["version"])


def _explain_missing(
    requests: HttpRequests, model: str, version: str
) -> Talk[NoReturn]:
    index = yield from ask(requests.repository_index())
    entries: list[dict[str, Any]] = index.json() if index.status == 200 else []
    mine = [entry for entry in entries if entry.get("name") == model]
    if index.status == 200 and not mine:
        names = sorted({str(entry["name"]) for entry in entries})
        raise ModelNotReady(
            f"the server has no model {model!r}; it has: {', '.join(names) or 'none'}.",
            model=model,
            models=names,
        )
    states = "; ".join(
        f"version {entry.get('version', '?')}: {entry.get('state', 'not loaded')}"
        f" {entry.get('reason', '')}".rstrip()
        for entry in mine
    )
    wanted = f"version {version} of model {model!r}" if version else f"model {model!r}"
    # A version that nobody is loading will not come by waiting; one that is ready has
    # become so since it was asked for.
    is_there = not version or any(str(each.get("version")) == version for each in mine)
    is_loading = any(entry.get("state") != "READY" for entry in mine)
    is_coming = not mine or is_there or is_loading
    raise ModelNotReady(
        f"{wanted} is not ready; the server says: {states or 'nothing'}.",
        hint="Wait for it to load, or look at the server's log."
        if is_coming
        else "Ask for a version that is there.",
        retryable=is_coming,
        model=model,
        version=version,
    )


# --- registrations of a slot ----------------------------------------------------------


def register(requests: HttpRequests, slot: Slot) -> Talk[None]:
    """Register every region of the slot that the server does not know yet.

    A name whose registration was interrupted is taken back first; unregistering a name
    that the server does not know is always answered with success. No name is ever used
    again, nor the key of an interrupted registration: the server may come to it only
    now, after its name was taken back over another connection.
    """
    for each in slot.unregistered():
        if each.name in slot.obsolete:
            slot.generation += 1
            each.renew(slot.generation)
            each.respell()
    _doubt_again(slot)
    yield from forget(requests, slot)
    for each in list(slot.unregistered()):
        # Until the reply is there, the server may or may not know the name.
        slot.obsolete.append(each.name)
        slot.doubtful.append(each.name)
        note_registration(slot)
        reply = yield from ask(
            requests.register(each.name, each.key, each.region.nbytes)
        )
        each.is_live = reply.status == 200
        if each.is_live or reply.is_from_triton:
            slot.obsolete.remove(each.name)
            slot.doubtful.remove(each.name)
        if not each.is_live:
            raise _registration_refusal(reply, each)
        note_registration(slot)


def unregister(requests: HttpRequests, slot: Slot) -> Talk[None]:
    """Take back every registration of a slot that the server does not hold."""
    slot.obsolete += [each.name for each in slot.registrations if each.is_live]
    for registration in slot.registrations:
        registration.is_live = False
    yield from forget(requests, slot)


def unregister_doubtful(requests: HttpRequests, slot: Slot) -> Talk[None]:
    """Once the files are gone: take back registrations that came before, but late.

    None can come any more, for there is nothing to register.
    """
    _doubt_again(slot)
    yield from forget(requests, slot)


def _doubt_again(slot: Slot) -> None:
    """Have names taken back once more whose registration was never answered.

    A server that stood still may have registered them after they were taken back.
    """
    again = [name for name in slot.doubtful if name not in slot.obsolete]
    slot.doubtful = [name for name in slot.doubtful if name in slot.obsolete]
    slot.obsolete += again


def forget(requests: HttpRequests, slot: Slot) -> Talk[None]:
    """Unregister the names of this slot that no request uses any more."""
    while slot.obsolete:
        name = slot.obsolete[0]
        yield from _unregister_answered(requests, name)
        slot.obsolete.remove(name)
    slot.drop_outgrown()


def _unregister_answered(requests: HttpRequests, name: str) -> Talk[None]:
    """Unregister a name on which every request has been answered.

    Over gRPC, which other clients may use, an answer leaves a moment before the server
    counts its request as over.
    """
    for pause in itertools.islice(_pauses(), _UNREGISTER_TRIES):
        reply = yield from ask(requests.unregister(name))
        if reply.status == 200:
            return
        if "in use" not in server_text(reply):
            break
        yield pause
    raise refusal(reply, f"unregistering {name}")


def _registration_refusal(reply: HttpReply, registration: Registration) -> ShmlaneError:
    text, region = server_text(reply), registration.region
    if "Unable to open shared memory region" in text:
        reason = "cannot open"
        why = "it does not see this /dev/shm, or may not open the file"
    elif text.endswith("': invalid args"):
        # The size is that of the whole file: the server has come to a shorter one.
        reason = "has a smaller file in the place of"
        why = "it sees another /dev/shm"
    else:
        return refusal(reply, f"registering {registration.name}")
    return RegionNotVisible(
        f"the server {reason} {region.path}: {why}.",
        hint="In containers share the IPC namespace (docker run --ipc=host, or"
        " --ipc=container:NAME) or mount the same /dev/shm; for a server under another"
        " user set RegionOptions(mode=0o666).",
        region=region.name,
        text=text,
    )


def registered_keys(requests: HttpRequests) -> Talk[dict[str, str]]:
    """Every registration of the server, anybody's: file name by registration name."""
    reply = yield from ask(requests.all_regions())
    if reply.status != 200:
        raise refusal(reply, "listing shared memory regions")
    return {str(each["name"]): str(each["key"]).lstrip("/") for each in reply.json()}


def forget_dead(requests: HttpRequests, regions: Collection[str]) -> Talk[list[str]]:
    """Unregister what processes left behind whose region files are `regions`.

    Only names made of those, whose owners are proved dead. Servers before 2.50 are left
    alone: a request of the dead may still run there, and would end the server.
    """
    if parse_version((yield from _server_version(requests))) < _COUNTED:
        return []
    forgotten = []
    for name, key in (yield from registered_keys(requests)).items():
        if key not in regions or not name.startswith(f"{key}."):
            continue
        reply = yield from ask(requests.unregister(name))
        if reply.status != 200:
            # A request of the dead still runs; whoever cleans up next asks again.
            raise refusal(reply, f"unregistering {name}")
        forgotten.append(name)
    return forgotten


# --- a lost request -------------------------------------------------------------------


class Drained(Enum):
    """How a lost request ended for the memory of its slot."""

    PROVED = "the server knew the slot, and has let go of it"
    MOVE = "this server does not know the slot: another process may still write outputs"
    GIVE_UP = "asking might end the server"


def drain(requests: HttpRequests, slot: Slot) -> Talk[Drained]:
    """Wait until the server cannot reach the slot any more, as far as it can be known.

    Since 2.50 a server counts the requests on each registration: until 2.52 it refuses
    to unregister while one runs, since 2.53 it accepts and keeps the region in its
    status until the last one ends. Before 2.50, unregistering under a running request
    ends the server. Which server answers is asked anew: the one that the session began
    with may have been replaced, or have neighbours on the same address.
    """
    if parse_version((yield from _server_version(requests))) < _COUNTED:
        return Drained.GIVE_UP
    outcome = Drained.PROVED
    for registration in slot.registrations:
        if not (yield from _knows(requests, registration.name)):
            outcome = Drained.MOVE
            continue
        yield from _unregister_in_use(requests, registration.name)
        yield from _until_unknown(requests, registration.name)
    gone = {registration.name for registration in slot.registrations}
    slot.renew_registrations()
    if outcome is Drained.PROVED:
        slot.obsolete = [name for name in slot.obsolete if name not in gone]
    return outcome


def _knows(requests: HttpRequests, name: str) -> Talk[bool]:
    reply = yield from ask(requests.region_status(name))
    if reply.is_from_triton and reply.status == 200:
        return True
    # The words as well: a gateway too answers 404 for what it does not know.
    unknown = reply.is_from_triton and server_text(reply).startswith("Unable to find")
    if not unknown:
        raise refusal(reply, f"asking for the state of {name}")
    return False


def _unregister_in_use(requests: HttpRequests, name: str) -> Talk[None]:
    for pause in _pauses():
        reply = yield from ask(requests.unregister(name))
        if reply.is_from_triton and reply.status == 200:
            return
        if "in use" not in server_text(reply):
            raise refusal(reply, f"unregistering {name}")
        yield pause


def _until_unknown(requests: HttpRequests, name: str) -> Talk[None]:
    for pause in _pauses():
        if not (yield from _knows(requests, name)):
            return
        yield pause


def _pauses() -> Iterator[Pause]:
    """For ever, each twice as long as the one before, up to a limit."""
    pause = _FIRST_PAUSE
    while True:
        yield Pause(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor of a server version; an unreadable one counts as the newest."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (9999, 0)


# --- what a refusal means -------------------------------------------------------------


def refusal(
    reply: HttpReply, doing: str, *, otherwise: type[ServerError] = ServerError
) -> ServerError:
    """The error that fits Triton's answer to anything but a success."""
    text, status = server_text(reply), reply.status
    if status == 501 and "shared memory is disabled" in text:
        return SharedMemoryDisabled(
            "the server refuses client shared memory, as servers since 2.68 do unless"
            " told otherwise.",
            hint="Start it with --allow-client-shm=true.",
            status=status,
            text=text,
        )
    if status == 403:
        return AccessRestricted(
            f"{doing} is restricted on this server: {text}.",
            hint="Give the header with Connection(headers={...}), or another value.",
            status=status,
            text=text,
        )
    return otherwise(f"{doing} failed: {text}.", status=status, text=text)


def server_text(reply: HttpReply) -> str:
    """The server's own words, without its prefix and full stop."""
    text = reply.error_text
    if text is None:
        text = f"status {reply.status}, {bytes(reply.body[:200])!r}"
    return _REQUEST_ID_PREFIX.sub("", text).rstrip(".")
