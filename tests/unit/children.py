"""Python children of tests: run to the end, talked with, or in a /dev/shm of their own.

Owns starting and ending them. Refuses to leave one behind.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import pytest

_TIMEOUT = 60.0


def run_python(code: str, *arguments: str, prefix: Sequence[str] = ()) -> str:
    """What a program prints; it must end well and complain of nothing."""
    child = subprocess.run(
        [*prefix, sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, ""), child.stderr
    return child.stdout


class Child:
    """A running program. It says lines, and is told lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def hear(self) -> str:
        """Its next line; "" when it has ended."""
        return _open(self._process.stdout).readline().rstrip("\n")

    def tell(self, line: str) -> None:
        _open(self._process.stdin).write(f"{line}\n")
        _open(self._process.stdin).flush()

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._process.kill()
        self._process.wait(_TIMEOUT)


@contextmanager
def started(code: str, *arguments: str) -> Iterator[Child]:
    """A program that runs until the end of the block, at the latest."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def run_in_private_shm(code: str, *arguments: str, options: str = "size=1m") -> str:
    """`run_python` where /dev/shm is a new tmpfs that nobody else sees."""
    prefix = _private_shm(options)
    if reason := _why_not(prefix):
        pytest.skip(reason)
    return run_python(code, *arguments, prefix=prefix)


def _private_shm(options: str) -> tuple[str, ...]:
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    mount = f'mount -t tmpfs -o mode=1777,{options} tmpfs /dev/shm && exec "$0" "$@"'
    unshare = ("unshare", *user, "--mount", "--propagation", "private")
    return (*unshare, "sh", "-c", mount)


@functools.cache
def _why_not(prefix: tuple[str, ...]) -> str:
    try:
        child = subprocess.run(
            [*prefix, "true"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "there is no unshare (util-linux) on this machine"
    if child.returncode:
        return f"no /dev/shm of one's own on this machine: {child.stderr.strip()}"
    return ""


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
