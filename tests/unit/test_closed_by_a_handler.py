"""A session that a signal handler closes amid the inference of the same thread."""

from __future__ import annotations

import signal
import threading

from tests.polling import eventually
from tests.unit.asked import asked
from tests.unit.flowing import Gates, flowing, item, value_of
from tests.unit.one_slot import files_of


def test_the_inference_goes_on() -> None:
    """Its reply comes only after that: closing cannot wait for it."""
    gates = Gates()
    gate = gates.shut(7)
    with flowing(slots=2, gates=gates) as (server, session):
        session.open()
        home = threading.get_ident()

        def interrupt() -> None:
            eventually(lambda: len(asked(server)) == 1, "the request has come")
            signal.pthread_kill(home, signal.SIGUSR1)

        def close(*_: object) -> None:
            session.close()
            gate.set()

        interrupting = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGUSR1, close)
        try:
            interrupting.start()
            outputs = session.infer(item(7))
        finally:
            signal.signal(signal.SIGUSR1, before)
            interrupting.join()
        assert value_of(outputs) == 7
        assert (server.regions, files_of(server)) == ({}, [])
