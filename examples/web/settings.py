"""What all the services here are told: where Triton is, and how long they wait.

Owns the names and the sizes; each can be set in the environment. Refuses to connect.
"""

from __future__ import annotations

import os

import shmlane

URL = os.environ.get("TRITON_URL", "localhost:8000")
MODEL = "survey"
# The largest input: what a slot holds. One picture for each request; Triton gathers
# those of several requests into batches.
SHAPES = {"PICTURE": (1, 3, 224, 224)}
# As many as requests that one process has with the model at once.
SLOTS = int(os.environ.get("TRITON_SLOTS", "4"))
# Together shorter than what the proxy in front waits, and than gunicorn's `timeout`:
# the answer "too busy" is of use only to a client that is still there.
TIMEOUTS = shmlane.Timeouts(
    connect=1.0,
    lease=float(os.environ.get("TRITON_LEASE_TIMEOUT", "2")),
    infer=float(os.environ.get("TRITON_INFER_TIMEOUT", "10")),
)
# Of a request's body.
MAX_BYTES = 8 << 20
