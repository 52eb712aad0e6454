"""Models with awkward tensors; runs inside the server, in its Python backend.

`mixed` takes and makes several types at once, one of them optional. `repeated` answers
with as many elements as its input says, `spelled` with strings as long as it says;
`doubled` doubles. `classified` has labels. `running` adds up a sequence. `reported`
tells what it sees of a request, and waits first as long as it is told to; `queued` is
the same behind a queue with priorities.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the backend looks for in a model's file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Learn which of the models this is."""
        self.answer = getattr(self, args["model_name"])
        self.version = args["model_version"]
        self.sums: dict[Any, int] = {}
        self.turn = 0

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self.respond(request) for request in requests]

    def respond(self, request: Any) -> Any:
        """A reply with the tensors that the model makes and the request asks for."""
        inputs = {each.name(): each.as_numpy() for each in request.inputs()}
        wanted = set(request.requested_output_names())
        outputs = [
            pb_utils.Tensor(name, np.ascontiguousarray(array))
            for name, array in self.answer(request, inputs).items()
            if name in wanted
        ]
        return pb_utils.InferenceResponse(outputs)

    def mixed(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Three outputs, each from the input that it is like."""
        numbers, words = inputs["NUMBERS"], inputs["WORDS"]
        flags = inputs.get("FLAGS", np.zeros((len(numbers), 2), bool))
        backwards = [word[::-1] for word in words.reshape(-1)]
        return {
            "TOTALS": numbers.sum(axis=1, keepdims=True).astype(np.float64),
            "BACKWARDS": np.array(backwards, np.object_).reshape(words.shape),
            "FLIPPED": ~flags,
        }

    def repeated(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Each value as often as told."""
        return {"REPEATED": np.repeat(inputs["VALUES"], inputs["COUNTS"])}

    def spelled(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Strings of the lengths told, each of one digit of its place."""
        texts = [b"%d" % (i % 10) * n for i, n in enumerate(inputs["LENGTHS"])]
        return {"TEXTS": np.array(texts, np.object_)}

    def doubled(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Twice each value."""
        return {"DOUBLED": inputs["VALUES"] * 2}

    def classified(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """The scores as they came."""
        return {"SCORES": inputs["FEATURES"], "SIZES": inputs["FEATURES"].sum(axis=1)}

    def running(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """The sum of a sequence so far; forgotten with its end."""
        key = inputs["ID"].reshape(-1)[0]
        if inputs["START"].reshape(-1)[0]:
            self.sums[key] = 0
        self.sums[key] += int(inputs["VALUE"].reshape(-1)[0])
        total = self.sums[key]
        if inputs["END"].reshape(-1)[0]:
            del self.sums[key]
        return {"SUM": np.array([[total]], np.int32)}

    def reported(self, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """What came with the request, as JSON; `turn` counts those that were run."""
        self.turn += 1
        time.sleep(int(inputs["DELAY_MS"][0]) / 1000)
        report = {
            "id": request.request_id(),
            "sequence_id": request.correlation_id(),
            "flags": request.flags(),
            "queue_timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "version": self.version,
            "turn": self.turn,
        }
        return {"REPORT": np.array([json.dumps(report).encode()], np.object_)}

    queued = reported
