"""What was learned about outputs whose size the model leaves open.

Owns the answer to one question: how many bytes will this output have in the next
request with inputs of these shapes? Refuses to guess, to hold memory and to send.

Why so careful: an output asked for in shared memory must fit its block. If it does not,
the server says so only after the model has run, and the result is gone: the call costs
a second run, or fails where none is allowed. Over the wire any size comes. So a size is
expected only where nothing speaks against it: as long as inputs of the same shapes have
given outputs of that one size. An output that had two sizes for the same shapes depends
on what the inputs hold, and none is expected of it again, whatever the shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

# What tells requests apart: the shape of each input of the model, None if not given.
Key = tuple[tuple[int, ...] | None, ...]

# Per output. Shapes that never come again must not fill the memory.
MAX_KEYS = 1024


class _Seen(NamedTuple):
    """The largest size that came with one key, and whether there were others."""

    largest: int
    varies: bool = False

    def after(self, nbytes: int) -> _Seen:
        is_other = nbytes != self.largest
        return _Seen(max(self.largest, nbytes), self.varies or is_other)

    def expected(self, *, rerun: bool) -> int | None:
        if self.varies and not rerun:
            return None
        # Servers before 2.60 refuse blocks of zero bytes; such outputs go by wire.
        return self.largest or None


_UNSEEN = _Seen(0)
_NONE: Mapping[Key, _Seen] = MappingProxyType({})


class OutputSizes:
    """The sizes of the outputs of one model, as its replies told them.

    Safe to use from any thread. Only what is news takes the lock: to ask, and to learn
    what is known already, is a look into a dict.
    """

    __slots__ = ("_largest", "_lock", "_seen", "_varying")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, dict[Key, _Seen]] = {}
        self._largest: dict[str, int] = {}
        self._varying: set[str] = set()

    def expected(self, output: str, key: Key, *, rerun: bool = False) -> int | None:
        """Bytes to have room for; None if nobody knows, and the wire must be taken.

        rerun: the model may run again where the block was too small. Then the largest
        size that came with `key` is expected of outputs of many sizes.
        """
        if output in self._varying and not rerun:
            return None
        seen = self._seen.get(output, _NONE).get(key, _UNSEEN)
        return seen.expected(rerun=rerun)

    def learn(self, output: str, key: Key, nbytes: int) -> bool:
        """`nbytes` came, or were too many for the block, in a request with `key`.

        True if another size is expected from now on, with `rerun` or without: what
        other slots have prepared asks for the output in the wrong way.
        """
        seen = self._seen.get(output, _NONE).get(key)
        if seen is not None and seen.after(nbytes) == seen:
            return False
        with self._lock:
            return self._note(output, key, nbytes)

    def _note(self, output: str, key: Key, nbytes: int) -> bool:
        self._largest[output] = max(nbytes, self._largest.get(output, 0))
        keys = self._seen.setdefault(output, {})
        before = keys.get(key, _UNSEEN)
        after = _Seen(nbytes) if key not in keys else before.after(nbytes)
        is_varying = output in self._varying
        keys[key] = after
        if len(keys) > MAX_KEYS:
            del keys[next(iter(keys))]
        if after.varies and not is_varying:
            # Nothing is expected for any key from now on.
            self._varying.add(output)
            return True
        ways = (True,) if is_varying else (False, True)
        return any(
            before.expected(rerun=rerun) != after.expected(rerun=rerun)
            for rerun in ways
        )

    def largest(self, output: str) -> int:
        """The most bytes that `output` ever had with any key, 0 if it never came."""
        return self._largest.get(output, 0)

    def __repr__(self) -> str:
        with self._lock:
            outputs = [
                f"{output} up to {self._largest[output]} bytes, {len(keys)} keys,"
                f" {sum(seen.varies for seen in keys.values())} vary"
                for output, keys in self._seen.items()
            ]
        return f"<OutputSizes {'; '.join(outputs) or 'nothing yet'}>"
