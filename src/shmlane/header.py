"""The first bytes of a region: who owns it, what it serves, what lies where.

Owns the documented format, so that listings, other processes and other languages can
read a region. Refuses to decide anything: it packs and parses.

All numbers are little-endian; offsets count from the start of the file.

    offset  size  field
         0     8  magic b"shmlane\\0"
         8     4  format version (1)
        12     4  number of slots
        16     8  offset of the slot table: one record of 64 bytes per slot
        24     8  offset of the first slot (a multiple of the page size)
        32     8  bytes from one slot to the next (a multiple of the page size)
        40     8  offset of the description (UTF-8 JSON)
        48     8  length of the description

A slot record starts with one byte that is 1 from before a request is sent until its
reply is complete: a slot whose owner died with the byte set may still be written to.
The description is an object: "pid" of the owner, "server", "model", and "tensors", a
list with "name", "datatype", "kind" ("input" or "output"), "offset" in the slot and
"capacity" (both bytes) of each tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RegionError
from .layout import SlotLayout
from .regions import PAGE_BYTES, round_up

MAGIC = b"shmlane\0"
VERSION = 1
SLOT_RECORD_BYTES = 64

_FIXED = struct.Struct("<8sIIQQQQQ")


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Where things lie in one region."""

    slots: int
    table_offset: int
    first_slot: int
    stride: int
    description: Mapping[str, Any]

    @classmethod
    def plan(
        cls, layout: SlotLayout, slots: int, *, pid: int, server: str, model: str
    ) -> RegionHeader:
        description = {
            "pid": pid,
            "server": server,
            "model": model,
            "tensors": [
                {
                    "name": plan.spec.name,
                    "datatype": plan.spec.datatype,
                    "kind": "input" if plan.is_input else "output",
                    "offset": plan.offset,
                    "capacity": plan.capacity,
                }
                for plan in layout.tensors
            ],
        }
        # A cache line of its own for each slot's record, behind the fixed part.
        table_offset = round_up(_FIXED.size, SLOT_RECORD_BYTES)
        text = table_offset + slots * SLOT_RECORD_BYTES + len(json.dumps(description))
        return cls(
            slots, table_offset, round_up(text, PAGE_BYTES), layout.nbytes, description
        )

    @property
    def region_bytes(self) -> int:
        return self.first_slot + self.slots * self.stride

    def slot_offset(self, index: int) -> int:
        return self.first_slot + index * self.stride

    def record_offset(self, index: int) -> int:
        return self.table_offset + index * SLOT_RECORD_BYTES

    def pack(self) -> bytes:
        text = json.dumps(self.description).encode()
        text_offset = self.record_offset(self.slots)
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            self.slots,
            self.table_offset,
            self.first_slot,
            self.stride,
            text_offset,
            len(text),
        )
        return fixed.ljust(text_offset, b"\0") + text

    @classmethod
    def parse(cls, data: bytes) -> RegionHeader:
        """Read the header at the start of `data`; `RegionError` if it is not one."""
        try:
            magic, version, slots, table, first, stride, offset, length = (
                _FIXED.unpack_from(data)
            )
            if magic != MAGIC:
                raise RegionError("this file is not a shmlane region.")
            if version != VERSION:
                raise RegionError(
                    f"this is a shmlane region of version {version}; this shmlane reads"
                    f" version {VERSION}."
                )
            text = data[offset : offset + length]
            if len(text) != length:
                raise RegionError("the region header is cut short.")
            description = json.loads(text)
            if not isinstance(description, dict):
                raise ValueError("its description is no object")
            return cls(slots, table, first, stride, description)
        except (struct.error, ValueError, RecursionError) as error:
            raise RegionError(f"the region header cannot be read: {error}.") from error
