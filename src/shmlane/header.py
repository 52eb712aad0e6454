"""The first bytes of a region: who made it, what it serves, what lies where.

Owns the documented format, so that listings, other processes and other languages can
read a region. Refuses to decide anything: it packs and parses. docs/region-format.md
tells how to use it from other languages.

All numbers are little-endian; offsets count from the start of the file.

    offset  size  field
         0     8  magic b"shmlane\\0"
         8     4  format version (2)
        12     4  number of slots
        16     8  offset of the first slot's record (see `records`)
        24     8  offset of the first slot (a multiple of the page size)
        32     8  bytes from one slot to the next (a multiple of the page size)
        40     8  offset of the description (UTF-8 JSON)
        48     8  length of the description
        56     4  bytes from one slot's record to the next
        60     4  bytes of one tensor's entry in a record
        64     8  offset of the tensor table, one row of 64 bytes for each tensor
        72     4  number of tensors
        76     4  1 if processes may claim the slots, else 0

A row of the tensor table:

         0     8  offset of the tensor's block in each slot
         8     8  bytes of the block
        16     8  offset of the name (UTF-8)
        24     4  length of the name
        28     4  0 for an input, 1 for an output
        32     8  datatype of Triton's, such as "FP32", filled up with zeros

The description is an object: "pid" of the process that made the region, "server",
"model", and "tensors", a list in the order of the table with "name", "datatype", "kind"
("input" or "output"), "offset" in the slot and "capacity" (both bytes) of each tensor,
and "shape", the one that it has until another is chosen, null if it has none. Where
processes may claim slots, "session" has what a session needs to know beside that.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import RegionError, ShmlaneError, TensorMismatch
from .layout import SlotLayout, TensorPlan
from .metadata import ModelMetadata, lookup
from .records import HEAD_BYTES, LINE_BYTES, MOST_DIMENSIONS, entry_bytes, record_bytes
from .regions import PAGE_BYTES, round_up

MAGIC = b"shmlane\0"
VERSION = 2

# What `RegionHeader.description` has of a tensor.
_Told = Mapping[str, Any]

_FIXED = struct.Struct("<8sIIQQQQQIIQII")
_ROW = struct.Struct("<QQQII8s")
_ROW_BYTES = 64
_MAGIC_AND_VERSION = struct.Struct("<8sI")


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Where things lie in one region."""

    slots: int
    records_offset: int
    first_slot: int
    stride: int
    record_stride: int
    entry_stride: int
    description: Mapping[str, Any]
    claimable: bool = False

    @classmethod
    def plan(
        cls,
        layout: SlotLayout,
        slots: int,
        *,
        pid: int,
        server: str,
        model: str,
        session: Mapping[str, Any] | None = None,
    ) -> RegionHeader:
        """session: what processes need to know that may claim slots, if they may.

        Raises `RegionError` for more bytes than any machine has.
        """
        # Before anything counts so far in 64 bits.
        if slots * layout.nbytes > sys.maxsize:
            raise RegionError(
                f"no machine has {slots * layout.nbytes} bytes of memory.",
                hint="Use fewer slots or smaller shapes.",
                nbytes=slots * layout.nbytes,
            )
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
                    "shape": plan.default,
                }
                for plan in layout.tensors
            ],
        }
        if session is not None:
            description["session"] = session
        ranks = [len(plan.spec.shape) for plan in layout.tensors]
        dimensions = min(max(ranks, default=0), MOST_DIMENSIONS)
        header = cls(
            slots,
            round_up(_FIXED.size, LINE_BYTES),
            0,
            layout.nbytes,
            record_bytes(len(layout.tensors), dimensions),
            entry_bytes(dimensions),
            # As it will be read: lists in the place of tuples.
            json.loads(json.dumps(description)),
            session is not None,
        )
        first_slot = round_up(len(header.pack()), PAGE_BYTES)
        return replace(header, first_slot=first_slot)

    @property
    def region_bytes(self) -> int:
        return self.first_slot + self.slots * self.stride

    def slot_offset(self, index: int) -> int:
        return self.first_slot + index * self.stride

    def record_offset(self, index: int) -> int:
        return self.records_offset + index * self.record_stride

    def layout(self, metadata: ModelMetadata) -> SlotLayout:
        """The blocks of each slot, for a session with the model of `metadata`.

        Raises `UsageError` where the model has other tensors, `RegionError` where the
        header does not say.
        """
        try:
            tensors = [_planned(each, metadata) for each in self.description["tensors"]]
        except (KeyError, TypeError) as error:
            if isinstance(error, ShmlaneError):
                raise
            raise RegionError(
                f"the region header does not tell its tensors: {error!r}."
            ) from error
        return SlotLayout(tuple(tensors), self.stride)

    def pack(self) -> bytes:
        """The header as a region begins with it: no slot was ever used."""
        tensors = self.description["tensors"]
        table = self.record_offset(self.slots)
        names = [each["name"].encode() for each in tensors]
        at = table + len(tensors) * _ROW_BYTES
        rows = b""
        for tensor, name in zip(tensors, names, strict=True):
            rows += _ROW.pack(
                tensor["offset"],
                tensor["capacity"],
                at,
                len(name),
                tensor["kind"] == "output",
                tensor["datatype"].encode(),
            ).ljust(_ROW_BYTES, b"\0")
            at += len(name)
        text = json.dumps(self.description).encode()
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            self.slots,
            self.records_offset,
            self.first_slot,
            self.stride,
            at,
            len(text),
            self.record_stride,
            self.entry_stride,
            table,
            len(tensors),
            self.claimable,
        )
        return fixed.ljust(table, b"\0") + rows + b"".join(names) + text

    @classmethod
    def parse(cls, data: bytes | memoryview) -> RegionHeader:
        """Read the header at the start of `data`; `RegionError` if it is not one."""
        try:
            magic, version = _MAGIC_AND_VERSION.unpack_from(data)
            if magic != MAGIC:
                raise RegionError("this file is not a shmlane region.")
            if version != VERSION:
                raise RegionError(
                    f"this is a shmlane region of version {version}; this shmlane reads"
                    f" version {VERSION}."
                )
            fields = _FIXED.unpack_from(data)
            slots, records, first, stride, offset, length, record, entry = fields[2:10]
            text = bytes(data[offset : offset + length])
            if len(text) != length:
                raise RegionError("the region header is cut short.")
            # Whoever counts slots counts no more than there can be.
            if record < HEAD_BYTES or records + slots * record > offset:
                raise ValueError(f"it has no room for the records of {slots} slots")
            description = json.loads(text)
            if not isinstance(description, dict):
                raise ValueError("its description is no object")
        except (struct.error, ValueError, RecursionError) as error:
            raise RegionError(f"the region header cannot be read: {error}.") from error
        return cls(
            slots, records, first, stride, record, entry, description, fields[-1] == 1
        )


def _planned(told: _Told, metadata: ModelMetadata) -> TensorPlan:
    """One tensor of a description, as it is in the model now."""
    is_input = told["kind"] == "input"
    specs = metadata.inputs if is_input else metadata.outputs
    spec = lookup(specs, told["name"], told["kind"])
    if spec.datatype != told["datatype"]:
        raise TensorMismatch(
            f"tensor {spec.name!r} is {spec.datatype} in the model now, and"
            f" {told['datatype']} in the region.",
            hint="The model was replaced: open its sessions anew.",
            tensor=spec.name,
        )
    shape = None if told["shape"] is None else spec.check_shape(told["shape"])
    return TensorPlan(spec, is_input, shape, told["offset"], told["capacity"])
