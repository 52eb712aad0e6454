"""A run that leaves a region of its own in /dev/shm has failed, whatever passed.

`no_leftovers` guards the tests that ask for it; this looks once, at the end, for what
slipped by all of them. Only regions whose header names this process count: others may
run on the same machine. Where several processes share the tests, each looks for its
own, and the one that started them tells of all.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest

from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.regions import region_files

_HEADER_BYTES = 1 << 16
_LEFT = pytest.StashKey[list[str]]()
_KEY = "regions left behind"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended."""
    # One that crashed has said nothing.
    told = getattr(node, "workeroutput", {}).get(_KEY, [])
    node.config.stash[_LEFT].extend(told)


@pytest.hookimpl(trylast=True)  # after the fixtures of the session have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.collect()
    left = session.config.stash[_LEFT]
    left.extend(path for path in region_files() if _is_of_this_process(path))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash[_LEFT]:
        terminalreporter.section("regions left behind by this run", red=True)
        for path in sorted(left):
            terminalreporter.line(path)


def _is_of_this_process(path: str) -> bool:
    with contextlib.suppress(OSError, RegionError), open(path, "rb") as file:
        header = RegionHeader.parse(file.read(_HEADER_BYTES))
        return bool(header.description.get("pid") == os.getpid())
    return False
