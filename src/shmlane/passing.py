"""What a session passes to other processes, and takes from them.

Owns which way a slot goes: shared for whoever claims it, lent by its home, handed on by
its borrower, taken back or adopted. Refuses to know when it comes back (`lending`) and
what becomes of it meanwhile (`borrowing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .borrowing import Borrower
from .calls import ServerCalls
from .errors import UsageError
from .handoff import SessionHandle, SlotRef
from .lending import Lender
from .memory import SessionMemory
from .metadata import ModelMetadata
from .regions import Region
from .settings import Settings
from .sharing import told_of
from .slots import Holder, Slot
from .timing import Deadline


class Passing:
    """The doors of one opened session. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        metadata: ModelMetadata,
        calls: ServerCalls,
        memory: SessionMemory,
        lender: Lender,
        borrower: Borrower,
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._calls = calls
        self._memory = memory
        self._lender = lender
        self._borrower = borrower

    def share(self, count: int) -> SessionHandle:
        """Make and register slots for whoever claims them; on error nothing stays."""
        self._check_shared("share slots")
        told = told_of(self._settings, self._metadata)
        region, slots = self._memory.make_shared(count, told)
        deadline = Deadline(self._settings.timeouts.infer)
        with contextlib.ExitStack() as undo:
            undo.callback(self._withdraw_shared, region, slots)
            with contextlib.closing(self._calls.connect(deadline)) as channel:
                for slot in slots:
                    self._calls.register(slot, channel, deadline)
            self._memory.share(region)
            undo.pop_all()
        return SessionHandle(region.name)

    def _withdraw_shared(self, region: Region, slots: Sequence[Slot]) -> None:
        # Nobody has its name.
        region.take_over()
        if self._calls.unregister(slots):
            region.close()
            self._calls.unregister_doubtful(slots)
        else:
            region.leave()

    def needs_opening(self, ref: SlotRef | str) -> bool:
        """Whether to `open` the slot's region before `adopt`, which waits otherwise."""
        ref = self._checked(ref)
        return not (self._lender.has_out(ref) or self._borrower.has_open(ref))

    def open(self, ref: SlotRef | str) -> None:
        self._borrower.open(self._checked(ref))

    def adopt(self, ref: SlotRef | str, lease: Holder) -> int:
        """Give `lease` a slot that was handed over; the bits of its given inputs."""
        ref = self._checked(ref)
        if self._lender.has_out(ref):
            return self._lender.take_back(ref, lease)
        return self._borrower.adopt(ref, lease)

    def hand_over(self, lease: Holder, slot: Slot, given: int) -> SlotRef:
        """Have another process use the slot of `lease`, which has none then."""
        self._check_shared("detach leases")
        lender = self._borrower.hand_on if slot.is_borrowed else self._lender.lend
        return lender(lease, slot, given)

    def _checked(self, ref: SlotRef | str) -> SlotRef:
        """The reference, which may come as its text."""
        self._check_shared("adopt slots")
        return ref if isinstance(ref, SlotRef) else SlotRef.parse(ref)

    def _check_shared(self, what: str) -> None:
        if not self._memory.is_shared:
            raise UsageError(
                f"a session whose tensors go over the wire cannot {what}.",
                hint='Only shared memory can be handed over: Session(memory="system").',
            )

    def __repr__(self) -> str:
        return f"<Passing {self._lender!r} {self._borrower!r}>"
