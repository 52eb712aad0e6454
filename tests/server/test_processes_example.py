"""The example with a decoder and consumers runs as its page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shmlane.server import TritonServer

pytestmark = pytest.mark.usefixtures("no_leftovers")

PROGRAM = Path(__file__).parents[2] / "examples" / "processes.py"


@pytest.mark.parametrize("consumers", [1, 3])
def test_every_answer_is_that_of_its_frame(
    server: TritonServer, consumers: int
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", str(PROGRAM)),
            *("--url", server.http_url),
            *("--frames", "60", "--consumers", str(consumers)),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"60 frames, 166 MB, by {consumers} consumers" in done.stdout
