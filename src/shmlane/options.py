"""What one request may ask for beside its tensors: `RequestOptions`, checked.

Owns the limits of what Triton understands in a request's `parameters`, and their JSON.
Refuses what Triton would cut, take for something else or die of, to know tensors other
than by their specs, and to send anything.

Limits that nobody documents were found with tritonserver 2.51: text ends at a NUL, a
whole number beyond 64 bits becomes an inexact float, a top k of 2**32 is none, and a
classification of a BYTES output kills the server.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from .errors import TensorMismatch, UnknownTensor, UsageError
from .metadata import TensorSpec
from .wire import callers_header

Parameter = str | int | float | bool

_MAX_ID = 256
_MAX_SEQUENCE_BYTES = 128
_MAX_INT64 = (1 << 63) - 1
_MAX_UINT64 = (1 << 64) - 1
_MAX_UINT32 = (1 << 32) - 1
# The server adds nanoseconds to its clock, in 64 bits.
_MAX_QUEUE_SECONDS = 1e9

# Parameters of Triton's own, and what sets each here.
_OWN_PARAMETERS: Mapping[str, str] = MappingProxyType(
    {
        "sequence_id": "sequence_id=",
        "sequence_start": "sequence_start=",
        "sequence_end": "sequence_end=",
        "priority": "priority=",
        "timeout": "queue_timeout=",
        "binary_data_output": "nothing: shmlane decides how outputs come",
    }
)
_RESERVED_PREFIX = "triton_"

# A NUL would end the text there, and half of a pair of surrogates has no UTF-8.
_UNFIT = re.compile("[\0\ud800-\udfff]")

# What the classification extension can rank.
_RANKED = ("FP32", "FP64", *(f"{u}INT{n}" for u in ("", "U") for n in (8, 16, 32, 64)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RequestOptions:
    """What a request asks for beside its tensors. Everything may be left out.

    id: names the request in the server's log and errors, and comes back with the
        reply; at most 256 printable characters.
    priority: level in the queue of a model with `priority_levels`, 1 first; 0, and what
        is no level of the model, mean the model's default ("dynamic_batching" in
        Triton's model configuration).
    queue_timeout: seconds that the request may wait in the server's queue. Only the
        queue policy of a dynamic batcher looks at it, and only with
        `allow_timeout_override`; it can shorten the model's own limit and not extend
        it. How long this process waits is the `timeout` of the call.
    sequence_id: which sequence the request is a step of, a number or a text of at most
        128 bytes; 0 and "" mean none ("sequence extension" of Triton's protocol).
    sequence_start, sequence_end: this is its first, its last step.
    parameters: custom ones, for the model: text, whole numbers of 64 bits, finite
        floats, true and false ("parameters extension").
    classification: output name to k: the k largest values of each batch item come as
        text "score:index" or "score:index:label", over the wire ("classification
        extension").
    headers: sent with this request only, such as `traceparent`.

    A step of a sequence is never sent twice, whatever `replay` and `rerun` say: the
    server keeps state between steps, and a step that it had run already would be
    counted in once more. After `RequestLost` nobody knows whether the step was run:
    begin the sequence anew.

    Two options are equal only if they are one object. Make it once for all the calls
    that it holds for: what was prepared with it is used again then.
    """

    id: str = ""
    priority: int = 0
    queue_timeout: float | None = None
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    classification: Mapping[str, int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            # Frozen for everybody else; what is kept is ours, not the caller's.
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for name in ("sequence_start", "sequence_end"):
            if getattr(self, name) and not self.has_sequence:
                raise UsageError(
                    f"RequestOptions({name}=True) without a sequence:"
                    f" sequence_id={self.sequence_id!r} means none.",
                    hint="Give sequence_id= a number above 0 or a text.",
                    option=name,
                )

    @property
    def has_sequence(self) -> bool:
        """Whether the request is a step of a sequence, which must not be repeated."""
        return bool(self.sequence_id)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what was given: read-only mappings do not pickle."""
        given: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            given[each.name] = dict(value) if isinstance(value, Mapping) else value
        return (functools.partial(RequestOptions, **given), ())

    def json_parameters(self) -> str:
        """`"parameters":{…}` for the JSON of the request, "" if there are none."""
        content: dict[str, Parameter] = dict(self.parameters)
        if self.priority:
            content["priority"] = self.priority
        if self.queue_timeout is not None:
            # 0 would mean that none was given.
            content["timeout"] = max(1, round(self.queue_timeout * 1e6))
        if self.has_sequence:
            content["sequence_id"] = self.sequence_id
        for name in ("sequence_start", "sequence_end"):
            if getattr(self, name):
                content[name] = True
        if not content:
            return ""
        return f'"parameters":{json.dumps(content, separators=(",", ":"))}'

    def check_outputs(self, outputs: Mapping[str, TensorSpec]) -> None:
        """Raise unless `outputs`, those asked for, can be classified as wanted.

        Must be asked before sending: a server that is to rank BYTES dies of it.
        """
        for name in self.classification:
            if name not in outputs:
                asked = ", ".join(map(repr, outputs)) or "none"
                raise UnknownTensor(
                    f"RequestOptions(classification={{{name!r}: …}}): output {name!r}"
                    f" is not asked for; asked for: {asked}.",
                    tensor=name,
                )
            datatype = outputs[name].datatype
            if datatype not in _RANKED:
                raise TensorMismatch(
                    f"RequestOptions(classification={{{name!r}: …}}): output {name!r}"
                    f" is {datatype}, which Triton cannot rank.",
                    hint=f"Datatypes it ranks: {', '.join(_RANKED)}.",
                    tensor=name,
                    datatype=datatype,
                )

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        # Names only: values are often keys, and this may go to a log.
        given["headers"] = list(self.headers)
        shown = (
            f"{name}={dict(value) if isinstance(value, Mapping) else value!r}"
            for name, value in given.items()
            if value
        )
        return f"RequestOptions({', '.join(shown)})"


# --- checks: the value as it is kept, or UsageError -----------------------------------


def _checked_id(name: str, value: object) -> str:
    if not _is_text(value) or len(value) > _MAX_ID:
        raise _refusal(name, value, f"printable text of at most {_MAX_ID} characters")
    return value


def _checked_priority(name: str, value: object) -> int:
    allowed = f"a whole number from 0 (the model's default) to {_MAX_INT64}"
    return _whole(name, value, 0, _MAX_INT64, allowed)


def _checked_seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    numbers = (int, float, np.integer, np.floating)
    if (
        not isinstance(value, numbers)
        or isinstance(value, bool)
        or not 0 < value <= _MAX_QUEUE_SECONDS
    ):
        raise _refusal(
            name,
            value,
            f"seconds above 0 and at most {_MAX_QUEUE_SECONDS:.0f}, or None for the"
            " limit of the model",
        )
    return float(value)


def _checked_sequence(name: str, value: object) -> int | str:
    allowed = (
        f"a whole number from 0 (no sequence) to {_MAX_UINT64}, or printable text of"
        f" at most {_MAX_SEQUENCE_BYTES} bytes in UTF-8"
    )
    if not isinstance(value, str):
        return _whole(name, value, 0, _MAX_UINT64, allowed)
    if not _is_text(value) or len(value.encode()) > _MAX_SEQUENCE_BYTES:
        raise _refusal(name, value, allowed)
    return value


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")
    return value


def _checked_parameters(field_name: str, value: object) -> Mapping[str, Parameter]:
    wanted = "a mapping from names to values"
    content: dict[str, Parameter] = {}
    for name, each in _mapping(field_name, value, wanted).items():
        if not _is_text(name) or not name:
            raise _refusal(field_name, {name: each}, "printable names, not empty")
        if name in _OWN_PARAMETERS:
            raise _refusal(
                field_name,
                {name: each},
                "other names, this one is Triton's own; what sets it is"
                f" {_OWN_PARAMETERS[name]}",
            )
        if name.startswith(_RESERVED_PREFIX):
            allowed = f"other names, Triton reserves those that begin with {name[:7]!r}"
            raise _refusal(field_name, {name: each}, allowed)
        content[name] = _checked_parameter(field_name, name, each)
    return MappingProxyType(content)


def _checked_parameter(field_name: str, name: str, given: object) -> Parameter:
    value: Any = given.item() if isinstance(given, np.generic) else given
    if isinstance(value, str):
        is_right = not _UNFIT.search(value)
        allowed = "text without NUL and without lone surrogates"
    elif isinstance(value, int):
        is_right = -_MAX_INT64 - 1 <= value <= _MAX_INT64
        allowed = f"whole numbers from {-_MAX_INT64 - 1} to {_MAX_INT64}"
    else:
        is_right = isinstance(value, float) and math.isfinite(value)
        allowed = "text, whole numbers, finite floats, True or False"
    if not is_right:
        hint = "json.dumps(value) makes text of lists and mappings for the model."
        is_nested = isinstance(value, (list, tuple, Mapping))
        raise _refusal(
            field_name, {name: given}, allowed, hint=hint if is_nested else ""
        )
    kept: Parameter = value
    return kept


def _checked_classes(field_name: str, value: object) -> Mapping[str, int]:
    wanted = "a mapping from names of outputs to how many values of each"
    allowed = f"how many values, a whole number from 1 to {_MAX_UINT32}"
    content = {}
    for name, count in _mapping(field_name, value, wanted).items():
        if not isinstance(name, str):
            raise _refusal(field_name, {name: count}, wanted)
        shown = {name: count}
        content[name] = _whole(field_name, count, 1, _MAX_UINT32, allowed, shown=shown)
    return MappingProxyType(content)


def _checked_headers(field_name: str, value: object) -> Mapping[str, str]:
    wanted = "a mapping from names of headers to text"
    content: dict[str, str] = {}
    for name, text in _mapping(field_name, value, wanted).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise _refusal(field_name, [name], wanted)
        callers_header(name, text)
        if name.lower() in map(str.lower, content):
            allowed = "each header once: case makes no other name"
            raise _refusal(field_name, [name], allowed)
        content[name] = text
    return MappingProxyType(content)


_CHECKS: Mapping[str, Callable[[str, object], object]] = MappingProxyType(
    {
        "id": _checked_id,
        "priority": _checked_priority,
        "queue_timeout": _checked_seconds,
        "sequence_id": _checked_sequence,
        "sequence_start": _checked_flag,
        "sequence_end": _checked_flag,
        "parameters": _checked_parameters,
        "classification": _checked_classes,
        "headers": _checked_headers,
    }
)


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.isprintable()


def _whole(
    name: str,
    value: object,
    least: int,
    most: int,
    allowed: str,
    *,
    shown: object = None,
) -> int:
    """`value` as an int; else an error that shows it, or `shown` in its place."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        number = int(value)
        if least <= number <= most:
            return number
    raise _refusal(name, value if shown is None else shown, allowed)


def _mapping(name: str, value: object, wanted: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _refusal(name, value, wanted)
    return value


def _refusal(name: str, value: object, allowed: str, *, hint: str = "") -> UsageError:
    return UsageError(
        f"RequestOptions({name}={reprlib.repr(value)}): give {allowed}.",
        hint=hint,
        option=name,
    )
