"""What clients leave for each other: references to slots, and handles of shared ones.

Owns the folder in which they lie, one file a letter, and who got one first. Refuses to
know what is done with them. Any process may end between any two steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
from pathlib import Path
from typing import NamedTuple

from shmlane.session_base import BaseSession
from tests.chaos.lanes import Lane

# Older ones go when there are more: their slots go back to where they came from.
_MOST = 4


class Letter(NamedTuple):
    """A slot that was handed over, and what it was filled with; 0 if with nothing."""

    ref: str
    token: int
    shape: tuple[int, ...]


class Letterbox:
    """One folder for all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles = folder / "handles"
        self._adopted = folder / "adopted"
        for each in (self._handles, self._adopted):
            each.mkdir(parents=True, exist_ok=True)

    # --- slots that were handed over --------------------------------------------------

    def put(self, letter: Letter, lane: Lane[BaseSession]) -> None:
        """For whoever has a session like that of this lane."""
        folder = self._folder_of(lane)
        whole = self._folder / secrets.token_hex(8)
        whole.write_text(json.dumps(letter))
        whole.rename(folder / whole.name)
        for old in _oldest_first(folder)[:-_MOST]:
            old.unlink(missing_ok=True)

    def take(self, lane: Lane[BaseSession], dice: random.Random) -> Letter | None:
        """One of them, at times without keeping others from taking it as well."""
        letters = _oldest_first(self._folder_of(lane))
        if not letters:
            return None
        path = dice.choice(letters)
        with contextlib.suppress(FileNotFoundError):
            ref, token, shape = json.loads(path.read_text())
            if dice.random() < 0.8:
                path.unlink()
            return Letter(ref, token, tuple(shape))
        return None

    def note_adopted(self, ref: str) -> bool:
        """False if somebody has noted this reference before."""
        try:
            (self._adopted / ref).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _folder_of(self, lane: Lane[BaseSession]) -> Path:
        session = lane.session
        name = "".join(filter(str.isalnum, session.url + session.model))
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder

    # --- handles of shared slots ------------------------------------------------------

    def publish(self, handle: str) -> None:
        (self._handles / handle).touch()

    def some_handle(self, dice: random.Random) -> str | None:
        handles = sorted(os.listdir(self._handles))
        return dice.choice(handles) if handles else None

    def forget(self, handle: str) -> None:
        (self._handles / handle).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<Letterbox {self._folder}>"


def _oldest_first(folder: Path) -> list[Path]:
    aged: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            aged.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(aged)]
