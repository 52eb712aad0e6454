"""What a caller holds: a lease on a slot's inputs, and the result of an inference.

Owns the checks between a caller and a slot: names, shapes, datatypes, what was given
and what has expired. Refuses to wait; sending is added by the sessions. A lease belongs
to one thread at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from .elements import Elements, decode
from .errors import (
    InputMissing,
    LeaseBusy,
    LeaseExpired,
    ShmlaneError,
    TensorMismatch,
    UsageError,
)
from .exchange import Answer
from .metadata import Array, Shape, unknown_tensor
from .slots import Holder, Slot
from .sources import as_array
from .tensors import COUNTS_ARE_EXACT, Tensor


class LeaseHost(Protocol):
    """What a lease asks of its session."""

    def _why_unusable(self) -> ShmlaneError | None: ...
    def _give_back(self, lease: Holder) -> None: ...
    def _grow(self, slot: Slot, tensor: Tensor, nbytes: int) -> None: ...


class Result(Mapping[str, Array]):
    """The outputs of one inference, by name: writable arrays over the slot's memory.

    What came over the wire lies in memory of its own; BYTES are copies.

    Valid until the lease ends or infers again; then `LeaseExpired`. Arrays taken before
    stay readable for as long as anybody holds them, and keep their slot from being used
    again; the next `infer` of the same lease writes over them. `copy` gives arrays that
    hold nothing.
    """

    __slots__ = ("_answer", "_epoch", "_slot")

    def __init__(self, slot: Slot, epoch: int, answer: Answer) -> None:
        self._slot = slot
        self._epoch = epoch
        self._answer = answer

    def __getitem__(self, name: str) -> Array:
        slot = self._slot
        if slot.epoch != self._epoch:
            raise _expired()
        try:
            tensor = slot.outputs[name]
        except KeyError:
            raise unknown_tensor(slot.outputs, name, "output") from None
        if self._answer.wire and name in self._answer.wire:
            return self._answer.wire[name]
        if tensor.is_bytes:
            return decode(tensor.root.data, tensor.shape or ())
        view: Array = tensor.array[...]
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot.outputs)

    def __len__(self) -> int:
        return len(self._slot.outputs)

    def copy(self) -> dict[str, Array]:
        """All outputs as arrays of their own, which outlive the lease."""
        return {name: self[name].copy() for name in self}

    def _take(self) -> dict[str, Array]:
        """As `copy`, for the last to look at this: what lies in no slot is not copied.

        Arrays that came over the wire lie in memory that is theirs while they live.
        """
        return {
            name: self[name].copy() if self._is_in_slot(name) else self[name]
            for name in self
        }

    def _is_in_slot(self, name: str) -> bool:
        is_bytes = self._slot.outputs[name].is_bytes
        return name not in self._answer.wire and not is_bytes

    @property
    def model_version(self) -> str:
        """The version that answered."""
        return self._answer.reply.model_version

    @property
    def request_id(self) -> str:
        """The id that the caller gave the request, "" if none."""
        return self._answer.request_id

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters that the model attached to the response."""
        return self._answer.reply.parameters

    def __repr__(self) -> str:
        if self._slot.epoch != self._epoch:
            return "<Result expired>"
        wire = self._answer.wire
        shapes = (
            f"{name} {list(wire[name].shape if name in wire else tensor.shape or ())}"
            for name, tensor in self._slot.outputs.items()
        )
        return f"<Result {', '.join(shapes)}>"


class BaseLease(Holder):
    """The right to use one slot until `release` or the end of the `with` block.

    It is made before it is given its slot: whoever is interrupted meanwhile drops it,
    and what it holds by then goes back.
    """

    __slots__ = ("_given", "_host", "_slot")

    def __init__(self, host: LeaseHost) -> None:
        self._hold = [None, None]
        self._host = host
        self._slot: Slot | None = None
        self._given = 0

    def _begin(self) -> None:
        """The lease has its slot, and is the caller's from now on."""
        slot = self._slot = self._hold[1]
        slot.leased = True
        if not COUNTS_ARE_EXACT:
            slot.renew_arrays()

    def __getitem__(self, name: str) -> Array:
        """The input `name` as a writable array over shared memory, to be filled.

        It has the shape last asked for in this lease with `view` or `write`, else the
        one that `Session(shapes=)` declared, else the model's (batch 1 if only the
        batch size is open). What it contains at first is undefined. Raises
        `UnknownTensor`, `LeaseExpired`, `LeaseBusy`, and `TensorMismatch` where no
        shape was ever said.
        """
        slot = self._slot
        if slot is None or slot.server_hold:
            raise self._unusable(slot)
        try:
            tensor = slot.inputs[name]
        except KeyError:
            raise unknown_tensor(slot.inputs, name, "input") from None
        given = self._given
        if not given & tensor.view_bit:
            if tensor.is_bytes:
                raise _no_view(tensor)
            if tensor.shape != tensor.default:
                self._take_default(slot, tensor)
            elif tensor.shape is None:
                raise _shape_unknown(tensor)
            self._given = given | tensor.bit
        view: Array = tensor.array[...]
        return view

    def __setitem__(self, name: str, array: object) -> None:
        """Not offered: it would leave open whether the array is copied or kept."""
        raise UsageError(
            f"an input is not replaced but filled: lease[{name!r}][...] = array, or"
            f" lease.write({name!r}, array)."
        )

    def view(self, name: str, shape: Iterable[int]) -> Array:
        """The input `name` with another shape, as a writable array over shared memory.

        Do not write through earlier views of this input any more: they may lie over the
        same bytes, or over none of the request. A shape larger than ever before moves
        the input to a new region, which takes milliseconds. Raises `TensorMismatch` for
        a shape that the model does not allow, and `OutOfSharedMemory`; the lease stays
        usable.
        """
        slot = self._slot
        if slot is None or slot.server_hold:
            raise self._unusable(slot)
        return self._view(slot, name, shape)

    def _view(self, slot: Slot, name: str, shape: Iterable[int]) -> Array:
        tensor = self._input(slot, name)
        if tensor.is_bytes:
            raise _no_view(tensor)
        self._reshape(slot, tensor, shape)
        self._given |= tensor.bit
        view: Array = tensor.array[...]
        return view

    def write(self, name: str, array: Any, *, cast: bool = False) -> None:
        """Copy `array` into the input `name`, in one pass, whatever its strides.

        Takes arrays of any kind that lie in this machine's memory, lists and scalars;
        for BYTES, text and bytes. The datatype must be the input's unless `cast` allows
        any conversion that NumPy knows. Raises `TensorMismatch` before anything is
        written, or where a value cannot be converted: the input then counts as not
        given. The interpreter is free for other threads while it copies.
        """
        slot = self._slot
        if slot is None or slot.server_hold:
            raise self._unusable(slot)
        self._write(slot, name, array, cast=cast)

    def _write(self, slot: Slot, name: str, array: Any, *, cast: bool) -> None:
        tensor = self._input(slot, name)
        # Whatever ends this early, what is half written is not sent.
        self._given &= ~tensor.bit
        if tensor.is_bytes:
            self._write_elements(slot, tensor, array, cast=cast)
        else:
            self._fill(slot, tensor, _source(tensor, array, cast=cast))
        self._given |= tensor.bit

    def _fill(self, slot: Slot, tensor: Tensor, source: Array) -> None:
        self._reshape(slot, tensor, _filled_shape(tensor, source.shape))
        try:
            np.copyto(tensor.array, source, casting="unsafe")
        except (TypeError, ValueError, OverflowError) as error:
            raise TensorMismatch(
                f"input {tensor.name!r} cannot take what was given: {error}.",
                tensor=tensor.name,
            ) from error

    def _write_elements(
        self, slot: Slot, tensor: Tensor, source: Any, *, cast: bool
    ) -> None:
        elements = Elements.of(source, name=tensor.name, cast=cast)
        shape = tensor.spec.check_shape(_filled_shape(tensor, elements.shape))
        if elements.nbytes > tensor.capacity:
            self._host._grow(slot, tensor, elements.nbytes)
        if (shape, elements.nbytes) != (tensor.shape, tensor.nbytes):
            slot.reshape(tensor, shape, elements.nbytes)
        elements.write_into(tensor.root.data[: elements.nbytes])

    def _lend(self, name: str, array: Any, *, cast: bool) -> None:
        """As `write`, but send the caller's own memory where that can be done.

        Only for callers who wait for the reply: the array must not change until then.
        """
        slot = self._slot
        if slot is not None and not slot.is_shared and not slot.server_hold:
            tensor = self._input(slot, name)
            if not tensor.is_bytes:
                array = _source(tensor, array, cast=cast)
                if array.dtype == tensor.spec.dtype and array.flags.c_contiguous:
                    self._reshape(slot, tensor, _filled_shape(tensor, array.shape))
                    slot.lend(tensor, array)
                    self._given |= tensor.bit
                    return
        self.write(name, array, cast=cast)

    def release(self) -> None:
        """Give the slot back; doing so again does nothing.

        Views that are still alive keep their content; the slot is not used again while
        they live. A request that is still unanswered keeps the slot until its reply.
        """
        self._slot = None
        if self._hold:
            self._host._give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slot = None
        if self._hold:
            self._host._give_back(self)

    def __del__(self) -> None:
        # As `held`, for less; interrupted while it was made, it has nothing.
        hold = getattr(self, "_hold", None)
        if not hold or hold[-1] is None:
            return
        # One that no caller has got yet goes back in silence.
        state = "" if self._slot is None else repr(self)
        self.release()
        if state:
            warnings.warn(
                f"{state} was dropped without release; use it in a with block.",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _input(self, slot: Slot, name: str) -> Tensor:
        try:
            return slot.inputs[name]
        except KeyError:
            raise unknown_tensor(slot.inputs, name, "input") from None

    def _reshape(self, slot: Slot, tensor: Tensor, shape: Iterable[int]) -> None:
        # The shape that it has needs no check.
        if type(shape) is tuple and shape == tensor.shape:
            return
        checked = tensor.spec.check_shape(shape)
        nbytes = tensor.spec.nbytes(checked)
        if nbytes > tensor.capacity:
            self._host._grow(slot, tensor, nbytes)
        if checked != tensor.shape:
            slot.reshape(tensor, checked)

    def _take_default(self, slot: Slot, tensor: Tensor) -> None:
        # What an earlier lease chose is not this one's shape.
        if tensor.default is None:
            raise _shape_unknown(tensor)
        slot.reshape(tensor, tensor.default)

    def _unusable(self, slot: Slot | None) -> ShmlaneError:
        """Why this lease cannot be used now."""
        if (reason := self._host._why_unusable()) is not None:
            return reason
        if slot is None:
            return LeaseExpired(
                "this lease was released: its slot may serve another caller by now.",
                hint="Take a new one with session.lease().",
            )
        return LeaseBusy(
            "this lease still waits for the reply of its last request, to which its"
            " inputs and outputs belong until then.",
            hint="Release it and take another lease.",
        )

    def _not_ready(self, slot: Slot | None) -> ShmlaneError:
        """Why this lease cannot send now."""
        if slot is None or slot.server_hold:
            return self._unusable(slot)
        missing = [
            tensor.name
            for tensor in slot.inputs.values()
            if tensor.bit & slot.required & ~self._given
        ]
        return InputMissing(
            f"nothing was written to input {', '.join(map(repr, missing))} in this"
            " lease; sending it would send an earlier caller's data.",
            hint="Fill lease[name] or lease.write(name, ...); infer({...}) needs all.",
            missing=missing,
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {'released' if self._slot is None else repr(self._slot)}>"


def _expired() -> LeaseExpired:
    return LeaseExpired(
        "this result has expired: its slot may serve another caller by now.",
        hint="Use it in its with block, before the next infer; .copy() outlives it.",
    )


def _source(tensor: Tensor, given: Any, *, cast: bool) -> Array:
    spec = tensor.spec
    return as_array(
        given, spec.dtype, name=spec.name, datatype=spec.datatype, cast=cast
    )


def _filled_shape(tensor: Tensor, shape: Shape) -> Shape:
    """The shape that the input takes; one element fills a tensor of one element."""
    spec = tensor.spec
    if not shape and spec.shape and all(size in (1, -1) for size in spec.shape):
        return (1,) * len(spec.shape)
    return shape


def _no_view(tensor: Tensor) -> UsageError:
    return UsageError(
        f"input {tensor.name!r} is BYTES: its elements have no fixed place in memory"
        " that could be viewed.",
        hint=f"Give them with lease.write({tensor.name!r}, array).",
        tensor=tensor.name,
    )


def _shape_unknown(tensor: Tensor) -> TensorMismatch:
    return TensorMismatch(
        f"input {tensor.name!r} has no shape yet: the model allows"
        f" {list(tensor.spec.shape)} (-1 is any size).",
        hint="Say it with lease.view(name, shape) or lease.write(name, array), or give"
        " Session(shapes={name: largest shape}).",
        tensor=tensor.name,
    )
