"""What the function of a fake model returned, against what the model declares.

Owns the words for a mistake in a user's function: they travel to the client, where the
test that has the mistake shows them. Refuses to put anything right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..datatypes import DTYPES
from ..errors import ServerError
from ..metadata import Array
from .codec import BYTES, datatype_of
from .http import refused
from .models import FakeModel


def checked(
    model: FakeModel, made: object, *, wanted: Collection[str]
) -> dict[str, Array]:
    """The outputs as arrays; raises what the server answers with status 500.

    wanted: those that the request asks for, which must be there.
    """
    if not isinstance(made, Mapping):
        names = ", ".join(f"{name!r}: array" for name in model.outputs)
        kind = type(made).__name__
        raise _mistake(model, f"{kind}, not arrays by name such as {{{names}}}")
    if strange := [name for name in made if name not in model.outputs]:
        known = ", ".join(model.outputs) or "none"
        raise _mistake(model, f"output {strange[0]!r}; its outputs are: {known}")
    if missing := [name for name in wanted if name not in made]:
        returned = ", ".join(made) or "none"
        raise _mistake(
            model, f"these outputs: {returned}; missing: {', '.join(missing)}"
        )
    return {name: _array(model, name, value) for name, value in made.items()}


def _array(model: FakeModel, name: str, value: object) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise _mistake(
            model, f"output '{name}' as what makes no array: {error}"
        ) from error
    declared = model.outputs[name]
    shape = model.shape_of(declared)
    is_right = _is_of(array, declared.datatype)
    if is_right and _fits(array.shape, shape):
        return array
    hint = "" if is_right else _advice(declared.datatype)
    raise _mistake(
        model,
        f"output '{name}' as {_named(array)} {list(array.shape)}; it declares"
        f" {declared.datatype} {shape}{hint}",
    )


def _is_of(array: Array, datatype: str) -> bool:
    """As clients do, models may give BF16 as bit patterns."""
    is_patterns = datatype == "BF16" and array.dtype == np.uint16
    return is_patterns or _datatype(array) == datatype


def _datatype(array: Array) -> str | None:
    """The name of its datatype; None also for objects that are no strings."""
    if array.dtype.kind == "O" and not all(
        isinstance(each, bytes | bytearray | str) for each in array.ravel()
    ):
        return None
    return datatype_of(array)


def _named(array: Array) -> str:
    return _datatype(array) or f"dtype {array.dtype}, which Triton has not,"


def _advice(datatype: str) -> str:
    if datatype == BYTES:
        return ": return an array of bytes objects"
    return f": return it with .astype(np.{DTYPES[datatype].name})"


def _fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    return len(shape) == len(declared) and all(
        wanted in (-1, size) for size, wanted in zip(shape, declared, strict=True)
    )


def _mistake(model: FakeModel, what: str) -> ServerError:
    text = f"the function of fake model '{model.name}' returned {what}"
    return refused(500, text, plain=True)
