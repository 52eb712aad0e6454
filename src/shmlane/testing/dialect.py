"""What each release of Triton does differently: one table, one object per version.

Owns every question of the form "does this version already do that". Refuses to act on
the answers. The versions are those of the release tags; where one was cherry-picked
into an earlier release, the earlier release counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError

Version = tuple[int, ...]

_MAJOR = 2
# Containers, as 12 * year + month: 22.01 has 2.18, and each month since then counted
# one up to 26.07, but for 25.07, which has 2.59.1.
_FIRST = 12 * 22 + 1
_FIRST_MINOR = 18
_SKIPPED = 12 * 25 + 7
_LAST = 12 * 26 + 7

_ARRIVALS: Mapping[str, Version] = {
    # --http-restricted-api.
    "restricts_apis": (2, 40),
    # Infer: "Invalid offset for shared memory region". Before: no bounds check at all.
    "checks_offsets": (2, 44),
    # Register: size against the file. Infer: "Invalid offset + byte size ...".
    "checks_sizes": (2, 45),
    # Infer: an input has exactly the bytes of its shape.
    "demands_exact_inputs": (2, 47),
    # Unregister in use is refused. Before: the memory goes while the model uses it.
    "counts_users": (2, 50),
    # Unregister in use is accepted and done when the last request ends.
    "defers_unregister": (2, 53),
    # Infer: "Integer overflow detected".
    "checks_overflow": (2, 58),
    # Register: keys of the Python backend are refused.
    "reserves_prefix": (2, 59, 1),
    # ... whatever slashes they begin with; a key of slashes only is refused as well.
    "strips_keys": (2, 60),
    # Before: the offset of a registration is applied twice, to the mapping and in it.
    "applies_offset_once": (2, 60),
    # Infer: zero bytes at a valid offset are legal. Before: 0 - 1 is a large number.
    "takes_empty_tensors": (2, 60),
    # --allow-client-shm is false unless said otherwise.
    "disables_client_shm": (2, 68),
    # Before: the second registration of an equal key uses a closed descriptor.
    "reopens_keys": (2, 69),
    # "Inference-Header-Content-Length" that is no number is an error, not 0.
    "parses_lengths": (2, 70),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a server of `version` behaves. Each flag is explained in the table above."""

    version: str
    restricts_apis: bool
    checks_offsets: bool
    checks_sizes: bool
    demands_exact_inputs: bool
    counts_users: bool
    defers_unregister: bool
    checks_overflow: bool
    reserves_prefix: bool
    strips_keys: bool
    applies_offset_once: bool
    takes_empty_tensors: bool
    disables_client_shm: bool
    reopens_keys: bool
    parses_lengths: bool

    @classmethod
    def of(cls, version: str) -> Dialect:
        """The dialect of a version such as "2.51.0"; else `UsageError`."""
        if not isinstance(version, str):
            raise UsageError(
                f"version={version!r}: give the version of a Triton as text, as in"
                ' "2.51.0".'
            )
        if not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+)*", version) or (
            int(version.partition(".")[0]) > _MAJOR
        ):
            raise UsageError(
                f"{version!r} is not a version of Triton.",
                hint=_hint(version),
                version=version,
            )
        known = tuple(map(int, version.split(".")))
        flags = {name: known >= arrival for name, arrival in _ARRIVALS.items()}
        return cls(version=version, **flags)


def _hint(version: str) -> str:
    """What to give instead, also where a container was named."""
    if found := re.match(r"(2[0-9])\.(0[1-9]|1[0-2])(?![0-9])", version):
        release, told = found[0], _in_container(int(found[1]), int(found[2]))
        serves = (
            f', whose server is "{told}": give that'
            if told
            else ": give the version that GET /v2 tells in it"
        )
        return f"{release} is a release of the container{serves}."
    return 'Give numbers as in "2.51.0": GET /v2 tells them.'


def _in_container(year: int, month: int) -> str:
    """The version of the server in a container; "" where that is not known."""
    number = 12 * year + month
    if number == _SKIPPED:
        return "2.59.1"
    if not _FIRST <= number <= _LAST:
        return ""
    return f"2.{_FIRST_MINOR + number - _FIRST - (number > _SKIPPED)}.0"
