"""Traces: what is found as left behind, and what is not."""

from __future__ import annotations

import mmap
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.demo import traces
from shmlane.demo.traces import Traces
from shmlane.regions import Region

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_PATIENCE", 0.0)


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = Path("/dev/shm", f"test-traces-{secrets.token_hex(6)}")
    yield path
    path.unlink(missing_ok=True)


def test_a_forgotten_file_is_named(shared_file: Path) -> None:
    before = Traces()
    shared_file.write_bytes(b"left")
    assert f"file {shared_file}" in before.left()
    shared_file.unlink()
    assert f"file {shared_file}" not in before.left()


def test_a_file_that_was_there_before_is_not_counted(shared_file: Path) -> None:
    shared_file.write_bytes(b"old")
    assert f"file {shared_file}" not in Traces().left()


def test_a_file_that_somebody_maps_is_in_use_and_not_left(shared_file: Path) -> None:
    before = Traces()
    shared_file.write_bytes(b"in use")
    with (
        shared_file.open("r+b") as file,
        mmap.mmap(file.fileno(), 0),
    ):
        assert f"file {shared_file}" not in before.left()
    assert f"file {shared_file}" in before.left()


def test_a_region_of_a_living_process_is_not_counted() -> None:
    before = Traces()
    region = Region(4096, header=b"")
    assert f"file {region.path}" not in before.left()
    region.close()
    assert f"file {region.path}" not in before.left()


def test_a_child_process_counts_until_it_ends() -> None:
    before = Traces()
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert f"process {child.pid}" in before.left()
    finally:
        child.kill()
        child.wait()
    assert f"process {child.pid}" not in before.left()
