"""A short run of chaos on a real server; `make chaos` makes a long one.

SHMLANE_CHAOS_SECONDS and SHMLANE_CHAOS_SEED say how long and which. Without a seed it
is drawn from that of the whole test run, which is printed in its header.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.inventory import clean_up
from tests.chaos.conductor import run, say
from tests.chaos.faults import forget_strangers
from tests.machine import descendants, is_running
from tests.polling import eventually
from tests.sessions import region_files

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("SHMLANE_CHAOS_SECONDS", "45"))


# The faults take their time; calm points may take as long again on a busy machine.
@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS + 240)
@pytest.mark.usefixtures("no_leftovers")
def test_no_fault_gives_anyone_a_wrong_value_or_keeps_anything() -> None:
    seed = os.environ.get("SHMLANE_CHAOS_SEED") or f"{random.getrandbits(32):08x}"
    say(f"chaos with SHMLANE_CHAOS_SEED={seed}")
    done = run(seconds=SECONDS, seed=seed)
    say(str(done))
    assert done.complaints() == [], f"seed {seed}\n{done}"


def clean_up_after(pids: set[int]) -> None:
    """Remove what these left, and nothing that others on this machine use or left."""
    for path in region_files():
        with contextlib.suppress(FileNotFoundError, RegionError):
            told = RegionHeader.parse(path.read_bytes()).description
            if told["pid"] in pids:
                clean_up(only=str(told["server"]))


@pytest.mark.usefixtures("no_leftovers")
def test_no_process_outlives_a_conductor_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--seconds", "60"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    ) as conductor:
        # A keeper, its server and three clients.
        started = eventually(
            lambda: len(found := descendants(conductor.pid)) >= 5 and found,
            "a server and clients run",
            timeout=60,
        )
        conductor.kill()
    assert started
    eventually(lambda: not any(map(is_running, started)), "all of them have ended")
    clean_up_after(started)
    forget_strangers(conductor.pid)
