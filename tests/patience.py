"""Calls that give up on a reply: after the request was sent, however busy the machine.

Owns short limits that must not pass before the first byte has left. Refuses to wait
for anything else: that is `polling`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shmlane import InferTimeout


def given_up(ask: Callable[[float], object], *, limit: float = 0.05) -> InferTimeout:
    """What `ask(limit)` raises, whose reply does not come in time.

    It is asked again, with more time, where that was over before anything was sent.
    """
    while True:
        try:
            ask(limit)
        except InferTimeout as error:
            if "nothing was sent" not in str(error):
                # Whose frames would keep what the test lets go of.
                return error.with_traceback(None)
        else:
            pytest.fail("the reply came")
        limit *= 2
