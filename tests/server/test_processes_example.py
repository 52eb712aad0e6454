"""The example with a decoder and consumers runs as its page says."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from examples import processes
from shmlane import HandoffExpired, Session
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


def test_a_frame_that_was_taken_back_is_answered_too(server: TritonServer) -> None:
    shapes = {processes.INPUT: processes.SHAPE}
    jobs: Queue[processes.Job] = multiprocessing.Queue()
    answers: Queue[processes.Answer] = multiprocessing.Queue()
    with Session(server.http_url, "identity", slots=1, shapes=shapes) as session:
        handle = session.share(slots=2)
        with Session.attach(handle, slots=2) as decoder:
            for number in range(2):
                with decoder.lease() as lease:
                    processes.draw_into(lease[processes.INPUT], number)
                    ref = lease.detach()
                if number == 0:
                    session.adopt(ref).release()
                jobs.put((number, ref))
            jobs.put(None)
            processes.consume(handle, jobs, answers)
            (first, error), second = (answers.get(timeout=10) for _ in range(2))
    assert (first, type(error), second) == (0, HandoffExpired, (1, 1.0))


def test_a_frame_without_an_answer_is_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(0, 0.0), (1, HandoffExpired("it was taken back."))]
    monkeypatch.setattr(processes, "run", lambda *given: found)
    with pytest.raises(SystemExit) as ended:
        processes.main(["--url", "127.0.0.1:9"])
    assert ended.value.code == "frame 1 has no answer: it was taken back."
