"""Logs of servers: kept as long as anybody may need them, and they tell the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.server.kept import KeptProcess, Leavings
from shmlane.server.logs import drop_old_logs
from tests.machine import parent
from tests.polling import eventually

DAY = 24 * 3600


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "mine.log"


@pytest.fixture
def kept(log: Path) -> Iterator[KeptProcess]:
    """A process that prints one line and waits."""
    process = KeptProcess(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
        environment={},
        log=log,
        leavings=Leavings(),
    )
    eventually(lambda: "up" in log.read_text(), "it has started")
    yield process
    process.kill()


def age(log: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(log, (then, then))


def others(folder: Path, *, days: float) -> list[Path]:
    """More logs than are kept."""
    logs = [folder / f"other-{number}.log" for number in range(60)]
    for log in logs:
        log.touch()
        age(log, days)
    return logs


def test_the_log_of_a_running_process_stays_however_old(
    kept: KeptProcess, log: Path
) -> None:
    others(log.parent, days=2)
    age(log, days=9)
    drop_old_logs(log.parent)
    assert kept.is_alive
    assert log.exists()
    kept.kill()
    age(log, days=9)
    drop_old_logs(log.parent)
    assert not log.exists()


def test_logs_of_the_last_day_stay_however_many(tmp_path: Path) -> None:
    logs = others(tmp_path, days=0.5)
    drop_old_logs(tmp_path)
    assert all(log.exists() for log in logs)


def test_the_newest_logs_stay_however_old(tmp_path: Path) -> None:
    others(tmp_path, days=2)
    drop_old_logs(tmp_path)
    assert len(list(tmp_path.iterdir())) == 50


def test_a_log_tells_that_its_process_was_stopped(kept: KeptProcess, log: Path) -> None:
    kept.stop()
    assert log.read_text().endswith(
        "the server ended by signal 15 (Terminated), as asked\n"
    )


def test_a_log_tells_that_its_process_was_killed(kept: KeptProcess, log: Path) -> None:
    kept.kill()
    assert log.read_text().endswith("the server ended by signal 9 (Killed), as asked\n")


def test_a_log_tells_that_its_process_ended_unasked(
    kept: KeptProcess, log: Path
) -> None:
    os.kill(kept.pid, signal.SIGKILL)
    eventually(lambda: not kept.is_alive, "the process is known to be dead")
    assert log.read_text().endswith("the server ended by signal 9 (Killed), unasked\n")


def test_a_log_tells_that_its_keeper_was_told_to_stop(
    kept: KeptProcess, log: Path
) -> None:
    os.kill(parent(kept.pid), signal.SIGTERM)
    eventually(lambda: not kept.is_alive, "the process has ended")
    told = (
        "the server ended by signal 15 (Terminated), as its keeper was told to stop\n"
    )
    assert log.read_text().endswith(told)
