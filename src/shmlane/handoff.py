"""What one process gives another so that it can use a slot: a name and two numbers.

Owns these values and their text. Refuses to open anything: whoever has the value can do
with it what the file's permissions allow, and nothing secret is in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from .errors import UsageError
from .opened import is_region_name

_REF = re.compile(r"([a-z0-9.]+):([0-9]{1,9}):([0-9]{1,20})")


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One slot that was handed over, for whoever adopts it first.

    Made by `Lease.detach`, used by `Session.adopt`. It can be pickled, and is short as
    text as well: `str(ref)` and `SlotRef.parse`; `adopt` takes the text, too.
    generation: which of the hand-offs of the slot this is; another one is not meant by
    it.
    """

    region: str
    slot: int
    generation: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reference that `str` made a text of; `UsageError` if it is none."""
        match = _REF.fullmatch(str(text))
        if match is None or not is_region_name(match[1]):
            raise UsageError(
                f"{text!r} is no reference to a slot, such as"
                " shmlane.0123456789abcdef:0:1."
            )
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.region}:{self.slot}:{self.generation}"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.region, self.slot, self.generation))


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """Slots that processes can claim, for `Session.attach`.

    Made by `Session.share`. It can be pickled, and is a name as text: `str(handle)` and
    `SessionHandle.parse`.
    """

    region: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The handle that `str` made a text of; `UsageError` if it is none."""
        if not is_region_name(str(text)):
            raise UsageError(
                f"{text!r} is no handle of shared slots, such as"
                " shmlane.0123456789abcdef."
            )
        return cls(str(text))

    def __str__(self) -> str:
        return self.region

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.region,))
