"""What a session is to be: the arguments of its constructor, checked.

Owns the checks that need no server, and what follows from the arguments alone. Refuses
to connect. Blocking and asynchronous sessions take the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .endpoint import Connection, Endpoint
from .errors import UsageError
from .handoff import SessionHandle
from .layout import Sizes
from .regions import RegionOptions
from .timing import Timeouts
from .wire import HttpRequests

# Where tensors lie: in shared memory, in the requests and replies themselves, or in the
# one if the server sees it and in the other if not.
MEMORY = ("system", "wire", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked arguments; see `Session` for what each means."""

    url: str
    model: str
    version: str
    slots: int
    memory: str
    shapes: Sizes | None
    outputs: Iterable[str] | Sizes | None
    rerun: bool
    connection: Connection
    timeouts: Timeouts
    region: RegionOptions
    endpoint: Endpoint
    requests: HttpRequests
    handle: SessionHandle | None = None

    @classmethod
    def check(
        cls,
        url: str,
        model: str,
        *,
        version: object,
        slots: int,
        memory: str,
        shapes: Sizes | None,
        outputs: Iterable[str] | Sizes | None,
        rerun: bool,
        connection: Connection | None,
        timeouts: Timeouts | None,
        region: RegionOptions | None,
        handle: SessionHandle | None = None,
    ) -> Settings:
        """Raises `UsageError` for arguments that cannot work.

        handle: slots of other processes to be claimed, in the place of own ones.
        """
        _check_types(
            url=(url, str),
            model=(model, str),
            outputs=(outputs, Iterable),
            rerun=(rerun, bool),
            shapes=(shapes, Mapping),
            connection=(connection, Connection),
            timeouts=(timeouts, Timeouts),
            region=(region, RegionOptions),
        )
        endpoint = Endpoint.parse(url)
        connection = connection or Connection()
        return cls(
            url=url,
            model=model,
            version=_checked_version(version),
            slots=checked_count(slots, least=1 if handle is None else 0),
            memory=_checked_memory(memory),
            shapes=shapes,
            outputs=outputs,
            rerun=rerun,
            connection=connection,
            timeouts=timeouts or Timeouts(),
            region=region or RegionOptions(),
            endpoint=endpoint,
            requests=HttpRequests(
                endpoint.host_header,
                model,
                version=_checked_version(version),
                headers=connection.headers,
            ),
            handle=handle,
        )


def _check_types(**arguments: tuple[object, type]) -> None:
    """A mistake in the constructor must not be met later and elsewhere."""
    for name, (value, wanted) in arguments.items():
        is_missing = value is None and name not in ("url", "model")
        if not is_missing and not isinstance(value, wanted):
            # What was meant for headers may hold a password.
            shown = name if name == "connection" else f"{name}={value!r}"
            raise UsageError(
                f"{shown} must be a {wanted.__name__}, not a {type(value).__name__}."
            )


def _checked_version(version: object) -> str:
    """A number is what most people write."""
    if isinstance(version, (str, int)) and not isinstance(version, bool):
        return str(version)
    raise UsageError(
        f"version={version!r} is no model version: give a number, or '' for the latest."
    )


def _checked_memory(memory: str) -> str:
    if memory in MEMORY:
        return memory
    hint = "CUDA memory is not offered yet." if str(memory).startswith("cuda") else ""
    raise UsageError(
        f"memory={memory!r}: allowed are {', '.join(map(repr, MEMORY))}.", hint=hint
    )


def checked_count(slots: int, *, least: int = 1) -> int:
    """A number of slots; `UsageError` if it is none."""
    try:
        count = operator.index(slots)
    except TypeError:
        count = -1
    if count < least:
        raise UsageError(
            f"slots={slots!r}: give a whole number of slots, {least} or more."
        )
    return count
