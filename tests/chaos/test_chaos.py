"""A short run of chaos on a real server; `make chaos` makes a long one.

SHMLANE_CHAOS_SECONDS and SHMLANE_CHAOS_SEED say how long and which. Without a seed it
is drawn from that of the whole test run, which is printed in its header.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos.conductor import run, say

SECONDS = float(os.environ.get("SHMLANE_CHAOS_SECONDS", "45"))


# The faults take their time; calm points may take as long again on a busy machine.
@pytest.mark.timeout(2 * SECONDS + 240)
@pytest.mark.usefixtures("no_leftovers")
def test_no_fault_gives_anyone_a_wrong_value_or_keeps_anything() -> None:
    seed = os.environ.get("SHMLANE_CHAOS_SEED") or f"{random.getrandbits(32):08x}"
    say(f"chaos with SHMLANE_CHAOS_SEED={seed}")
    done = run(seconds=SECONDS, seed=seed)
    say(str(done))
    assert done.complaints() == [], f"seed {seed}\n{done}"
