"""Arithmetic only: where each tensor of a slot lies, and how much room it has.

Owns the byte offsets that follow from what a model says. Refuses to touch memory or
sockets. Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .errors import TensorMismatch, UsageError
from .metadata import ModelMetadata, Shape, TensorSpec, lookup
from .regions import PAGE_BYTES, round_up

# Largest sizes by name: a shape, or a number of bytes where the datatype is BYTES.
Sizes = Mapping[str, Iterable[int] | int]

# 64 bytes: one cache line, and the widest vector load.
TENSOR_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of every slot: where its block starts and how much it holds.

    default: the shape at the start of each lease, None where the caller must say it.
    capacity: bytes of the block; a larger shape moves the tensor to a block of its own.
    """

    spec: TensorSpec
    is_input: bool
    default: Shape | None
    offset: int
    capacity: int


class Room(NamedTuple):
    """How large a tensor can get, and its shape until a caller says another."""

    default: Shape | None
    nbytes: int

    @classmethod
    def of(cls, spec: TensorSpec, shape: Shape | None) -> Room:
        return cls(shape, 0 if shape is None else spec.nbytes(shape))


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The blocks of one slot. Every slot of a region has the same layout."""

    tensors: tuple[TensorPlan, ...]
    nbytes: int

    @classmethod
    def plan(
        cls,
        metadata: ModelMetadata,
        *,
        shapes: Sizes | None = None,
        outputs: Iterable[str] | Sizes | None = None,
    ) -> SlotLayout:
        """Decide the blocks from the model and the largest sizes declared."""
        given = _declared(metadata.inputs, shapes or {}, "input")
        batches = [room.default[0] for room in given.values() if room.default]
        batch = max(batches, default=1)
        inputs = [
            (spec, given.get(spec.name) or _default_room(spec, batch))
            for spec in metadata.inputs.values()
        ]
        tensors: list[TensorPlan] = []
        offset = 0
        for is_input, chosen in (
            (True, inputs),
            (False, _chosen_outputs(metadata, outputs, batch)),
        ):
            for spec, room in chosen:
                plan = TensorPlan(spec, is_input, room.default, offset, room.nbytes)
                tensors.append(plan)
                offset = round_up(offset + room.nbytes, TENSOR_ALIGNMENT)
        # A page at least: two slots never share one, and every slot has memory.
        return cls(tuple(tensors), round_up(max(offset, 1), PAGE_BYTES))


def _declared(
    specs: Mapping[str, TensorSpec], sizes: Sizes, kind: str
) -> dict[str, Room]:
    return {
        name: _declared_room(lookup(specs, name, kind), size)
        for name, size in sizes.items()
    }


def _declared_room(spec: TensorSpec, size: Iterable[int] | int) -> Room:
    """What a caller says a tensor can grow to: a shape, or bytes where it is BYTES."""
    if spec.is_bytes:
        if type(size) is not int or size < 0:
            raise TensorMismatch(
                f"tensor {spec.name!r} is BYTES, whose size does not follow from its"
                f" shape; given was {size!r}.",
                hint="Give the most bytes that it can have, as one number: each element"
                " takes 4 and its own.",
                tensor=spec.name,
                given=size,
            )
        return Room(None, size)
    # One number is no shape either: `check_shape` says so.
    shape = (size,) if isinstance(size, int) else size
    return Room.of(spec, spec.check_shape(shape))


def _default_room(spec: TensorSpec, batch: int) -> Room:
    """What follows from the model and the batch size alone."""
    if spec.is_fixed:
        return Room.of(spec, spec.shape)
    if spec.is_fixed_but_for_batch:
        return Room.of(spec, (batch, *spec.shape[1:]))
    return Room(None, 0)


def _chosen_outputs(
    metadata: ModelMetadata, outputs: Iterable[str] | Sizes | None, batch: int
) -> list[tuple[TensorSpec, Room]]:
    """The outputs that are wanted, in the caller's order."""
    if isinstance(outputs, str):
        raise UsageError(f"outputs={outputs!r} is one string; give a list of names.")
    asked = list(metadata.outputs if outputs is None else outputs)
    if not all(isinstance(name, str) for name in asked):
        raise UsageError(f"outputs={outputs!r}: give names of outputs.")
    # Each name once, as every slot has one block of that name.
    names = dict.fromkeys(asked)
    if not names:
        raise UsageError("outputs=[] asks for nothing; name at least one output.")
    sizes = outputs if isinstance(outputs, Mapping) else {}
    declared = _declared(metadata.outputs, sizes, "output")
    specs = [lookup(metadata.outputs, name, "output") for name in names]
    return [
        (spec, declared.get(spec.name) or _default_room(spec, batch)) for spec in specs
    ]
