"""Slots that no process has yet, in a region of their own, and claiming them for life.

Owns what such a region tells a session that attaches to it, and the claims that one
session has. Refuses to ask a server: what is needed was written down by whoever asked
it before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .claims import Hold
from .endpoint import Connection
from .errors import RegionError, ShmlaneError, SlotsClaimed
from .handoff import SessionHandle
from .header import RegionHeader
from .layout import SlotLayout
from .ledger import read_registration
from .metadata import ModelMetadata
from .opened import OpenedRegion
from .records import State
from .regions import RegionOptions, could_not
from .settings import Settings
from .slots import Slot
from .timing import Timeouts


def told_of(settings: Settings, metadata: ModelMetadata) -> dict[str, Any]:
    """What a session with the same server and model needs to know; no secrets."""
    return {
        "version": settings.version,
        "rerun": settings.rerun,
        "model": metadata.to_json(),
    }


def attached_settings(
    handle: SessionHandle | str,
    *,
    slots: int,
    connection: Connection | None,
    timeouts: Timeouts | None,
) -> Settings:
    """What a session is to be that claims `slots` of those of `handle`."""
    if not isinstance(handle, SessionHandle):
        handle = SessionHandle.parse(handle)
    region = _opened(handle)
    try:
        header = RegionHeader.parse(region.view)
        session = _session_of(header, handle)
        return Settings.check(
            str(header.description.get("server")),
            str(header.description.get("model")),
            version=session.get("version", ""),
            slots=slots,
            memory="system",
            shapes=None,
            outputs=None,
            rerun=session.get("rerun", False),
            connection=connection,
            timeouts=timeouts,
            # A server that may open the one file may open the next.
            region=RegionOptions(mode=region.mode),
            handle=handle,
        )
    finally:
        region.leave()


class Claims:
    """The slots of one shared region that a session has for as long as it lives.

    Raises `RegionError` where the region is gone, or is none to be shared.
    """

    def __init__(self, handle: SessionHandle) -> None:
        self.region = _opened(handle)
        try:
            self._header = RegionHeader.parse(self.region.view)
            session = _session_of(self._header, handle)
            self.metadata = _metadata(session)
            self.layout: SlotLayout = self._header.layout(self.metadata)
        except BaseException:
            self.region.leave()
            raise

    def take(self, count: int) -> list[Slot]:
        """Claim so many slots that nobody has; `SlotsClaimed` if there are too few.

        A slot whose last owner died with a request in flight is claimed too: the server
        still holds it.
        """
        slots: list[Slot] = []
        for index in range(self._header.slots):
            if len(slots) == count:
                break
            if self._claim(index):
                slots.append(self._slot(index))
        if len(slots) < count:
            raise self._too_few(count, len(slots))
        return slots

    def _claim(self, index: int) -> bool:
        locks = self.region.locks
        if not locks.take(index, Hold.HOME):
            return False
        if not locks.take(index, Hold.BORROWER):
            # Lent by an owner that is gone, and still in use.
            locks.give_back(index, Hold.HOME)
            return False
        return True

    def _slot(self, index: int) -> Slot:
        self.region.populate(self._header.slot_offset(index), self._header.stride)
        slot = Slot(index, self.region, self._header, self.layout)
        notes = slot.notes
        # What was handed over by the last owner is not to be adopted any more.
        notes.state = State.HOME
        notes.claimant = os.getpid()
        self.region.locks.give_back(index, Hold.BORROWER)
        read_registration(slot)
        slot.server_hold = notes.is_in_flight
        return slot

    def _too_few(self, count: int, found: int) -> SlotsClaimed:
        holders = {}
        for index in range(self._header.slots):
            if self.region.locks.is_taken(index, Hold.HOME):
                slot = Slot(index, self.region, self._header, self.layout)
                holders[index] = slot.notes.claimant
        pids = ", ".join(str(pid) for pid in sorted({*holders.values()})) or "none"
        slots = self._header.slots
        return SlotsClaimed(
            f"{count} slots of {self.region.name} are wanted, {found} of its {slots}"
            f" are unclaimed; processes that have claimed others: {pids}.",
            hint=f"Claim fewer{', end one of those' if holders else ''}, or share more:"
            " session.share(slots=...).",
            wanted=count,
            unclaimed=found,
            slots=slots,
            holders=holders,
        )

    def let_go(self, slot: Slot) -> None:
        """Have others claim the slot if it is of these; its registration stays.

        With views on it, others can claim it only once these have died.
        """
        if not slot.registrations or slot.registrations[0].region is not self.region:
            return
        slot.registrations.pop(0)
        if not any(tensor.has_views() for tensor in slot.tensors):
            self.region.locks.give_back(slot.index, Hold.HOME)

    def abandon(self) -> None:
        """Let go of everything: nobody has seen any of the slots."""
        # Whoever keeps the exception that led here keeps the slots, but not the locks.
        self.region.locks.drop()
        self.region.leave()

    def close(self) -> str:
        """Let go of the region, and of what is claimed and not looked at any more."""
        self.region.leave()
        return self.region.name

    def __repr__(self) -> str:
        return f"<Claims on {self.region!r}>"


def _opened(handle: SessionHandle) -> OpenedRegion:
    try:
        return OpenedRegion(handle.region)
    except FileNotFoundError:
        raise RegionError(
            f"there are no shared slots {handle} any more.",
            hint="They live as long as any session that shares or has claimed them.",
            region=handle.region,
        ) from None
    except OSError as error:
        raise could_not(f"open {handle}", error) from error


def _session_of(header: RegionHeader, handle: SessionHandle) -> Mapping[str, Any]:
    session = header.description.get("session")
    if not header.claimable or not isinstance(session, Mapping):
        raise RegionError(
            f"the slots of {handle} belong to one session, and cannot be claimed.",
            hint="session.share() makes slots that can.",
        )
    return session


def _metadata(session: Mapping[str, Any]) -> ModelMetadata:
    try:
        told = session["model"]
        return ModelMetadata.from_json(
            told["metadata"], told["config"], server_version=told["server_version"]
        )
    except (KeyError, TypeError, ShmlaneError) as error:
        raise RegionError(
            f"the region header does not tell of the model: {error!r}."
        ) from error
