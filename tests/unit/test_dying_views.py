"""Ctrl-C as one of several views of a slot dies: the slot comes back all the same."""

from __future__ import annotations

import collections
import ctypes
import gc
import itertools
import signal
import sys

import pytest

from tests.sessions import all_free
from tests.unit.flowing import fill, flowing

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm"),
    # What is raised as something dies, Python drops and says so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_the_slot_comes_back_with_the_last_view() -> None:
    send_signal = ctypes.CDLL(None)["raise"]
    with flowing(slots=1) as (_, session):
        with session.lease() as lease:
            fill(lease, 1)
            views = [None, lease.infer()["Y"], lease["X"]]
        # Whoever comes now gets a spare one, and the slot is watched.
        session.lease().release()
        # No line of Python runs between the signal and the death of the view.
        signalled = itertools.starmap(send_signal, [(signal.SIGINT,)])
        dies = map(views.pop, itertools.repeat(-1, 1))
        try:
            collections.deque(itertools.chain(signalled, dies), maxlen=0)
            gc.collect()
        except KeyboardInterrupt:
            pass
        views.clear()
        with session.lease(timeout=5), session.lease(timeout=5):
            pass
        all_free(session)
