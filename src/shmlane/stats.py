"""What a session counts, as one value to read or export.

Owns the names of the counters. Refuses to count: that is done where things happen, in
plain integers.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory import SessionMemory
from .pool import SlotPool
from .receiver import Receiver
from .slots import Label


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Counters since a session was opened, and its slots as they are now.

    free, leased, in_flight, late, lost, pinned, lent: slots by state; they add up to
    `slots`. adopted: slots of other processes that are in use here.
    spare_slots: slots added because views kept the others. waits: leases that waited.
    connections, registrations: made, the first ones included. reregistrations: those of
    them that replaced a registration. retries: requests sent again; reruns: those of
    them for which the model ran again, because an output did not fit. growths: tensors
    moved to a larger block. late_replies, drains: slots that came back after their
    caller had left. retired: slots given up because an old server cannot prove that a
    lost request is over. shared_bytes: bytes of all regions.
    """

    slots: int = 0
    free: int = 0
    leased: int = 0
    in_flight: int = 0
    late: int = 0
    lost: int = 0
    pinned: int = 0
    lent: int = 0
    adopted: int = 0
    spare_slots: int = 0
    waits: int = 0
    connections: int = 0
    registrations: int = 0
    reregistrations: int = 0
    retries: int = 0
    reruns: int = 0
    growths: int = 0
    late_replies: int = 0
    drains: int = 0
    retired: int = 0
    shared_bytes: int = 0

    @classmethod
    def collect(
        cls,
        pool: SlotPool,
        memory: SessionMemory,
        receiver: Receiver,
        *,
        connections: int,
        registrations: int,
        retries: int,
        reruns: int,
        adopted: int,
    ) -> SessionStats:
        counts = pool.counts()
        slots = tuple(pool.slots)
        return cls(
            slots=len(slots),
            free=counts[Label.FREE],
            leased=counts[Label.LEASED],
            in_flight=counts[Label.IN_FLIGHT],
            late=counts[Label.LATE],
            lost=counts[Label.LOST],
            pinned=counts[Label.PINNED],
            lent=counts[Label.LENT],
            adopted=adopted,
            spare_slots=pool.spare_slots,
            waits=pool.waits,
            connections=connections,
            registrations=registrations,
            reregistrations=sum(slot.renewals for slot in slots),
            retries=retries,
            reruns=reruns,
            growths=memory.growths,
            late_replies=receiver.late_replies,
            drains=receiver.drains,
            retired=receiver.retired,
            shared_bytes=memory.nbytes if memory.is_shared else 0,
        )
