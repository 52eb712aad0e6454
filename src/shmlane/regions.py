"""System shared memory: one file in /dev/shm, made complete before it has a name.

Owns creating, reserving, locking, mapping, viewing and removing region files, and
finding those whose owner died. Refuses to know what lies inside a region, to truncate
or shrink one, and to touch a file that another living process still holds.

Liveness is the kernel's: whoever uses a region holds a shared `flock` on an open file
description of its own. It is never the mapped descriptor, which `mmap` duplicates into
forked children, where it would outlive its owner.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .claims import OwnerLock
from .errors import RegionError, UnsupportedPlatform, UsageError
from .room import SHM_DIRECTORY, check_room, free_bytes, out_of_memory

if sys.platform == "linux":
    import fcntl

PREFIX = "shmlane."
PAGE_BYTES = mmap.PAGESIZE

# Memory is reserved in pieces, so that Ctrl-C is answered while gigabytes are taken.
_RESERVE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
# The unit of st_blocks, whatever the file system's own block is (stat(2)).
_BLOCK_BYTES = 512

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions:
    """How region files are made.

    mode: permission bits; a server under another uid needs 0o660 with a common group
        or 0o666, because Triton opens the file for reading and writing.
    hugepages: "auto" asks for huge pages where the mount of /dev/shm has
        `huge=advise`; "never" does not ask.
    prefault: map every page at creation instead of at the first touch.
    lock: keep the pages from being swapped out (needs RLIMIT_MEMLOCK).
    max_bytes: the most bytes that all regions of one session may hold together.
    """

    mode: int = 0o600
    hugepages: Literal["auto", "never"] = "auto"
    prefault: bool = True
    lock: bool = False
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        bits = "permission bits as a number, such as 0o600 or 0o666"
        nbytes = "a whole number of bytes above 0, or None"
        limit = self.max_bytes
        for name, is_right, allowed in (
            ("mode", _is_whole(self.mode) and 0 <= self.mode <= 0o777, bits),
            ("hugepages", self.hugepages in ("auto", "never"), "'auto' or 'never'"),
            ("prefault", isinstance(self.prefault, bool), "True or False"),
            ("lock", isinstance(self.lock, bool), "True or False"),
            ("max_bytes", limit is None or (_is_whole(limit) and limit > 0), nbytes),
        ):
            if not is_right:
                value = getattr(self, name)
                raise UsageError(f"RegionOptions({name}={value!r}): give {allowed}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that holds `nbytes`."""
    return -(-nbytes // multiple) * multiple


class Mapping(mmap.mmap):
    """The memory of a region, which the arrays over it keep.

    kept: whatever else they are to keep.
    """

    kept: object = None


class MappedFile:
    """A region file that is mapped here, whoever made it.

    Arrays made by `array` keep the mapping alive: they stay readable and writable
    after the region was closed.
    """

    is_shared = True
    name: str
    nbytes: int
    # Whether the name goes when this is closed.
    is_owned: bool
    _mapping: Any

    @property
    def path(self) -> str:
        return region_path(self.name)

    def array(self, offset: int, nbytes: int) -> Bytes:
        """A writable byte array over part of the region, which it keeps mapped.

        The only place where arrays over shared memory are made: `np.frombuffer` pins
        the mapping, `np.ndarray(buffer=...)` does not, and reading such an array after
        the mapping is closed ends the process.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise RegionError(
                f"bytes {offset} to {offset + nbytes} lie outside region {self.name}"
                f" of {self.nbytes} bytes."
            )
        if self._mapping is None:
            raise RegionError(f"region {self.name} is closed.")
        return np.frombuffer(self._mapping, np.uint8, nbytes, offset)

    def keep(self, other: object) -> None:
        """Have arrays over the region keep this, too, in the place of anything else."""
        if self._mapping is not None:
            self._mapping.kept = other


class Region(MappedFile):
    """One named block of shared memory that this process made and owns.

    `close` takes the name away at once, and the memory with the last array over it.
    Not thread-safe to close twice at once; everything else is read-only state.
    """

    def __init__(
        self, nbytes: int, *, header: bytes, options: RegionOptions | None = None
    ) -> None:
        """Make a region of at least `nbytes` bytes that starts with `header`.

        Raises `OutOfSharedMemory` before any page is used when the file system has too
        little room, `RegionError` for anything else that the machine refuses.
        """
        _require_linux()
        options = options or RegionOptions()
        self.name = PREFIX + secrets.token_hex(8)
        self.nbytes = round_up(max(nbytes, len(header), 1), PAGE_BYTES)
        self._owner = os.getpid()
        self._lock = OwnerLock()
        self._mapping: Mapping | None = None
        self._at_end = self._finaliser()
        self.is_owned = True
        _regions.add(self)
        try:
            self._mapping = self._create(header, options)
        except OSError as error:
            what = f"make a shared memory region of {self.nbytes} bytes"
            raise could_not(what, error, nbytes=self.nbytes) from error
        finally:
            if self._mapping is None:
                self.close()

    def close(self) -> None:
        """Take the name away and let go of the memory; live arrays stay valid."""
        if self._at_end.alive:
            _let_go(self.path, self._owner, self._lock)
            # Only now: what Ctrl-C kept from being done is done at the end.
            self._at_end.detach()
        self.is_owned = False
        self._lock.drop()
        # Live arrays refer to the mapping too: the last of them unmaps it.
        self._mapping = None

    def leave(self) -> None:
        """Let go of the memory but not of its name, as a process that dies does.

        For what a server may still know of the region: cleaning up takes back both.
        """
        self.hand_over()
        self._lock.drop()
        self._mapping = None

    def hand_over(self) -> None:
        """Have the name stay when this is closed or dropped: it is not ours to take.

        Other processes use the memory, and whoever cleans up after the last removes it.
        """
        self.is_owned = False
        self._at_end.detach()

    def take_over(self) -> None:
        """Remove the name when this is closed, or dropped.

        A program that ends without closing its session must not leave the file, and
        neither may Ctrl-C right after it was named.
        """
        # One at most: an earlier one would remove what was handed over since.
        if not self._at_end.alive:
            self._at_end = self._finaliser()
        self.is_owned = True

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else "open"
        return f"<Region {self.name} {self.nbytes} bytes {state}>"

    def _finaliser(self) -> weakref.finalize[..., Region]:
        at_end = weakref.finalize(self, _let_go, self.path, self._owner, self._lock)
        # Not by itself at exit, where sessions still need the file: see below.
        at_end.atexit = False
        return at_end

    def _create(self, header: bytes, options: RegionOptions) -> Mapping:
        # Without a name until it is complete: nobody can ever see a half-made region.
        fd = os.open(SHM_DIRECTORY, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, options.mode)
            check_room(fd, self.nbytes)
            os.ftruncate(fd, self.nbytes)
            self._lock.take(fd)
            mapping = Mapping(fd, self.nbytes, flags=mmap.MAP_SHARED)
            try:
                _fill(fd, mapping, options)
                mapping[: len(header)] = header
                _link(fd, self.path)
            except BaseException:
                # Whoever keeps the exception keeps this frame, but not the memory.
                mapping.close()
                raise
        finally:
            os.close(fd)
        return mapping


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    # Registered before the sessions' own, so that it runs after they have been closed.
    for region in list(_regions):
        region.close()


def _let_go(path: str, owner: int, lock: OwnerLock) -> None:
    # A forked child inherits the finaliser, and the file is not the child's to remove.
    if os.getpid() == owner:
        # Gone already, or not to be removed: cleaning finds that nobody uses it.
        with contextlib.suppress(OSError):
            os.unlink(path)
    lock.drop()


def _link(fd: int, path: str) -> None:
    # src_dir_fd makes Python call linkat, which can follow the /proc link.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def region_path(name: str) -> str:
    return f"{SHM_DIRECTORY}/{name}"


def region_files() -> list[str]:
    """Paths of all region files in /dev/shm, anybody's, in use or not.

    Only regular files: whoever opens a pipe that somebody put there waits for ever.
    Raises `RegionError` where this process cannot look.
    """
    try:
        with os.scandir(SHM_DIRECTORY) as entries:
            ours = [each for each in entries if each.name.startswith(PREFIX)]
            return [each.path for each in ours if each.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise could_not("look for shared memory regions", error) from error


@contextlib.contextmanager
def owner_is_dead(path: str) -> Iterator[bool]:
    """Whether no owner of a region file lives; none can appear while this goes on.

    Getting the exclusive lock is the proof: every process that uses a region holds the
    shared one, across PID namespaces too. Raises OSError if the file is gone or this
    user may not open it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UnsupportedPlatform(
            f"shared memory with Triton needs Linux, this is {sys.platform}.",
            hint="Run this on Linux, on the host of the server.",
        )


def could_not(what: str, error: OSError, **context: Any) -> RegionError:
    hint = (
        f"{SHM_DIRECTORY} must be a tmpfs that this user may write to, and /proc must"
        " be mounted."
    )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "This process has no descriptor left: see ulimit -n."
    text = f"could not {what} in {SHM_DIRECTORY}: {error.strerror}."
    return RegionError(text, hint=hint, errno=error.errno, **context)


def _fill(fd: int, mapping: mmap.mmap, options: RegionOptions) -> None:
    """Take every page now: a hole met later is a SIGBUS, in the server as well."""
    if options.hugepages == "auto" and _mount_advises_huge_pages():
        # Reserving first would take small pages, which stay small.
        mapping.madvise(mmap.MADV_HUGEPAGE)
        touch(mapping)
    nbytes = len(mapping)
    for offset in range(0, nbytes, _RESERVE_BYTES):
        try:
            os.posix_fallocate(fd, offset, min(_RESERVE_BYTES, nbytes - offset))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            ours = os.fstat(fd).st_blocks * _BLOCK_BYTES
            raise out_of_memory(nbytes, free_bytes(fd) + ours) from error
    if options.prefault:
        touch(mapping)
    if options.lock:
        _lock_pages(mapping)


def touch(mapping: mmap.mmap, start: int = 0, nbytes: int | None = None) -> None:
    """Map every page. Kernels before 5.14 cannot be asked to: the first use does it."""
    with contextlib.suppress(OSError):
        length = len(mapping) - start if nbytes is None else nbytes
        mapping.madvise(_MADV_POPULATE_WRITE, start, length)


def _mount_advises_huge_pages() -> bool:
    """Whether huge pages are given to whoever asks for them in /dev/shm (tmpfs(5))."""
    with contextlib.suppress(OSError), open("/proc/self/mounts") as mounts:
        found = [
            fields[3] for line in mounts if (fields := line.split())[1] == SHM_DIRECTORY
        ]
        return bool(found) and "huge=advise" in found[-1].split(",")
    return False


def _lock_pages(mapping: mmap.mmap) -> None:
    address = ctypes.c_void_p(np.frombuffer(mapping, np.uint8).ctypes.data)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(address, ctypes.c_size_t(len(mapping))) != 0:
        code = ctypes.get_errno()
        raise RegionError(
            f"could not lock {len(mapping)} bytes of shared memory in RAM:"
            f" {os.strerror(code)}.",
            hint="Raise the limit (ulimit -l), or leave RegionOptions(lock=) off.",
            nbytes=len(mapping),
            errno=code,
        )
