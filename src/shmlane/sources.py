"""What may be written into an input of fixed-size elements, as one NumPy array.

Owns the ways in (arrays of any strides, buffers, the array interface, DLPack on the
CPU, Python lists and numbers) and what counts as the input's datatype. Refuses to copy:
the caller does, in one pass, with NumPy's own conversion. Only what has no memory of
its own, and bfloat16 where no type for it is installed, is made into an array first.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .datatypes import bfloat16_bits
from .errors import TensorMismatch

Array = npt.NDArray[Any]

# What one of these says is its memory or its type; lists and numbers have neither.
_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__", "__dlpack__")
# DLPack's numbers of memory that the CPU reads: its own, and pinned for CUDA or ROCm.
_HOST_DEVICES = (1, 3, 11)
# What foreign objects, and numbers of no machine type, raise when they are read.
_UNREADABLE = (
    TypeError,
    ValueError,
    RuntimeError,
    BufferError,
    AttributeError,
    OverflowError,
)
# From here on NumPy has no signed integers; with negative ones beside, it takes floats.
_LARGE = 2.0**63


def as_array(
    source: Any, spec_dtype: np.dtype[Any], *, name: str, datatype: str, cast: bool
) -> Array:
    """`source` as an array to copy from: `np.copyto(view, it, casting="unsafe")`.

    Its values then arrive exactly, unless `cast` allows any conversion that NumPy
    knows; a byte order that is not this machine's is no other datatype. Python numbers,
    which have no datatype, must fit: a float may be rounded, a whole number may not.
    For BF16, uint16 is bit patterns, and `cast` rounds to the nearest. Raises
    `TensorMismatch`.
    """
    if type(source) is np.ndarray and source.dtype == spec_dtype:
        return source
    wanted = _Wanted(name, datatype, spec_dtype, cast)
    try:
        array = _exported(source, wanted)
        if array is None:
            return _of_python(source, wanted)
        return _of_its_type(array, wanted)
    except TensorMismatch:
        raise
    except _UNREADABLE as error:
        raise wanted.unreadable(error) from error


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The input that takes the array."""

    name: str
    datatype: str
    dtype: np.dtype[Any]
    cast: bool

    def mismatch(
        self, what: str, hint: str = "", *, given: object = None
    ) -> TensorMismatch:
        return TensorMismatch(
            f"input {self.name!r} takes {self.datatype} ({self.dtype}), {what}",
            hint=hint,
            tensor=self.name,
            given=given,
        )

    def other_type(self, given: object) -> TensorMismatch:
        how = " (rounds to nearest)" if self.datatype == "BF16" else ""
        return self.mismatch(
            f"given was {given}.",
            f"Convert it, or allow it with cast=True{how}.",
            given=str(given),
        )

    def unreadable(self, error: Exception) -> TensorMismatch:
        why = str(error).rstrip(".")
        return TensorMismatch(
            f"input {self.name!r} cannot take what was given: {why}.", tensor=self.name
        )


# --- things with memory or a type of their own ----------------------------------------


def _exported(source: Any, wanted: _Wanted) -> Array | None:
    """The array over the memory of `source`; None if it has no datatype to keep."""
    if isinstance(source, np.ma.MaskedArray) and np.ma.is_masked(source):
        count = int(np.ma.getmaskarray(source).sum())
        raise wanted.mismatch(
            f"given was an array with {count} masked values.",
            "Say what stands in their places: array.filled(value).",
        )
    if isinstance(source, (np.ndarray, np.generic)):
        return np.asarray(source)
    if isinstance(source, (bytes, bytearray)) and wanted.datatype != "UINT8":
        raise wanted.mismatch(
            f"given was {type(source).__name__}.",
            f"np.frombuffer(data, np.{wanted.dtype.name}).reshape(shape) makes an array"
            " of it.",
        )
    _check_device(source, wanted)
    if not any(hasattr(source, each) for each in _PROTOCOLS):
        return _of_buffer(source)
    if getattr(source, "requires_grad", False) is True:
        source = source.detach()
    if str(getattr(source, "dtype", "")) == "torch.bfloat16":
        return _of_torch_bfloat16(source, wanted)
    if any(hasattr(source, each) for each in _PROTOCOLS[:-1]):
        return np.asarray(source)
    return np.from_dlpack(source)


def _of_buffer(source: Any) -> Array | None:
    try:
        view = memoryview(source)
    except TypeError:
        return None
    return np.asarray(view)


def _check_device(source: Any, wanted: _Wanted) -> None:
    told = getattr(source, "__dlpack_device__", None)
    is_on_host = int(told()[0]) in _HOST_DEVICES if told is not None else True
    if is_on_host and not hasattr(source, "__cuda_array_interface__"):
        return
    raise wanted.mismatch(
        f"given was {type(source).__name__} in the memory of a device, not of the CPU.",
        "Copy it first, as with tensor.cpu() or cupy.asnumpy(array).",
    )


def _of_torch_bfloat16(tensor: Any, wanted: _Wanted) -> Array:
    """PyTorch hands out no array of this type, but its bits."""
    if wanted.datatype == "BF16":
        return np.asarray(tensor.view(sys.modules["torch"].int16)).view(np.uint16)
    if wanted.cast:
        return np.asarray(tensor.float())
    raise wanted.other_type(tensor.dtype)


def _of_its_type(array: Array, wanted: _Wanted) -> Array:
    if array.dtype == wanted.dtype:
        return array
    if wanted.datatype == "BF16":
        return _of_bfloat16(array, wanted)
    if wanted.cast or array.dtype.newbyteorder("=") == wanted.dtype:
        return array
    raise wanted.other_type(array.dtype)


def _of_bfloat16(array: Array, wanted: _Wanted) -> Array:
    if array.dtype.newbyteorder("=") == np.uint16:
        return np.asarray(array, np.uint16).view(wanted.dtype)
    if not wanted.cast:
        raise wanted.other_type(array.dtype)
    has_type = wanted.dtype != np.uint16
    if has_type and np.can_cast(array.dtype, np.float32):
        return array
    # From wider types the type for it would round twice.
    return bfloat16_bits(array).view(wanted.dtype)


# --- Python's lists and numbers -------------------------------------------------------


def _of_python(source: Any, wanted: _Wanted) -> Array:
    values = _numbers(source)
    _check_numbers(source, values, wanted)
    if not values.size:
        return np.empty(values.shape, wanted.dtype)
    if _kind(values) in _kinds_for(wanted):
        converted, fits = _converted(values, wanted)
        if fits.all():
            return converted
        if not wanted.cast:
            raise _does_not_fit(values, fits, wanted)
    elif not wanted.cast:
        raise wanted.other_type(values.dtype)
    if wanted.datatype == "BF16":
        return bfloat16_bits(values).view(wanted.dtype)
    return values.astype(wanted.dtype)


def _check_numbers(source: Any, values: Array, wanted: _Wanted) -> None:
    """Refuse what `cast` would only turn into NaN, or fail on later."""
    kind = _kind(values)
    is_missing = kind == "O" and any(each is None for each in values.flat)
    if is_missing:
        raise wanted.mismatch(
            "given was None." if source is None else "None is among what was given.",
            "Leave an optional input out of the call; give a number for what is"
            " missing.",
        )
    if kind in "USVO" and not wanted.cast:
        raise wanted.mismatch(
            f"given was {type(source).__name__}.",
            "Give an array, or lists of numbers.",
        )


def _numbers(source: Any) -> Array:
    """As NumPy reads Python's numbers, but whole ones stay whole."""
    values = np.asarray(source)
    if values.dtype.kind == "f" and (np.abs(values) >= _LARGE).any():
        exact = np.asarray(source, object)
        if _kind(exact) == "i":
            return exact
    return values


def _kind(values: Array) -> str:
    """NumPy's letter for what the values are; "O" is only what has no other."""
    kind = values.dtype.kind
    if kind == "O" and all(isinstance(each, (int, np.integer)) for each in values.flat):
        return "i"
    return kind


def _kinds_for(wanted: _Wanted) -> str:
    """The letters of what the input may hold."""
    if wanted.datatype == "BF16" or wanted.dtype.kind == "f":
        return "biuf"
    return "b" if wanted.dtype.kind == "b" else "biu"


def _converted(values: Array, wanted: _Wanted) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The numbers in the input's datatype, and which of them it can hold."""
    if wanted.dtype.kind in "iub" and wanted.datatype != "BF16":
        return _to_integers(values, wanted.dtype)
    with np.errstate(over="ignore", under="ignore"):
        if wanted.datatype == "BF16":
            bits = bfloat16_bits(values)
            converted = bits.view(wanted.dtype)
            held = np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
        else:
            held = converted = values.astype(wanted.dtype)
    if values.dtype.kind == "f":
        return converted, np.asarray(np.isfinite(held) == np.isfinite(values))
    # As objects: Python compares a float with a whole number exactly.
    same = held.astype(np.float64).astype(object) == values.astype(object)
    return converted, np.asarray(same, np.bool_)


def _to_integers(
    values: Array, dtype: np.dtype[Any]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    if dtype.kind == "b":
        return values, np.ones(values.shape, np.bool_)
    limits = np.iinfo(dtype)
    exact = values.astype(object)
    fits = np.asarray((exact >= limits.min) & (exact <= limits.max), np.bool_)
    converted = values.astype(dtype) if fits.all() else values
    return converted, fits


def _does_not_fit(
    values: Array, fits: npt.NDArray[np.bool_], wanted: _Wanted
) -> TensorMismatch:
    first = int(np.flatnonzero(~fits)[0])
    place = ", ".join(str(each) for each in np.unravel_index(first, fits.shape))
    which = f" (element [{place}])" if fits.shape else ""
    value = values.reshape(-1)[first]
    return wanted.mismatch(
        f"which cannot hold {value}{which}.",
        "Give numbers that fit, or allow any with cast=True.",
        given=str(value),
    )
