"""Reading JSON as strictly as Triton does, with its words for what is wrong.

Owns the checks of single values (TritonJson over RapidJSON). Refuses to know which
request they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ServerError
from .http import refused

U64 = 1 << 64


def parse(data: bytes) -> Any:
    """The document, or status 500 with the place of the mistake."""
    failed = "failed to parse the request JSON buffer: "
    if not data.strip():
        raise refused(500, f"{failed}The document is empty. at 0")
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise refused(500, f"{failed}Invalid value. at {error.pos}") from None
    except (ValueError, RecursionError):
        raise refused(500, f"{failed}Invalid value. at 0") from None


def member(document: Any, name: str) -> Any:
    """A field that must be there."""
    if not isinstance(document, Mapping) or name not in document:
        raise _wrong(f"attempt to access non-existing object member '{name}'", name)
    return document[name]


def string(value: Any, field: str = "") -> str:
    if not isinstance(value, str):
        raise _wrong("attempt to access JSON non-string as string", field)
    return value


def unsigned(value: Any, field: str = "") -> int:
    """An integer of 64 bits; 4096.0 and "4096" are none."""
    if not is_integer(value) or not 0 <= value < U64:
        raise _wrong(
            "attempt to access JSON non-unsigned-integer as unsigned-integer", field
        )
    number: int = value
    return number


def boolean(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong("attempt to access JSON non-boolean as boolean", field)
    return value


def array(value: Any, field: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise _wrong("attempt to access JSON non-array as array", field)
    return value


def is_integer(value: Any) -> bool:
    """JSON's true and false are numbers to Python only."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(text: str, field: str) -> ServerError:
    return refused(500, f"Unable to parse '{field}': {text}" if field else text)
