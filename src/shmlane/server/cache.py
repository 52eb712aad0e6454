"""The folder where things made on first use are kept.

Owns where it lies, the locks that let several processes make one thing at once, and
the progress lines of doing so. A folder counts only once its marker file is written,
which is the last step of making it: whatever a killed process left half made is thrown
away by the next one. Folders are made in place rather than moved there, because a
virtual environment names its own path. Refuses to touch anything outside the cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shmlane.errors import InstallFailed, UnsupportedPlatform

_MARKER = ".complete"
_LOCK_TIMEOUT = 900.0
_LOCK_POLL = 0.1
_LOCK_QUIET = 1.0


def cache_root() -> Path:
    """Where servers, environments, built models and logs are kept.

    `SHMLANE_CACHE` if set, else `shmlane` under `XDG_CACHE_HOME` or `~/.cache`.
    """
    if own := os.environ.get("SHMLANE_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shmlane"


def say(line: str) -> None:
    """One line for people, on stderr: stdout belongs to the program's results."""
    sys.stderr.write(f"shmlane: {line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def progress(label: str) -> Iterator[None]:
    """A line before work that takes a while, and one once it is done."""
    started = time.monotonic()
    say(f"{label} …")
    yield
    say(f"{label}: done in {time.monotonic() - started:.1f} s")


def make_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    label: str | None = None,
    healthy: Callable[[Path], bool] = lambda folder: True,
) -> Path:
    """Return `folder`, built by `build(folder)` unless an earlier call finished it.

    Safe when several processes or threads ask at once: one builds, the others wait.
    `healthy` tells whether a finished folder still works; one that does not is rebuilt.
    `label` names the work in progress lines on stderr.
    """

    def is_ready() -> bool:
        return (folder / _MARKER).exists() and healthy(folder)

    if is_ready():
        return folder
    with locked(folder):
        if not is_ready():
            _build(folder, build, label)
    return folder


def _build(folder: Path, build: Callable[[Path], None], label: str | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with progress(label) if label else contextlib.nullcontext():
            build(folder)
        (folder / _MARKER).touch()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, with a clear error where that is not allowed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InstallFailed(
            f"the cache folder {folder} cannot be written: {error.strerror}.",
            hint="Set SHMLANE_CACHE to a folder that can.",
            folder=str(folder),
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` against other processes and threads.

    The lock file stays: removing it would let two holders lock two different files of
    the same name. The kernel releases the lock of a process that dies.
    """
    try:
        import fcntl
    except ImportError:
        raise UnsupportedPlatform(
            "running a tritonserver from here needs Linux.",
            hint="Start one elsewhere and pass its address.",
        ) from None
    path = folder.with_name(f".{folder.name}.lock")
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait_for_lock(
            lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), path
        )
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(take: Callable[[], None], path: Path) -> None:
    started = time.monotonic()
    announced = False
    while True:
        try:
            return take()
        except BlockingIOError:
            waited = time.monotonic() - started
        if waited > _LOCK_QUIET and not announced:
            say(f"waiting for another process that holds {path}")
            announced = True
        if waited > _LOCK_TIMEOUT:
            raise InstallFailed(
                f"another process has held {path} for {_LOCK_TIMEOUT:.0f} s.",
                hint="See what it does (fuser names it) and try again.",
                lock=str(path),
            )
        time.sleep(_LOCK_POLL)
