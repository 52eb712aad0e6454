"""Stands in for the detector of the documentation: its tensors, none of its wits."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fills the boxes with the mean of the picture."""

    def execute(self, requests: list[object]) -> list[object]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: object) -> object:
        images = pb_utils.get_input_tensor_by_name(request, "images").as_numpy()
        boxes = np.full((1, 84, 8400), images.mean(), np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("output0", boxes)])
