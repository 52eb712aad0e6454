"""Arithmetic only: where each tensor of a slot lies, and how much room it has.

Owns the byte offsets that follow from what a model says. Refuses to touch memory or
sockets. Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import UsageError
from .metadata import ModelMetadata, Shape, TensorSpec, lookup
from .regions import PAGE_BYTES, round_up

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
        shapes: Mapping[str, Iterable[int]] | None = None,
        outputs: Iterable[str] | Mapping[str, Iterable[int]] | None = None,
    ) -> SlotLayout:
        """Decide the blocks from the model and the largest shapes declared."""
        given = _declared(metadata.inputs, shapes or {}, "input")
        batch = max([shape[0] for shape in given.values() if shape], default=1)
        tensors: list[TensorPlan] = []
        offset = 0
        for spec, is_input, default in [
            *(
                (s, True, _largest_input(s, given, batch))
                for s in metadata.inputs.values()
            ),
            *((s, False, d) for s, d in _chosen_outputs(metadata, outputs, batch)),
        ]:
            capacity = 0 if default is None else spec.nbytes(default)
            tensors.append(TensorPlan(spec, is_input, default, offset, capacity))
            offset = round_up(offset + capacity, TENSOR_ALIGNMENT)
        # A page at least: two slots never share one, and every slot has memory.
        return cls(tuple(tensors), round_up(max(offset, 1), PAGE_BYTES))


def _declared(
    specs: Mapping[str, TensorSpec], shapes: Mapping[str, Iterable[int]], kind: str
) -> dict[str, Shape]:
    return {
        name: lookup(specs, name, kind).check_shape(shape)
        for name, shape in shapes.items()
    }


def _largest_input(
    spec: TensorSpec, declared: Mapping[str, Shape], batch: int
) -> Shape | None:
    if spec.name in declared:
        return declared[spec.name]
    if spec.is_fixed:
        return spec.shape
    return (batch, *spec.shape[1:]) if spec.is_fixed_but_for_batch else None


def _chosen_outputs(
    metadata: ModelMetadata,
    outputs: Iterable[str] | Mapping[str, Iterable[int]] | None,
    batch: int,
) -> list[tuple[TensorSpec, Shape | None]]:
    """The wanted outputs with the largest shape of each, None where nobody knows it."""
    if isinstance(outputs, str):
        raise UsageError(f"outputs={outputs!r} is one string; give a list of names.")
    # Each name once, as every slot has one block of that name.
    names = dict.fromkeys(metadata.outputs if outputs is None else outputs)
    sizes = outputs if isinstance(outputs, Mapping) else {}
    declared = _declared(metadata.outputs, sizes, "output")
    chosen: list[tuple[TensorSpec, Shape | None]] = []
    for name in names:
        spec = lookup(metadata.outputs, name, "output")
        largest = declared.get(name, spec.shape if spec.is_fixed else None)
        if largest is None and spec.is_fixed_but_for_batch:
            largest = (batch, *spec.shape[1:])
        chosen.append((spec, largest))
    if not chosen:
        raise UsageError("outputs=[] asks for nothing; name at least one output.")
    return chosen
