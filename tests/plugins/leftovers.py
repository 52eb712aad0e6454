"""A run that leaves a region of its own in /dev/shm has failed, whatever passed.

`no_leftovers` guards the tests that ask for it; this looks once, at the end, for what
slipped by all of them. Only regions whose header names this process count: others may
run on the same machine.
"""

from __future__ import annotations

import contextlib
import gc
import os

import pytest

from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.regions import region_files

_HEADER_BYTES = 1 << 16
_LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after the fixtures of the session have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.collect()
    left = sorted(path for path in region_files() if _is_of_this_process(path))
    session.config.stash[_LEFT] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("regions left behind by this run", red=True)
        for path in left:
            terminalreporter.line(path)


def _is_of_this_process(path: str) -> bool:
    with contextlib.suppress(OSError, RegionError), open(path, "rb") as file:
        header = RegionHeader.parse(file.read(_HEADER_BYTES))
        return bool(header.description.get("pid") == os.getpid())
    return False
