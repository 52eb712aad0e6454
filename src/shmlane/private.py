"""Memory of this process alone, for tensors that go over the wire.

Owns blocks that no server sees. They take the place of a region, so that slots are used
in one way wherever their tensors lie.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from .errors import OutOfSharedMemory


class PrivateMemory:
    """Memory of `nbytes` bytes: zeros at first, taken from the machine as it is used.

    Arrays over it keep it alive. Raises `OutOfSharedMemory` where there is too little.
    """

    is_shared = False
    is_owned = True
    name = path = ""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._mapping = mmap.mmap(-1, max(nbytes, 1))
        except (OSError, OverflowError) as error:
            raise OutOfSharedMemory(
                f"there is no room for {nbytes} bytes of memory: {error}.",
                hint="Use fewer slots or smaller shapes.",
                wanted=nbytes,
            ) from error

    def array(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A writable byte array over part of the memory."""
        return np.frombuffer(self._mapping, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Nothing: the last array over the memory ends it."""

    def leave(self) -> None:
        """As `close`: there is no name that could stay."""

    def hand_over(self) -> None:
        """Nothing: no other process can use it."""

    def take_over(self) -> None:
        """Nothing, as `hand_over`."""

    def __repr__(self) -> str:
        return f"<PrivateMemory {self.nbytes} bytes>"
