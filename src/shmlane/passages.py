"""What is in flight of a stream: one slot, with one item after the other.

Owns which item a slot has now, and when its request may leave. Refuses to choose items
and to wait for replies (`streams`).
"""

from __future__ import annotations

import math
import time
from typing import Generic, TypeVar

from .flights import Flight
from .leases import BaseLease
from .options import RequestOptions

L = TypeVar("L", bound=BaseLease)


class Passage(Flight, Generic[L]):
    """The request of one item, and of others after it when its result was read."""

    __slots__ = ("epoch", "item", "lease", "number")

    def __init__(
        self,
        lease: L,
        limit: float | None,
        options: RequestOptions | None,
        *,
        number: int,
        item: object,
    ) -> None:
        slot = lease._slot
        assert slot is not None
        Flight.__init__(self, slot, 0, limit, options)
        self.lease = lease
        self.number = number
        self.item = item
        self.epoch = slot.epoch

    def depart(self) -> None:
        """The item was written: its time begins, and whatever was read before expires.

        Raises why it cannot be sent.
        """
        lease, slot, given = self.lease, self.slot, self.lease._given
        if lease._slot is None or slot.server_hold or ~given & slot.required:
            raise lease._not_ready(lease._slot)
        self.epoch = slot.epoch = slot.epoch + 1
        # As `Flight.__init__`, without a call: the next request on the same slot.
        self.given = given
        self.begun = begun = time.monotonic()
        limit = self.limit
        self.when = math.inf if limit is None else begun + limit
        self.attempt = 0
        self.replayed = False
