"""Regions that another process made, opened by their name.

Owns opening them so that they are neither removed meanwhile nor taken for what they are
not, and the locks on their slots. Refuses to make a region, and to know who may use
which slot.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat

from .claims import SlotLocks
from .errors import RegionError
from .regions import PREFIX, MappedFile, Mapping, touch

_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{16}")


def is_region_name(name: str) -> bool:
    """Whether regions have such names; anything else is no name of a file for us."""
    return _NAME.fullmatch(name) is not None


def token_of(name: str) -> int:
    """The number in the name of a region, by which records name it."""
    return int(name.removeprefix(PREFIX), 16)


def name_of(token: int) -> str:
    return f"{PREFIX}{token:016x}"


class _Mapping(Mapping):
    """A mapping that has locks on slots for as long as an array looks into it.

    Views may outlive everything else that was done with a slot. Until the last of them
    is gone, no other process may write there.
    """

    locks: SlotLocks


class OpenedRegion(MappedFile):
    """A region of another process, in use here until `close` or `leave`.

    It takes two descriptors: that of the mapping, and one for all of its locks.

    Its name stays then, unless this process took it over. Raises FileNotFoundError if
    it is gone, `RegionError` for other files, and OSError for what the machine refuses.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self._mapping: _Mapping | None = None
        if not is_region_name(name):
            raise RegionError(f"{name!r} is not the name of a region.")
        self.is_owned = False
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RegionError(f"{self.path} is not a file.")
            locks = SlotLocks(fd)
            # Whoever removes the region has this lock meanwhile.
            locks.take_file()
            facts = os.fstat(fd)
            if not facts.st_nlink:
                raise FileNotFoundError(f"{self.path} was removed")
            self.nbytes = facts.st_size
            self.mode = stat.S_IMODE(facts.st_mode)
            if not self.nbytes:
                raise RegionError(f"{self.path} is empty.")
            mapping = _Mapping(fd, self.nbytes, flags=mmap.MAP_SHARED)
            mapping.locks = locks
            self._mapping = mapping
        finally:
            os.close(fd)

    @property
    def locks(self) -> SlotLocks:
        """The locks that this process has on the slots."""
        if self._mapping is None:
            raise RegionError(f"region {self.name} is closed.")
        return self._mapping.locks

    @property
    def is_removed(self) -> bool:
        """Whether nobody can find it any more."""
        return not os.path.exists(self.path)

    @property
    def view(self) -> memoryview:
        """All bytes, to be read."""
        view: memoryview = self.array(0, self.nbytes).data
        return view.toreadonly()

    def populate(self, offset: int, nbytes: int) -> None:
        """Map pages now that would be mapped one by one as they are used."""
        if self._mapping is not None:
            touch(self._mapping, offset, nbytes)

    def take_over(self) -> None:
        """Have `close` remove the name: the process that made it leaves that to us."""
        self.is_owned = True

    def close(self) -> None:
        """Let go of the memory; live arrays stay valid, and keep what is locked."""
        if self.is_owned:
            # Gone already, or not to be removed: cleaning finds that nobody uses it.
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.leave()

    def hand_over(self) -> None:
        """Leave the name to another process."""
        self.is_owned = False

    def leave(self) -> None:
        """As `close`, but the name stays in any case."""
        self.is_owned = False
        if self._mapping is not None:
            self._mapping.locks.give_back_file()
        self._mapping = None

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else "open"
        return f"<OpenedRegion {self.name} {self.nbytes} bytes {state}>"
