"""Many requests at once on a scripted server: what is asked, and what must hold.

Owns the session that the tests of futures and streams share, and its items. Refuses
real servers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shmlane import Lease, Session, Timeouts
from shmlane.inventory import clean_up
from shmlane.receiver import Receiver
from shmlane.testing import FakeModel, ScriptedServer
from tests.polling import eventually
from tests.sessions import Array
from tests.unit.asked import session_on

SIZE = 8
LIMIT = 10.0

Pair = tuple[ScriptedServer, Session]


def _double(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    given = inputs["X"]
    if given[0] < 0:
        raise ValueError(f"the model takes no {given[0]:g}")
    return {"Y": 2 * given}


def doubling() -> FakeModel:
    """Twice what is given; it refuses what is below zero."""
    return FakeModel(
        "doubling",
        inputs={"X": ("FP32", (-1,))},
        outputs={"Y": ("FP32", (-1,))},
        run=_double,
    )


@contextlib.contextmanager
def flowing(
    *, slots: int = 2, memory: str = "system", **options: Any
) -> Iterator[Pair]:
    """A session whose tensors of eight numbers have their place from the start."""
    told: dict[str, Any] = {
        "shapes": {"X": (SIZE,)},
        "outputs": {"Y": (SIZE,)},
        "timeouts": Timeouts(connect=2.0, infer=LIMIT, lease=LIMIT),
    }
    with session_on(doubling(), slots=slots, memory=memory, **told | options) as pair:
        yield pair
    # What a session left that was closed with requests in flight.
    clean_up(only=pair[0].url)


def item(value: float) -> dict[str, Array]:
    return {"X": np.full(SIZE, value, np.float32)}


def fill(lease: Lease, value: float) -> None:
    """A `write` for streams whose items are numbers."""
    lease["X"][...] = value


def value_of(outputs: Mapping[str, Array]) -> float:
    """The value that these outputs, all of them, were made of."""
    output = outputs["Y"]
    assert output.shape == (SIZE,)
    assert (output == output[0]).all()
    return float(output[0]) / 2


def receiver_of(session: Session) -> Receiver:
    engine = session._engine
    assert engine is not None
    return engine.receiver


def is_idle(session: Session) -> None:
    """No thread of the session runs any more."""
    receiver = receiver_of(session)
    eventually(lambda: not receiver.is_busy, lambda: f"{receiver!r} is idle")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
