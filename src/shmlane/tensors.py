"""One tensor of one slot: where it lies, how the server calls that place, its arrays.

Owns the arrays over a block and how they are told to be in use, and the names of
registrations. Refuses to know whether a slot may be used (`slots`) and what a server
says.
"""

from __future__ import annotations

import sys
import weakref
from sys import getrefcount
from typing import Any, Protocol

import numpy as np

from .layout import TensorPlan
from .metadata import Array, Shape

# Reference counts are exact only under the GIL; without it, weak references decide.
COUNTS_ARE_EXACT: bool = getattr(sys, "_is_gil_enabled", lambda: True)()

NOTHING: Any = None


class Memory(Protocol):
    """Where blocks lie: a shared region, or memory of this process alone."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_shared(self) -> bool: ...
    @property
    def is_owned(self) -> bool: ...
    def array(self, offset: int, nbytes: int) -> Array: ...
    def close(self) -> None: ...
    def leave(self) -> None: ...
    def hand_over(self) -> None: ...
    def take_over(self) -> None: ...


class Registration:
    """One region as one slot registered it: a name and a key of its own.

    The server counts references per name, so a lost request is waited for alone. The
    key differs between slots only in its leading slashes: the same file to the server
    but another string, because servers up to 2.68 fail a second registration of an
    equal string (they reuse a closed descriptor). A name is never used twice: deferred
    removal in 2.53 and later goes by name. Memory that is not shared has no name: what
    lies there goes over the wire.

    slots: how many slots register this region.
    """

    __slots__ = (
        "_slots",
        "generation",
        "is_live",
        "name",
        "region",
        "slashes",
        "slot_index",
    )

    def __init__(
        self, region: Memory, slot_index: int, generation: int, *, slots: int = 1
    ) -> None:
        self.region = region
        self.slot_index = slot_index
        self.slashes = slot_index + 1
        self._slots = slots
        self.renew(generation)

    @property
    def key(self) -> str:
        return "/" * self.slashes + self.region.name

    def renew(self, generation: int) -> None:
        region = self.region
        is_named = region.is_shared
        self.name = f"{region.name}.{self.slot_index}.{generation}" if is_named else ""
        self.generation = generation
        self.is_live = False

    def respell(self) -> None:
        """Take a key that no slot has used, for the server may still use this one."""
        self.slashes += self._slots

    def restore(self, generation: int, slashes: int, *, is_live: bool) -> None:
        """Be what another process made of it."""
        self.slashes = slashes
        self.renew(generation)
        self.is_live = is_live

    def __repr__(self) -> str:
        return f"<Registration {self.name} {'live' if self.is_live else 'not live'}>"


class Tensor:
    """One tensor of one slot: its block of memory and the arrays over it.

    `root` is the one array made over the block. NumPy lets every array derived from it
    refer to it directly, so its reference count tells whether views are alive. `nbytes`
    of it belong to a tensor of `shape`. `lent` is a caller's array that goes over the
    wire in the place of the block; `own_size` then has the shape and bytes of that.
    `view_bit` is `bit`, or 0 where no array of the elements can be given out.
    """

    __slots__ = (
        "array",
        "bit",
        "capacity",
        "default",
        "is_bytes",
        "lent",
        "name",
        "nbytes",
        "offset",
        "plan",
        "registration",
        "resting",
        "root",
        "shape",
        "spec",
        "view_bit",
    )

    def __init__(self, plan: TensorPlan, bit: int) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.name = plan.spec.name
        self.default = plan.default
        self.bit = bit
        self.is_bytes = plan.spec.is_bytes
        self.view_bit = 0 if self.is_bytes else bit
        self.lent: Array | None = None

    def bind(self, registration: Registration, offset: int, capacity: int) -> None:
        """Lie at `offset` of the registered region from now on."""
        shape, nbytes = self.default, 0
        if shape is not None:
            nbytes = self.spec.nbytes(shape)
        if nbytes > capacity:
            shape, nbytes = None, 0
        self._renew_arrays(registration, offset, capacity, shape, nbytes)

    def revive(self) -> None:
        """Make new arrays over the same block, whose old ones died."""
        self._renew_arrays(
            self.registration, self.offset, self.capacity, self.shape, self.nbytes
        )

    def _renew_arrays(
        self,
        registration: Registration,
        offset: int,
        capacity: int,
        shape: Shape | None,
        nbytes: int,
    ) -> None:
        # Views of an old root keep the old one and its mapping.
        root = registration.region.array(offset, capacity)
        array = self._shaped(root, shape, nbytes)
        # Nothing is called in between: Ctrl-C finds all of this done, or nothing.
        self.registration = registration
        self.offset = offset
        self.capacity = capacity
        self.root = root
        self.array = array
        self.shape = shape
        self.nbytes = nbytes
        del root, array
        # Counted where no view can exist yet.
        self.resting = getrefcount(self.root)

    def reshape(self, shape: Shape, nbytes: int = 0) -> None:
        """Take the shape that `array` has; the caller has checked that it fits.

        nbytes: of the elements of a BYTES tensor, 0 where nobody has counted them.
        """
        if not self.spec.is_bytes:
            nbytes = self.spec.nbytes(shape)
        array = self._shaped(self.root, shape, nbytes)
        self.array = array
        self.shape = shape
        self.nbytes = nbytes

    def _shaped(self, root: Array, shape: Shape | None, nbytes: int) -> Array:
        if self.spec.is_bytes:
            # Elements are copied in and out: no array of theirs lies in the block.
            return root
        flat: Array = root[:nbytes].view(self.spec.dtype)
        return flat if shape is None else flat.reshape(shape)

    @property
    def is_shared(self) -> bool:
        """Whether the server reads and writes the block itself."""
        return self.registration.region.is_shared

    @property
    def content(self) -> Array:
        """The bytes that go over the wire."""
        source = self.root[: self.nbytes] if self.lent is None else self.lent
        return source.reshape(-1).view(np.uint8)

    @property
    def is_at_rest(self) -> bool:
        """True when nobody outside holds an array over this block."""
        return COUNTS_ARE_EXACT and getrefcount(self.root) == self.resting

    def has_views(self) -> bool:
        """Whether anybody outside holds an array over this block."""
        if COUNTS_ARE_EXACT:
            return not self.is_at_rest
        watch = weakref.ref(self.root)
        self.array = self.root = NOTHING
        root = watch()
        if root is None:
            self.revive()
            return False
        self.root = root
        self.array = self._shaped(root, self.shape, self.nbytes)
        return True

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.shape} of {self.capacity} bytes>"
