"""The regions of one session: made, cut into slots, grown, counted, removed.

Owns which region files exist for a session and how many bytes they hold together.
Refuses to register anything with a server and to decide who uses a slot.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from .errors import OutOfSharedMemory, PoolClosed, RegionError
from .header import RegionHeader
from .layout import SlotLayout, TensorPlan
from .lifetimes import Weakly
from .opened import OpenedRegion
from .private import PrivateMemory
from .regions import PAGE_BYTES, Region, RegionOptions, round_up
from .slots import Slot
from .tensors import Memory, Tensor


class SessionMemory:
    """Makes slots for a session. Thread-safe.

    is_shared: whether the server sees the memory; if not, tensors go over the wire.
    """

    def __init__(
        self,
        layout: SlotLayout,
        *,
        options: RegionOptions,
        server: str,
        model: str,
        is_shared: bool = True,
    ) -> None:
        self.layout = layout
        self.is_shared = is_shared
        self.growths = 0
        self._options = options
        self._server = server
        self._model = model
        self._lock = threading.Lock()
        self._regions: list[Memory] = []
        self._extensions: Weakly[Memory] = Weakly()
        self._shared: list[Region] = []
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that the session made and has not handed over."""
        regions: list[Memory] = [*self._regions, *self._extensions]
        own = [region.nbytes for region in regions if region.is_owned]
        return sum(own) + sum([region.nbytes for region in self._shared])

    @property
    def region_names(self) -> list[str]:
        """Those that slots of this session were cut from."""
        return [region.name for region in self._regions]

    def make_slots(self, count: int) -> list[Slot]:
        """A new region cut into `count` slots."""
        header = self._header(self.layout, count)
        with self._lock:
            region = self._make_region(header)
            self._regions.append(region)
        self._check_open(region)
        return [Slot(index, region, header, self.layout) for index in range(count)]

    def make_shared(
        self, count: int, told: Mapping[str, Any]
    ) -> tuple[Region, list[Slot]]:
        """A new region cut into `count` slots for whoever claims them.

        told: what they need to know. Ours until it is given to `share`.
        """
        header = self._header(self.layout, count, told)
        with self._lock:
            region = self._make_region(header)
        self._check_open(region)
        assert isinstance(region, Region)
        slots = [Slot(index, region, header, self.layout) for index in range(count)]
        return region, slots

    def share(self, region: Region) -> None:
        """Have other processes use the region, also when this one is gone."""
        # First: whatever comes in between, it is removed when this is closed.
        self._shared.append(region)
        region.hand_over()
        if self._closed:
            region.leave()
            raise PoolClosed("the session is closed.")

    def grow(self, slot: Slot, tensor: Tensor, nbytes: int) -> None:
        """Give `tensor` a block of at least `nbytes` bytes in a region of its own.

        The block grows by half at least, so that slowly rising sizes cost few regions.
        The content is not kept. On error the tensor keeps its old block.
        """
        self._move(slot, tensor, max(nbytes, tensor.capacity * 3 // 2))
        self.growths += self.is_shared

    def grow_if_there_is_room(self, slot: Slot, tensor: Tensor, nbytes: int) -> None:
        """As `grow`; where the machine has no room, the tensor keeps its old block.

        Then it goes over the wire. The session's own limit is an error all the same.
        """
        try:
            self.grow(slot, tensor, nbytes)
        except RegionError as error:
            if "limit" in error.context:
                raise

    def move_outputs(self, slot: Slot) -> None:
        """New blocks for all outputs: a server that is out of reach may write the old.

        Inputs stay: a server only reads them, and what it makes of them goes nowhere.
        """
        for tensor in slot.outputs.values():
            if tensor.capacity:
                self._move(slot, tensor, tensor.capacity)

    def _move(self, slot: Slot, tensor: Tensor, nbytes: int) -> None:
        capacity = round_up(nbytes, PAGE_BYTES)
        plan = TensorPlan(
            tensor.spec, tensor.plan.is_input, tensor.default, 0, capacity
        )
        header = self._header(SlotLayout((plan,), capacity), 1)
        with self._lock:
            region = self._make_region(header)
            self._extensions.add(region)
        self._check_open(region)
        slot.extend(tensor, region, offset=header.first_slot, capacity=capacity)

    def open_extension(self, name: str) -> Memory:
        """Where another process has moved a tensor of ours to."""
        region = OpenedRegion(name)
        self._extensions.add(region)
        return region

    def close(self, *, leave: bool = False) -> list[str]:
        """Let go of the slots' regions; from here on none is made.

        leave: their names stay, for whoever cleans up after this session. Returns the
        shared ones, which others may still use.
        """
        # Without the lock, which a finaliser may meet: whoever makes a region looks at
        # this afterwards.
        self._closed = True
        for region in self._regions:
            region.leave() if leave else region.close()
        for shared in self._shared:
            shared.leave()
        return [shared.name for shared in self._shared]

    def _check_open(self, region: Memory) -> None:
        """Leave nothing behind of a session that closed while `region` was made."""
        if self._closed:
            region.close()
            raise PoolClosed("the session is closed.")

    def _header(
        self, layout: SlotLayout, slots: int, told: Mapping[str, Any] | None = None
    ) -> RegionHeader:
        return RegionHeader.plan(
            layout,
            slots,
            pid=os.getpid(),
            server=self._server,
            model=self._model,
            session=told,
        )

    def _make_region(self, header: RegionHeader) -> Memory:
        limit, wanted = self._options.max_bytes, self.nbytes + header.region_bytes
        if self.is_shared and limit is not None and wanted > limit:
            raise OutOfSharedMemory(
                f"the session would hold {wanted} bytes of shared memory, its limit is"
                f" {limit}.",
                hint="Raise RegionOptions(max_bytes=), or use fewer slots or smaller"
                " shapes.",
                wanted=wanted,
                limit=limit,
            )
        if not self.is_shared:
            return PrivateMemory(header.region_bytes)
        return Region(header.region_bytes, header=header.pack(), options=self._options)

    def __repr__(self) -> str:
        return f"<SessionMemory {len(self._regions)} regions {self.nbytes} bytes>"
