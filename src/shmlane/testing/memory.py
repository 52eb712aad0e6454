"""The shared memory that clients registered, as each version of Triton keeps it.

Owns opening and mapping clients' files, the names they are known by, who uses them, and
what happens when they are unregistered meanwhile (Triton's shared_memory_manager.cc).
Refuses to make files, and to touch memory that is not there: where Triton would die of
a SIGBUS or SIGSEGV this raises `RegionError` and tells the server.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ..errors import RegionError, ServerError
from ..regions import PAGE_BYTES, Bytes
from .dialect import Dialect
from .http import refused
from .json_fields import U64

_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_LONGEST_NAME = 255
_ADDRESS_SPACE = 1 << 47


class RegisteredRegion(NamedTuple):
    """One registration as the status of the server tells it."""

    name: str
    key: str
    offset: int
    byte_size: int


class MappedRegion:
    """The memory behind one registration."""

    def __init__(
        self, registered: RegisteredRegion, memory: mmap.mmap | None, base: int
    ) -> None:
        self.registered = registered
        self.users = 0
        self.is_doomed = False
        self.is_mapped = True
        self._memory = memory
        # Up to 2.59 the offset of the registration counts once more in its region.
        self._base = base

    def bytes_at(self, offset: int, nbytes: int) -> Bytes:
        """The bytes of a block in place; `RegionError` where a Triton would die."""
        if not nbytes:
            return np.empty(0, np.uint8)
        name, start = self.registered.name, self._base + offset
        if not self.is_mapped:
            raise RegionError(f"region {name!r} was unregistered while it was in use.")
        memory = self._memory
        if memory is None or start + nbytes > len(memory):
            raise RegionError(
                f"a request reaches byte {start + nbytes} of region {name!r}, which"
                f" has {len(memory or b'')} bytes of memory."
            )
        # The descriptor that the map keeps tells how long the file is now.
        if self.registered.offset + start + nbytes > memory.size():
            raise RegionError(f"the file of region {name!r} was shrunk.")
        return np.frombuffer(memory, np.uint8, nbytes, start)


class Block(NamedTuple):
    """The part of a region that one tensor of one request lies in."""

    region: MappedRegion
    offset: int
    nbytes: int

    def touch(self, nbytes: int) -> Bytes:
        return self.region.bytes_at(self.offset, nbytes)


class RegionTable:
    """All registrations of one server process. Thread-safe.

    report: called with the reason when something is done that ends such a Triton.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        directory: str,
        allows_clients: bool,
        report: Callable[[str], None],
    ) -> None:
        self.leaked_descriptors = 0
        self._dialect = dialect
        self._directory = directory
        self._allows_clients = allows_clients
        self._report = report
        self._lock = threading.Lock()
        self._regions: dict[str, MappedRegion] = {}

    # --- control requests -------------------------------------------------------------

    def register(self, region: RegisteredRegion) -> None:
        """Open and map; raises what `refused` makes."""
        self._check_allowed()
        with self._lock:
            self._check_key(region)
            name = region.name
            if name in self._regions:
                raise refused(400, f"shared memory region '{name}' already in manager")
            if not self._dialect.reopens_keys and region.key in self._keys():
                raise self._reused_descriptor(region)
            fd = self._open(region.key)
            try:
                self._regions[name] = self._map(fd, region)
            finally:
                os.close(fd)

    def unregister(self, name: str) -> None:
        """Names that are not known are fine."""
        self._check_allowed()
        with self._lock:
            self._unregister(name)

    def unregister_all(self) -> None:
        self._check_allowed()
        failed = []
        with self._lock:
            for name in sorted(self._regions):
                try:
                    self._unregister(name)
                except ServerError:
                    failed.append(name)
        if failed:
            names = "".join(f"{name} ," for name in failed)
            raise refused(
                500,
                "Failed to unregister the following system shared memory regions:"
                f" {names}",
            )

    def status(self) -> list[RegisteredRegion]:
        with self._lock:
            return [self._regions[name].registered for name in sorted(self._regions)]

    # --- what inferences use ----------------------------------------------------------

    def borrow(self, name: str, offset: int, nbytes: int) -> Block:
        """A block for one tensor, to be given back when its request has ended."""
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise refused(404, f"Unable to find shared memory region: '{name}'")
            self._check_bounds(region.registered, offset, nbytes)
            region.users += 1
            return Block(region, offset, nbytes)

    def give_back(self, blocks: Iterable[Block]) -> None:
        """The request has ended; what was to be unregistered meanwhile goes now."""
        with self._lock:
            for region, _, _ in blocks:
                region.users -= 1
                if region.is_doomed and not region.users:
                    self._regions.pop(region.registered.name, None)

    # --- registering ------------------------------------------------------------------

    def _check_allowed(self) -> None:
        if not self._allows_clients:
            raise refused(
                501,
                "Client shared memory is disabled. Start the server with"
                " '--allow-client-shm=true' to enable.",
            )

    def _check_key(self, region: RegisteredRegion) -> None:
        name, key = region.name, region.key
        bare = key.lstrip("/") if self._dialect.strips_keys else key
        if self._dialect.strips_keys and not bare:
            raise refused(
                400,
                f"cannot register shared memory region '{name}' - invalid shm key"
                f" '{key}'",
            )
        if self._dialect.reserves_prefix and bare.startswith(_RESERVED_PREFIX):
            raise refused(
                400,
                f"cannot register shared memory region '{name}' with key '{key}' as the"
                f" key contains the reserved prefix '{_RESERVED_PREFIX}'",
            )

    def _keys(self) -> set[str]:
        return {region.registered.key for region in self._regions.values()}

    def _reused_descriptor(self, region: RegisteredRegion) -> ServerError:
        if self._dialect.checks_sizes:
            return refused(500, f"Invalid shared memory region: '{region.key}'")
        return _unmappable(region.name, errno.EBADF)

    def _open(self, key: str) -> int:
        # As shm_open: leading slashes do not count, links are not followed.
        file = key.partition("\0")[0].lstrip("/")
        is_name = file not in ("", ".", "..") and "/" not in file
        if is_name and len(file.encode()) <= _LONGEST_NAME:
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
                return os.open(os.path.join(self._directory, file), flags)
        raise refused(500, f"Unable to open shared memory region: '{key}'")

    def _map(self, fd: int, region: RegisteredRegion) -> MappedRegion:
        name, offset, nbytes = region.name, region.offset, region.byte_size
        size = os.fstat(fd).st_size
        # The sum is one of 64 bits.
        if self._dialect.checks_sizes and (offset + nbytes) % U64 > size:
            self.leaked_descriptors += 1
            raise refused(
                400, f"failed to register shared memory region '{name}': invalid args"
            )
        if not nbytes or offset % PAGE_BYTES:
            raise _unmappable(name, errno.EINVAL)
        if nbytes > _ADDRESS_SPACE:
            raise _unmappable(name, errno.ENOMEM)
        # Python maps no further than the file goes; what is beyond ends a Triton.
        present = min(nbytes, max(0, size - offset))
        memory = mmap.mmap(fd, present, offset=offset) if present else None
        base = 0 if self._dialect.applies_offset_once else offset
        return MappedRegion(region, memory, base)

    # --- unregistering and using ------------------------------------------------------

    def _unregister(self, name: str) -> None:
        region = self._regions.get(name)
        if region is None:
            return
        if not region.users:
            del self._regions[name]
        elif self._dialect.defers_unregister:
            region.is_doomed = True
        elif self._dialect.counts_users:
            raise refused(
                500,
                f"Cannot unregister shared memory region '{name}', it is currently in"
                " use.",
            )
        else:
            del self._regions[name]
            region.is_mapped = False
            self._report(f"region {name!r} was unregistered while it was in use")

    def _check_bounds(self, region: RegisteredRegion, offset: int, nbytes: int) -> None:
        dialect, name = self._dialect, region.name
        end = region.byte_size
        if not dialect.applies_offset_once:
            end += region.offset
        if dialect.checks_offsets and offset >= end:
            raise refused(400, f"Invalid offset for shared memory region: '{name}'")
        if dialect.checks_overflow and offset + nbytes >= U64:
            raise refused(
                400,
                f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset})"
                f" exceeds maximum value ({U64 - 1}) for region '{name}'",
            )
        # Before 2.60 the last byte is compared, which zero bytes at 0 do not have.
        last = (offset + nbytes - 1) % U64
        is_empty = dialect.takes_empty_tensors and not nbytes
        if dialect.checks_sizes and not is_empty and last >= end:
            raise refused(
                400, f"Invalid offset + byte size for shared memory region: '{name}'"
            )


def _unmappable(name: str, code: int) -> ServerError:
    return refused(
        400,
        f"failed to register shared memory region '{name}': unable to process address"
        f" space{os.strerror(code)}",
    )
