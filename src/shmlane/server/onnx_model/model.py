"""Triton Python backend that runs one ONNX network with onnxruntime.

Owns the model object that Triton's stub loads; a copy of this file stands beside
`model.onnx` in a model repository. Tensor names come from the model's configuration.
Refuses nothing itself: what onnxruntime cannot run becomes that request's error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One network with one input and one output."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the network that stands beside this file."""
        config = json.loads(args["model_config"])
        self._input = config["input"][0]["name"]
        self._output = config["output"][0]["name"]
        options = onnxruntime.SessionOptions()
        threads = config["parameters"]["intra_op_num_threads"]["string_value"]
        options.intra_op_num_threads = int(threads)
        self._network = onnxruntime.InferenceSession(
            str(Path(__file__).with_name("model.onnx")),
            options,
            providers=["CPUExecutionProvider"],
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request by itself: one that fails harms no other."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        given = pb_utils.get_input_tensor_by_name(request, self._input).as_numpy()
        try:
            (found,) = self._network.run([self._output], {self._input: given})
        except Exception as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(self._output, found)])
