"""The models of the session tests; runs inside the server, in its Python backend.

`rows` batches: the sum of each row of VALUES, and MARKS as they came or -1 where that
optional input is absent. `types` turns the order of each tensor round. `moody` obeys
ORDER = (token, count, milliseconds): it waits, then answers `count` times the token;
a negative token is refused.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the backend looks for in a model's file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Learn which of the models this is."""
        self.answer = getattr(self, args["model_name"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self.respond(request) for request in requests]

    def respond(self, request: Any) -> Any:
        """A reply with the tensors that the model makes, or its refusal."""
        inputs = {each.name(): each.as_numpy() for each in request.inputs()}
        try:
            outputs = self.answer(inputs)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        )

    def rows(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Two outputs, of which one follows an optional input."""
        values = inputs["VALUES"]
        marks = inputs.get("MARKS", np.full((len(values), 2), -1, np.int8))
        return {"SUMS": values.sum(axis=1, keepdims=True), "MARKED": marks}

    def types(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Each tensor backwards."""
        return {
            "OUT" + name.removeprefix("IN"): np.ascontiguousarray(array[::-1])
            for name, array in inputs.items()
        }

    def moody(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Slow, failing, or of any length, as told."""
        token, count, milliseconds = (int(each) for each in inputs["ORDER"])
        if token < 0:
            raise ValueError(f"moody takes no {token}")
        time.sleep(milliseconds / 1000)
        return {"REPLY": np.full(count, token, np.int32)}
