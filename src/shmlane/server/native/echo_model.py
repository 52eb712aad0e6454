"""The demo models in Triton's Python backend, where no C compiler is.

Runs inside the server, never in the client. Owns the same behaviour as `echo.c`: a
model whose name begins with `sink` answers with the last element of its input, any
other with all of it; a request parameter `delay_ms` holds the reply back.
"""

from __future__ import annotations

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the backend looks for in a model's file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Learn which of the two models this is and what its tensors are called."""
        config = json.loads(args["model_config"])
        self.is_sink = args["model_name"].startswith("sink")
        self.input = config["input"][0]["name"]
        self.output = config["output"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request of a batch on its own."""
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        """The reply to one request."""
        delay_ms = json.loads(request.parameters()).get("delay_ms", 0)
        if not 0 <= delay_ms <= 60000:
            return failure("delay_ms must be 0 to 60000")
        time.sleep(delay_ms / 1000)
        values = pb_utils.get_input_tensor_by_name(request, self.input).as_numpy()
        if self.is_sink:
            if not values.size:
                return failure("sink needs at least one element")
            values = values.reshape(-1)[-1:]
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.output, values)])


def failure(message: str) -> Any:
    """A reply that carries an error."""
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)
