"""Models whose outputs have no fixed size, and what a scripted server was asked for.

Owns what the tests of requests share: models, sessions, and the requests as a server
reads them. Refuses real servers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shmlane import Session, Timeouts
from shmlane.slots import Slot
from shmlane.testing import FakeModel, Request, ScriptedServer
from tests.sessions import Array
from tests.unit.scripted import SMALL

QUICK = Timeouts(connect=2.0, infer=10.0, lease=5.0)


class Repeat:
    """A model whose output has as many elements as its input says; it counts runs.

    factor: so many times more with each run.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.factor = 1
        self.model = FakeModel(
            "repeat",
            inputs={"X": ("FP32", (1,))},
            outputs={"Y": ("FP32", (-1,))},
            run=self._run,
        )

    def _run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.runs += 1
        count = int(inputs["X"][0]) * self.factor**self.runs
        return {"Y": np.arange(count, dtype=np.float32)}


def count_of(session: Session, count: int, **told: Any) -> int:
    """How many elements came where so many were asked for; all are right."""
    came = session.infer({"X": np.array([count], np.float32)}, **told)["Y"]
    assert came.tolist() == list(range(len(came)))
    return len(came)


def doubling() -> FakeModel:
    """Twice as much as is given, of any length."""
    return FakeModel(
        "doubling",
        inputs={"X": ("FP32", (-1,))},
        outputs={"Y": ("FP32", (-1,))},
        run=lambda inputs: {"Y": 2 * inputs["X"]},
    )


def scores() -> FakeModel:
    """Four scores for each item of a batch, which are what is given."""
    return FakeModel(
        "scores",
        inputs={"X": ("FP32", (4,))},
        outputs={"Y": ("FP32", (4,))},
        run=lambda inputs: {"Y": inputs["X"]},
        max_batch_size=4,
        parameters={"mood": "good", "seen": 3},
    )


def words() -> FakeModel:
    """Strings of bytes, as they are given, and how long each is."""
    return FakeModel(
        "words",
        inputs={"W": ("BYTES", (-1,))},
        outputs={"W_OUT": ("BYTES", (-1,)), "LENGTHS": ("INT32", (-1,))},
        run=lambda inputs: {
            "W_OUT": inputs["W"],
            "LENGTHS": np.array([len(each) for each in inputs["W"]], np.int32),
        },
    )


@contextlib.contextmanager
def session_on(
    *models: FakeModel, server: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple[ScriptedServer, Session]]:
    """An open session with the first of these models, on a server of its own."""
    told: dict[str, Any] = {"slots": 1, "timeouts": QUICK, "region": SMALL} | options
    with (
        ScriptedServer(models, **(server or {})) as scripted,
        Session(scripted.url, models[0].name, **told) as session,
    ):
        yield scripted, session


def slots_of(session: Session) -> list[Slot]:
    engine = session._engine
    assert engine is not None
    return list(engine.pool.slots)


class Asked(NamedTuple):
    """An inference request: its id, its parameters, and where each tensor lies."""

    id: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @classmethod
    def read(cls, request: Request) -> Asked:
        length = request.headers.get("inference-header-content-length")
        document = json.loads(request.body[: int(length) if length else None])
        return cls(
            document["id"],
            document.get("parameters", {}),
            {each["name"]: _place(each) for each in document["inputs"]},
            {each["name"]: _place(each) for each in document["outputs"]},
        )


def asked(server: ScriptedServer) -> list[Asked]:
    """All inferences so far, in order."""
    return [Asked.read(each) for each in server.requests if each.is_inference]


def places(server: ScriptedServer, output: str = "Y") -> list[str]:
    """Where each inference so far wanted that output."""
    return [each.outputs[output] for each in asked(server)]


def _place(tensor: Mapping[str, Any]) -> str:
    parameters = tensor.get("parameters", {})
    if "shared_memory_region" in parameters:
        return "memory"
    return "nowhere" if "data" in tensor else "wire"
