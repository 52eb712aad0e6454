"""How blocking code has a talk with the server.

Owns sending the requests of a talk, waiting for the replies and for its pauses. Refuses
to know what is talked about.
"""

from __future__ import annotations

import time
from typing import TypeVar

from .control import Pause, Talk
from .slots import Channel
from .timing import Deadline

T = TypeVar("T")


def run(talk: Talk[T], channel: Channel, deadline: Deadline) -> T:
    """The outcome of a talk over `channel`; raises what the talk and `call` raise."""
    reply = None
    while True:
        try:
            step = talk.send(reply)
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        if isinstance(step, Pause):
            reply = None
            time.sleep(step.seconds)
        else:
            reply = channel.call(step, deadline)
