"""A fake Triton for tests, with models that are Python functions.

`ScriptedServer` needs neither a tritonserver nor a network, and makes at will what a
real server does rarely: hold requests, break off, restart, forget, answer nonsense.
"""

from __future__ import annotations

from .faults import (
    Answer,
    Close,
    Delay,
    Duplicate,
    Fault,
    Garbage,
    Reset,
    Status,
    Truncate,
)
from .http import Request
from .memory import RegisteredRegion
from .models import FakeModel, FakeTensor, identity_model, sink_model
from .server import ScriptedServer

__all__ = [
    "Answer",
    "Close",
    "Delay",
    "Duplicate",
    "FakeModel",
    "FakeTensor",
    "Fault",
    "Garbage",
    "RegisteredRegion",
    "Request",
    "Reset",
    "ScriptedServer",
    "Status",
    "Truncate",
    "identity_model",
    "sink_model",
]
